"""Gradients through modules whose products are on codes, and batches without rows."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from finecast.frontends.torch import codes, straight_through
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from tests.torch.quantized_layers import Array, relative
from tests.torch.test_int8 import converted

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:fp8(_dynamic_row)? runs at:UserWarning"),
    pytest.mark.filterwarnings("ignore:input .* was captured with:UserWarning"),
]

STATIC = ("fp8", "int8")
ROWS = ("fp8_dynamic_row", "int8_dynamic_row")
FORMATS = (*STATIC, *ROWS, "int8_dynamic_row on a GPU")


def quantized(
    monkeypatch: pytest.MonkeyPatch, net: nn.Module, x: torch.Tensor, name: str, also: str = ""
) -> Any:
    """The converted module; one for a GPU has the same ops and runs here, too."""
    label, _, on_gpu = name.partition(" ")
    if on_gpu:
        monkeypatch.setattr(codes, "states_product", lambda *_, for_gpu: True)
    made, _ = converted(monkeypatch, (net.eval(), x), f"all:{label}{also}")
    assert made.finecast_plan.counts[label] >= 1
    return made


def decoded(weights: Array, name: str) -> Array:
    """The numbers that weights are rounded to: by channels, or by one scale in fp8."""
    fmt = Format(name.partition(" ")[0])
    return Scaled.of_constant(fmt, weights, () if fmt is Format.FP8 else (0,)).round(weights)


def gradients(module: Any, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    """Of what the module reads, and of the bias, which stays a parameter."""
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], g))


@pytest.mark.parametrize("also", ["", ",bf16"])
@pytest.mark.parametrize("shape", [(7, 32), (5, 3, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_they_are_those_of_the_decoded_product(
    name: str, shape: tuple[int, ...], also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x, g = nn.Linear(32, 48), torch.randn(shape), torch.randn(*shape[:-1], 48)
    made = quantized(monkeypatch, layer, x, name, also)
    got, bias = gradients(made, x, g)
    exact = g.numpy().astype(np.float64) @ decoded(layer.weight.detach().numpy(), name)
    allowed = (4 * Format.BF16.epsilon) if also else (4 * Format.FP32.epsilon)
    assert relative(got, exact) < allowed
    assert relative(bias, g.flatten(0, -2).sum(0)) < allowed
    with torch.no_grad():
        want = made(x)
    assert torch.equal(made(x.requires_grad_()).detach(), want)


@pytest.mark.parametrize("name", STATIC)
def test_they_end_where_the_range_of_the_data_ends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x, g = nn.Linear(32, 48), torch.randn(7, 32), torch.randn(7, 48)
    made = quantized(monkeypatch, layer, x, name)
    more = 1.5 * x
    got, _ = gradients(made, more, g)
    clipped = more.abs() > 1.1 * x.abs().max()
    assert clipped.any()
    assert not got[clipped].any()
    inside = (more > x.min()) & (more < x.max())
    exact = g @ torch.from_numpy(decoded(layer.weight.detach().numpy(), name))
    assert relative(got[inside], exact[inside]) < 4 * Format.FP32.epsilon


class Convolutions(nn.Module):
    """In int8 these are products on codes, too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


def test_convolutions_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x = Convolutions(), torch.randn(2, 3, 8, 8)
    made = quantized(monkeypatch, net, x, "int8")
    assert made.finecast_plan.counts["int8"] == 2
    g = torch.randn(2, 4, 8, 8)
    want = gradients(net, x, g)
    got = gradients(made, x, g)
    biases = [want[0], *(want[2::2])]
    assert all(relative(a, b) < 0.05 for a, b in zip(got, biases, strict=True))


class Deep(nn.Module):
    """A residual block, so that a gradient that is lost in layers does not become None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.nn.functional.gelu(self.up(x))))


def steps(module: Any, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """All gradients of what stays a parameter in every format, in one vector."""
    x, names = x.clone().requires_grad_(), ("up.bias", "down.bias", "norm.weight", "norm.bias")
    parameters = [module.get_parameter(name) for name in names]
    parts = torch.autograd.grad(module(x), [x, *parameters], g)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("name", FORMATS)
def test_parameters_before_quantized_layers_have_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x, g = Deep(), torch.randn(3, 6, 32), torch.randn(3, 6, 32)
    made = quantized(monkeypatch, net, x, name)
    want = steps(net, x, g)
    assert 0 < relative(steps(made, x, g), want) < 2 * Format.FP8.unit_roundoff
    stored = io.BytesIO()
    torch.save(made, stored)
    stored.seek(0)
    again: Any = torch.load(stored, weights_only=False)
    assert torch.equal(steps(again, x, g), steps(made, x, g))


def test_functional_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, x, g = nn.Linear(32, 48), torch.randn(7, 32), torch.randn(7, 48)
    made = quantized(monkeypatch, net, x, "fp8")
    got = torch.func.grad(lambda x: (made(x) * g).sum())(x)
    assert torch.equal(got, gradients(made, x, g)[0])


@pytest.mark.parametrize("name", FORMATS)
def test_programs_have_ops_of_pytorch_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(4, 32)
    made = quantized(monkeypatch, net, x, name)
    own = {n.target for n in made.graph.nodes if callable(n.target)}
    functions = {straight_through.rounded, straight_through.scaled_mm, straight_through.int_mm}
    assert own & functions
    program = torch.export.export(made, (x.clone().requires_grad_(),))
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert all(isinstance(t, torch._ops.OpOverload) for t in targets)
    traced: Any = torch.jit.trace(made, (x,))
    with torch.no_grad():
        want = made(x)
        assert torch.equal(program.module()(x), want)
        assert torch.equal(traced(x), want)


@pytest.mark.long
@pytest.mark.parametrize("also", ["", ",bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_compiled_modules_have_them(
    name: str, also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x, g = Deep(), torch.randn(3, 6, 32), torch.randn(3, 6, 32)
    made = quantized(monkeypatch, net, x, name, also)
    compiled: Any = torch.compile(made)
    parameters = [made.get_parameter(n) for n in ("up.bias", "norm.weight")]
    got = torch.autograd.grad(compiled(x), parameters, g)
    want = torch.autograd.grad(made(x), parameters, g)
    # Compiled, values between ops keep fp32 where op by op they are in bf16.
    allowed = Format.FP8.unit_roundoff if also else 4 * Format.FP16.epsilon
    assert all(relative(a, b) < allowed for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("also", ["", ",bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_batches_of_other_sizes_and_of_no_rows(
    name: str, also: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)),
        torch.randn(24, 32),
    )
    made = quantized(monkeypatch, net, x, name, also)
    wide = quantized(monkeypatch, net, x.reshape(6, 4, 32), name, also)
    with torch.no_grad():
        assert made(x[:0]).shape == (0, 16)
        for sizes in ((0, 4), (6, 0), (3, 8), (4, 6)):
            batch = x[: sizes[0] * sizes[1]].reshape(*sizes, 32)
            got = wide(batch)
            assert got.shape == (*sizes, 16)
            if batch.numel():
                assert relative(got.float().flatten(0, 1), net(x)) < 0.2
    empty = torch.zeros(0, 32, requires_grad=True)
    made(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == (0, 32)
