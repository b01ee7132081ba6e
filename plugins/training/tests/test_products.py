"""Products in fp8 and tf32 of a training step, forwards and backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import finecast.torch as ft
from finecast import Format, Policy
from finecast.engines.torch import rates
from finecast.engines.torch.costs import KernelTimes
from finecast.errors import UsageError
from finecast.progress import silent
from finecast_training import products
from finecast_training.backend import Backend, compiled
from finecast_training.products import FP8, formats_of, scaled_product
from finecast_training.step_plan import StepPlan, Way
from finecast_training.step_search import StepSearch
from finecast_training.step_tuning import StepResult
from finecast_training.target import Sampling, StepTarget
from plugins.training.tests.stated_steps import stated

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
Array = NDArray[np.float32]
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def coded(x: Array, axis: int, dtype: Any = E4M3) -> Array:
    """Rows or columns in fp8 by their largest number, written without finecast's code."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    scale = (np.abs(x).max(axis=axis, keepdims=True) / largest).astype(np.float32)
    return np.asarray((x / scale).astype(dtype).astype(np.float32) * scale)


def tf32(x: Array) -> Array:
    """Rounded to ten bits of fraction, to nearest and ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0xFFF + ((bits >> 13) & 1)) >> 13 << 13
    return bits.astype(np.uint32).view(np.float32)


def equal(got: torch.Tensor | None, left: Array, right: Array, added: Any = 0.0) -> None:
    """To the last digits of fp32, of the sum of the products' magnitudes."""
    assert got is not None
    exact = left.astype(np.float64) @ right.astype(np.float64) + added
    size = np.abs(left).astype(np.float64) @ np.abs(right) + np.abs(added)
    off = np.abs(got.detach().numpy() - exact)
    assert float((off / size).max()) < 4 * Format.FP32.unit_roundoff


class Stacked(nn.Module):
    """Two layers without anything in between, so that each product can be written down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("label", [FP8.label, "tf32"])
def test_results_and_gradients_equal_those_of_numpy(label: str) -> None:
    net, x, d = Stacked(), torch.randn(48, 32), torch.randn(48, 16)
    call = compiled(net, backend := Backend(f"matmult:{label}", kernels=False))
    result = call(x)
    result.backward(d)
    assert [p.counts[label] for p in backend.plans] == [5]
    w1, w2, b1, b2 = (
        p.detach().numpy()
        for p in (net.first.weight, net.last.weight, net.first.bias, net.last.bias)
    )
    a, g = x.numpy(), d.numpy()
    in_fp8 = label == FP8.label

    def left(x: Array, dtype: Any = E4M3) -> Array:
        return coded(x, -1, dtype) if in_fp8 else tf32(x)

    def right(x: Array) -> Array:
        return coded(x, -2) if in_fp8 else tf32(x)

    # The middle value and its gradient are the kernels' own, of which codes are made.
    with torch.no_grad():
        h = _product(x, net.first.weight.t(), in_fp8, b1)
        dh = _product(d, net.last.weight, in_fp8, gradient=True)
    equal(torch.from_numpy(h), left(a), right(w1.T), b1)
    equal(torch.from_numpy(dh), left(g, E5M2), right(w2))
    equal(result, left(h), right(w2.T), b2)
    equal(net.last.weight.grad, left(g.T, E5M2), right(h))
    equal(net.first.weight.grad, left(dh.T, E5M2), right(a))
    assert np.array_equal(net.last.bias.grad.numpy(), d.sum(0).numpy())  # type: ignore[union-attr]


def _product(
    a: torch.Tensor, b: torch.Tensor, in_fp8: bool, bias: Any = 0.0, *, gradient: bool = False
) -> Array:
    """As PyTorch's own kernel gives it, in the order of its sums."""
    if not in_fp8:
        return (
            torch.from_numpy(tf32(a.numpy())).matmul(torch.from_numpy(tf32(b.numpy()))).numpy()
            + bias
        )
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    rows = a.abs().amax(1, keepdim=True) / torch.finfo(dtype).max
    columns = b.abs().amax(0, keepdim=True) / 448.0
    one = torch.ones(())
    codes = (b / columns).to(torch.float8_e4m3fn).t().contiguous().t()
    kernel = torch.ops.aten._scaled_mm.default
    sums = kernel((a / rows).to(dtype), codes, one, one, None, None, torch.float32)
    return (sums * rows * columns).numpy() + bias


