"""Values of PyTorch programs scaled into fp16's range, from a module to its fp16 module."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from finecast import api
from finecast.devices.emulation import explicit_casts
from finecast.frontends.torch import capture
from finecast.frontends.torch.native import adjusted
from finecast.native.model import ReadOptions
from finecast.native.opening import opened
from finecast.native.torch.model import TorchModel
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from tests.overflowing_nets import NETS

NET = NETS["gemma"]
LARGE = 2.0**17


def tensors(data: dict[str, NDArray[Any]]) -> tuple[Tensor, ...]:
    return tuple(map(torch.from_numpy, data.values()))


def off(got: Any, exact: Any) -> float:
    found, wanted = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    if not np.isfinite(found).all():
        return np.inf
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.fixture(scope="module")
def exact() -> Tensor:
    with torch.no_grad():
        found: Tensor = NET.module()(*tensors(NET.data()))
    return found


@pytest.fixture(scope="module")
def done() -> Result:
    example = tensors(NET.data())
    policy = Policy("all:fp16")
    return api.convert(
        NET.module(), policy=policy, data=NET.data(), example_inputs=example, verify=False
    )


def test_a_module_computes_in_fp16_what_would_overflow(done: Result, exact: Tensor) -> None:
    """A norm's scale, 1 + w, is computed of a constant, which takes up the factor."""
    assert done.plan is not None
    products = [d for d in done.plan.decisions if d.op in ("linear", "matmul")]
    assert {d.format for d in products} == {Format.FP16}
    (gain,) = done.gains
    assert gain.error_without == np.inf
    assert gain.error_with < 0.01
    with torch.no_grad():
        assert off(done.model(*tensors(NET.data())), exact) < 0.01


def test_a_device_computes_it(done: Result, exact: Tensor) -> None:
    assert done.plan is not None
    model = opened(NET.module(), ReadOptions(example_inputs=tensors(NET.data())))
    assert isinstance(model, TorchModel)
    device = explicit_casts("sm70")
    (got,) = model.program(device).plan_session(done.plan, device).run(NET.data()).values()
    assert off(got, exact) < 0.01


def test_in_fp32_no_bit_changes(done: Result) -> None:
    assert done.plan is not None
    example = tensors(NET.data())
    captured = capture(NET.module(), example)
    scaled = adjusted(captured, done.plan.adjustments)
    assert scaled.graph.digest == captured.graph.digest
    with torch.no_grad():
        torch.testing.assert_close(
            scaled.module(*example), captured.module(*example), rtol=0, atol=0
        )


class Ops(nn.Module):
    """Ops that are particular to PyTorch, between a product that overflows and an end."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.case = case
        self.wide = nn.Linear(8, 8)
        self.end = nn.Linear(8, 8)
        self.layer, self.rms = nn.LayerNorm(8), nn.RMSNorm(8)
        with torch.no_grad():
            self.wide.weight.mul_(LARGE)
            self.wide.bias.mul_(LARGE)
            self.end.weight /= 1.0 if case in ("norms", "powers") else LARGE

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x)
        match self.case:
            case "norms":
                y = self.rms(y) + self.layer(y)
            case "numbers":
                y = (2 * y - 3.0).clamp(-1e5, 2e5)
            case "products":
                y = torch.baddbmm(y, y, self.end.weight.expand(len(x), 8, 8))
            case "attention":
                y = functional.scaled_dot_product_attention(x, x, y)
            case "powers":  # as transformers writes a norm
                wide = y.float()
                wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
                y = wide.type_as(y)
            case _:
                y = functional.hardtanh(y, -1e5)  # its upper bound is not stated: 1
        found: Tensor = self.end(y)
        return found


@pytest.mark.parametrize(
    "case", ["norms", "numbers", "products", "attention", "powers", "hidden"]
)
def test_ops_hand_the_factor_on(case: str) -> None:
    net, x = Ops(case).eval(), torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    found = api.convert(
        net, policy="all:fp16", data={"x": x.numpy()}, example_inputs=(x,), verify=False
    )
    assert found.plan is not None
    assert found.plan.adjustments
    formats = {d.op: d.format for d in found.plan.decisions}
    assert formats["linear"] is Format.FP16
    captured = capture(net, (x,))
    scaled = adjusted(captured, found.plan.adjustments)
    with torch.no_grad():
        torch.testing.assert_close(scaled.module(x), captured.module(x), rtol=0, atol=0)
        assert off(found.model(x), net(x)) < 0.01


class Softmax(nn.Module):
    """A softmax and a log-sum-exp that subtract no maximum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scores, self.end = nn.Linear(8, 8), nn.Linear(8, 8)
        with torch.no_grad():
            self.scores.weight *= 8.0

    def forward(self, x: Tensor) -> Tensor:
        powers = self.scores(x).exp()
        total = powers.sum(-1, keepdim=True)
        found: Tensor = self.end(powers / total) + total.log()
        return found


def test_a_softmax_without_a_maximum_stays_in_range() -> None:
    net, x = Softmax().eval(), torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert net.scores(x).exp().sum(-1).max() > Format.FP16.max
    found = api.convert(
        net, policy="all:fp16", data={"x": x.numpy()}, example_inputs=(x,), verify=False
    )
    assert found.plan is not None
    assert any(a.add for a in found.plan.adjustments)
    formats = {d.op: d.format for d in found.plan.decisions}
    assert formats["exp"] is formats["reduce_sum"] is formats["div"] is Format.FP16
    with torch.no_grad():
        assert off(found.model(x), net(x)) < 0.01
