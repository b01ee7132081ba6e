"""Errors of single roundings in a PyTorch program, each of the value that is rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from finecast.engines.exact import Exact
from finecast.frontends import torch as frontend
from finecast.frontends.torch import TorchNative, probing
from finecast.native.torch.model import of_module
from finecast.numbers.formats import Format
from finecast.planning.points import rounding_points
from finecast.planning.units import make_units
from finecast.rules import Permission
from tests.torch.errors import Errors, first_order, points_of, probed

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Reordered(nn.Module):
    """Gives one result twice, and the parts of a tuple in another order."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        exact, rounded = torch.split(x.abs(), 2)
        ones = exact.sign()
        return ones, ones, rounded * 1.0, rounded, exact


@pytest.mark.parametrize("measured", [probed, first_order])
def test_an_output_s_error_is_that_of_its_own_value(
    measured: Callable[..., Errors],
) -> None:
    x = torch.cat([torch.full((2, 4), 2.0), torch.rand(2, 4) + 1.0])
    captured = frontend.capture(Reordered(), (x,))
    points = points_of(captured)
    ends = [p for p in points if p.reader is None]
    errors = measured(captured, ends, [x])
    names = [captured.graph.values[p.value].name for p in ends]
    found = {name for name, error in zip(names, errors, strict=True) if error > 0}
    assert found == {"mul", "getitem_1"}


class Repeated(nn.Module):
    """Gives its result ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 1.5,) * self.times


@pytest.mark.parametrize("measured", [probed, first_order])
def test_what_is_several_outputs_is_rounded_in_all_of_them(
    measured: Callable[..., Errors],
) -> None:
    x = torch.linspace(0.1, 1.0, 1000)

    def error(times: int) -> float:
        captured = frontend.capture(Repeated(times), (x,))
        points = points_of(captured)
        ends = [p for p in points if p.reader is None]
        return float(measured(captured, ends, [x]).sum())

    assert error(3) == pytest.approx(error(1), rel=0.2)


class Cached(nn.Module):
    """Logits, and what came in with a row behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> tuple[torch.Tensor, ...]:
        present = torch.cat([past, x.exp()], dim=1)
        return self.head(x.mean(1)), present


@pytest.mark.parametrize("measured", [probed, first_order])
def test_a_cache_that_came_in_hides_no_error_of_the_logits(
    measured: Callable[..., Errors],
) -> None:
    torch.manual_seed(0)
    x, past = torch.rand(2, 1, 8), torch.randn(2, 40, 8)
    model = of_module(Cached(), ((x, past), {}))
    captured = model.file.captured("auto")
    points = points_of(captured)
    assert Exact.of(model.reference(), [model.examples]).counted == {0}
    found = measured(captured, points, [x, past], {0})
    alone = measured(captured, points, [x, past], {1})
    names = [captured.graph.values[p.value].name for p in points]
    heads = [k for k, name in enumerate(names) if name == "linear"]
    caches = [k for k, name in enumerate(names) if name == "past"]
    assert heads
    assert caches
    assert all(found[k] > 1e-7 for k in heads)
    assert all(found[k] == 0 for k in caches)
    assert all(alone[k] == 0 for k in heads)


class Subtracted(nn.Module):
    """Two readers of one result, most of whose rounding cancels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = x * 3.0
        return both.sin() - both.sin().relu() * 0.999


def test_a_rounding_that_two_ops_read_is_one() -> None:
    args = (torch.linspace(0.1, 1.0, 1000),)
    captured = frontend.capture(Subtracted(), args)
    both = Permission(formats=frozenset({Format.FP32, Format.BF16}), reasons=())
    allowed = {n.id: both for n in captured.graph.float_nodes}
    units = make_units(captured.graph, allowed, (Format.BF16,))
    points = rounding_points(captured.graph, units)
    found = probing.first_order(TorchNative.of(captured), {Format.BF16: points}, args)[
        Format.BF16
    ]
    assert points.shared
    for (_, numbers), more in zip(points.shared, found.shared, strict=True):
        alone = found.values[[*numbers]].sum()
        assert alone + more < 0.01 * alone