def test_results_that_are_read_in_bf16_are_given_in_bf16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[tuple[bool, torch.dtype]]()

    def recorded(*matrices: torch.Tensor, **how: Any) -> torch.Tensor:
        result = scaled_product(*matrices, **how)
        given.append((how["low"], result.dtype))
        return result

    monkeypatch.setattr(products, "scaled_product", recorded)
    net, x = (
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)),
        torch.randn(48, 32),
    )
    call = compiled(net, backend := Backend("all:fp8_dynamic_row,bf16", kernels=False))
    call(x).sum().backward()
    assert backend.plans[0].counts[FP8.label] == 5
    # The second one's is the net's own result, in fp32.
    low, wide = torch.bfloat16, torch.float32
    assert given == [(True, low), (False, wide), (True, low), (True, low), (True, low)]
    a, w, b = torch.randn(48, 32), torch.randn(32, 16), torch.randn(16)
    got = scaled_product(b, a, w, gradients=(False, False), low=True)
    exact = coded(a.numpy(), -1).astype(np.float64) @ coded(w.numpy(), -2)
    exact += b.bfloat16().float().numpy()
    off = np.abs(got.float().numpy() - exact) / np.abs(exact).clip(1e-2)
    assert float(off.max()) <= Format.BF16.unit_roundoff * (1 + 1e-3)


def test_compiled_kernels_give_the_numbers_of_the_step_op_by_op() -> None:
    x, gradients = torch.randn(48, 32), list[torch.Tensor]()
    for kernels in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(32, 16)
        call = compiled(net, Backend("matmult:fp8_dynamic_row", kernels=kernels))
        call(x).square().sum().backward()
        assert net.weight.grad is not None
        gradients.append(net.weight.grad)
    off = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert float(off) < FP8.unit_roundoff / 64


class Attention(nn.Module):
    """A product whose weights have an odd size, and one of two values in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.odd(y @ y.transpose(1, 2) @ y)


@pytest.mark.parametrize("label", [FP8.label, "tf32"])
def test_what_no_kernel_computes_stays_in_fp32(label: str) -> None:
    net, x = Attention(), torch.randn(2, 16, 32)
    backend = Backend(f"all:{label}", kernels=False)
    compiled(net, backend)(x).sum().backward()
    (plan,) = backend.plans
    low = {d.op for d in plan.decisions if d.format is not Format.FP32}
    why = {r.text for d in plan.decisions for r in d.reasons}
    assert low == ({"addmm", "matmul"})  # of the first layer, or of all
    batched = [d for d in plan.decisions if d.node.rpartition("/")[2].startswith("bmm")]
    assert {d.format.label for d in batched} == ({"fp32"} if label == FP8.label else {label})
    if label == FP8.label:
        sizes = "the matrices are 32x32 by 32x10"
        assert any(sizes in text and "a multiple of 16" in text for text in why)


def fast(*_: object) -> None:
    """Times are those of the rates below."""


def rate(device: str, fmt: Format, threads: int) -> rates.Rate:
    del device, threads
    speed = {Format.FP32: 1.0, Format.BF16: 4.0}.get(fmt, 16.0)
    return rates.Rate(
        product_tflops=0.0001 * speed, speed=speed, bandwidth_gb_s=5e4, overhead_s=1e-9
    )


class WithSide(nn.Module):
    """A net with a large branch, of constant weights, that counts for next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 16)
        self.side = nn.Sequential(nn.Linear(32, 512), nn.Linear(512, 16))
        self.side.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.first(x))) + 1e-3 * self.side(x)


def loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(x), y)


