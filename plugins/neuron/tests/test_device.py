"""Times of a device that is not here: views are free, how it transposes is a choice."""

from __future__ import annotations

from finecast.devices.emulation import Emulation
from finecast.native.device import plan_time_s
from finecast.numbers.formats import Format
from finecast.planning.cost import RooflineCost
from finecast_neuron.compilers import resolve
from finecast_neuron.flags import read
from tests.graph.text import from_text

TRANSPOSE = from_text(
    "input %0 x fp32[512, 512]\n"
    "node turn transpose onnx::Transpose fp32 (%0) -> (%1 y fp32[512, 512])"
    ' {"perm": [1, 0]}\noutput %1\n'
)
RESHAPE = from_text(
    "input %0 x fp32[512, 512]\n"
    "node view reshape onnx::Reshape fp32 (%0) -> (%1 y fp32[262144])\noutput %1\n"
)


def of(text: str) -> Emulation:
    return resolve(read(text.split()), target="inf1").emulation


def test_moving_bytes_takes_longer_than_a_product_with_the_identity() -> None:
    """Neuron's guide: ``fast-relayout`` rounds and is fast, ``no-fast-relayout`` is exact."""

    def time_s(emulation: Emulation) -> float:
        cost = RooflineCost(target=emulation.target)
        return plan_time_s(TRANSPOSE, cost, emulation, {0: Format.FP32})

    fast = of("--fast-math fp32-cast-matmult fast-relayout")
    exact = of("--fast-math fp32-cast-matmult no-fast-relayout")
    assert fast.relayout is not None
    assert exact.relayout is None
    assert 0 < time_s(fast) < time_s(exact)


def test_a_view_takes_no_time() -> None:
    """Every op that moves or computes takes its overhead; a view is no kernel."""
    emulation = of("--fast-math fp32-cast-matmult no-fast-relayout")
    cost = RooflineCost(target=emulation.target)
    assert plan_time_s(RESHAPE, cost, emulation, {}) == 0.0
    assert plan_time_s(TRANSPOSE, cost, emulation, {}) > cost.target.op_overhead_s > 0