@pytest.fixture
def _stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and a step is the faster the more products are in fp8."""
    stated(monkeypatch, _seconds)
    monkeypatch.setattr(rates, "rate", rate)
    monkeypatch.setattr(KernelTimes, "time_s", fast)


def _seconds(plan: StepPlan) -> float:
    if plan.way is not Way.PLANNED:
        return {Way.FP32: 2.0, Way.AUTOCAST: 1.0}[plan.way]
    return 0.95 - 0.05 * plan.counts.get(FP8.label, 0)


@pytest.mark.usefixtures("_stated")
def test_products_are_in_fp8_where_gradients_stay_as_exact_as_autocasts(
    tmp_path: Path,
) -> None:
    net, x, y = WithSide(), torch.randn(48, 32), torch.randint(0, 16, (48,))
    result: StepResult = ft.tune_step(
        net, loss, [(x, y)], policy="auto:bf16,fp8_dynamic_row", max_memory=10**9, moments=1,
        between=0,
    )  # fmt: skip
    (plan,) = result.plan.plans
    low = [d.node for d in plan.decisions if d.format is FP8]
    assert low
    assert all("side" in name for name in low)
    assert result.best.compiled is not None
    autocast = next(c for c in result.candidates if c.plan.way is Way.AUTOCAST)
    assert autocast.compiled is not None
    assert result.best.compiled.beyond(autocast.compiled) == []
    every = next(c for c in result.candidates if c.plan.name == "products in fp8_dynamic_row")
    assert every.plan.counts[FP8.label] > len(low)
    assert every.why.startswith("worse than torch.autocast: gradients: error")
    result.save(tmp_path / "step.json")
    step = ft.load_step(tmp_path / "step.json", net, loss)
    assert step.plan.digest == result.plan.digest
    gradients = list[torch.Tensor]()
    for own in (result.step, step):
        net.zero_grad()
        own(x, y).backward()
        assert net.first.weight.grad is not None
        gradients.append(net.first.weight.grad.clone())
    assert torch.equal(*gradients)
    assert [p.digest for p in step.plans] == [plan.digest]


def test_an_overflow_by_fp8_is_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1.75 and 1.13, the largest of a row, e5m2 makes 1.75 and 1.25: too much in fp32."""
    net = nn.Linear(16, 16, bias=False)
    nn.init.zeros_(net.weight)
    coefficients = torch.zeros(16, 16)
    coefficients[0], coefficients[1] = 1.75 * 1.15e38, 1.13 * 1.15e38

    def planted(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (net(x) * coefficients).sum()

    monkeypatch.setattr(rates, "rate", rate)
    target = StepTarget.of(net, planted, [(torch.ones(16, 16),)], [])
    target.sample(Sampling(moments=1, between=0, batches=1))
    policy = Policy("all:fp8_dynamic_row,bf16")
    search = StepSearch(
        target=target, policy=policy, objective="time", max_memory=None, progress=silent
    )
    search.graphs.append("")  # or else the first plan is autocast's
    search.autocast = search._compare(search._plan("torch.autocast", Way.AUTOCAST))
    assert not search.autocast.exactness.gradients.broken
    candidate = search._by_rules("products in fp8_dynamic_row", policy, "finecast")
    assert candidate is not None
    assert candidate.plan.counts[FP8.label] == 2
    assert search._judge(candidate, search.autocast.exactness)
    assert "overflow: Inf or NaN first in the gradient of weight" in candidate.why


@pytest.mark.parametrize(
    ("capability", "formats"),
    [((7, 0), []), ((8, 0), ["tf32"]), ((8, 9), ["fp8_dynamic_row", "tf32"])],
)
def test_gpus_have_the_formats_of_their_generation(
    capability: tuple[int, int], formats: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert [f.label for f in formats_of("cuda")] == formats
    assert formats_of("cpu") == ()


def test_a_guests_rules_have_no_such_products() -> None:
    with pytest.raises(UsageError, match="raf has no products in fp8_dynamic_row"):
        Backend("all:fp8_dynamic_row", rule_set="raf")


def test_the_switch_of_tf32_is_put_back() -> None:
    switch: Any = torch.backends.cuda.matmul
    before, within = switch.fp32_precision, list[str]()

    def failing() -> None:
        within.append(switch.fp32_precision)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rates.in_format(failing, Format.TF32)()
    assert within == ["tf32"]
    assert switch.fp32_precision == before
