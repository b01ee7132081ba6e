"""Plans by size and by memory: costs are bytes, and the frontier is one of bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.cost import MeasuredCost
from finecast.planning.planner import Planner
from finecast.planning.points import rounding_points
from finecast.planning.pricing import by_memory, by_size, resident_bytes
from finecast.planning.problem import Analysis, Priced, build_problem, roundings
from finecast.planning.proposing import frontier_of, proposal
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from finecast.solver.labelling import evaluate
from tests.graph.text import from_text

FP32, BF16, FP8 = Format.FP32, Format.BF16, Format.FP8_E4M3
# w is read by two products, each in its own format.
TIED = from_text(
    """
input %0 x fp32[64]
constant %1 w fp32[1000, 64] size=64000
constant %2 v fp32[64, 10] size=640
node first matmul onnx::MatMul fp32 (%0, %1) -> (%3 a fp32[1000])
node middle relu onnx::Relu fp32 (%3) -> (%4 b fp32[1000])
node second matmul onnx::MatMul fp32 (%4, %1) -> (%5 c fp32[64])
node last matmul onnx::MatMul fp32 (%5, %2) -> (%6 y fp32[10])
output %6
"""
)


def priced(
    graph: Graph, *lows: Format, slow: float = 1.0, widened: frozenset[Format] = frozenset()
) -> tuple[Planner, Analysis]:
    """Every op may have every format; in a low one it takes ``slow`` times as long."""
    formats = (FP32, *lows)
    allowed = {
        n.id: Permission(formats=frozenset(formats), reasons=()) for n in graph.float_nodes
    }
    planner = Planner(graph=graph, policy=Policy.parse("auto:bf16"), permissions=allowed)
    units = make_units(graph, allowed, lows)
    points = rounding_points(graph, units)
    error = Sensitivity(
        values=np.full(len(points.points), 1e-4),
        weights=np.full(len(points.weights), 1e-4),
        shared=np.zeros(len(points.shared)),
    )
    times = {
        f: {n.name: 1e-3 * (1 if f is FP32 else slow) for n in graph.nodes} for f in formats
    }
    found = {f: roundings(units, points, error, {}) for f in lows}
    cost = MeasuredCost(times_s=times, widened=widened)
    return planner, Analysis.of(graph, units, cost, found)


@pytest.mark.parametrize("lows", [(BF16,), (BF16, FP8)])
def test_a_constant_is_stored_once_in_each_format_that_reads_it(
    lows: tuple[Format, ...],
) -> None:
    planner, analysis = priced(TIED, *lows)
    sized = by_size(planner, analysis)
    assert sized.priced is Priced.SIZE
    problem = build_problem(TIED, planner.permissions, sized)
    formats = (FP32, *lows)
    total = 4 * (64000 + 640)
    for label in product(range(len(formats)), repeat=4):
        chosen = [formats[k] for k in label]  # of first, middle, second, last
        stored = sum(f.bytes_for(64000) for f in {chosen[0], chosen[2]})
        stored += chosen[3].bytes_for(640)
        found = evaluate(problem, np.array(label)).time_s
        # Cast nodes take bytes, too, and the model's time counts as 1% of its bytes.
        assert stored <= found <= stored + 0.01 * total * 1.2 + 5 * 150


def test_the_smallest_plan_is_all_low_though_it_is_slower() -> None:
    planner, analysis = priced(TIED, BF16, slow=3.0)
    fastest = frontier_of(planner, analysis)[-1]
    smallest = frontier_of(planner, by_size(planner, analysis))[-1]
    assert not fastest.lowers
    of = smallest.by_node(analysis.units)
    assert (of[0], of[2]) == (BF16, BF16)  # the last op's weights are below 1% of the bytes
    plan = proposal(planner, by_size(planner, analysis), smallest).plan
    assert any("MB stored" in reason.text for reason in plan.reasons)


def test_the_size_is_that_of_all_plans_least() -> None:
    """By brute force."""
    planner, analysis = priced(TIED, BF16, slow=2.0)
    sized = by_size(planner, analysis)
    problem = build_problem(TIED, planner.permissions, sized)
    every = [evaluate(problem, np.array(x)).time_s for x in product(range(2), repeat=4)]
    found = frontier_of(planner, sized)
    assert found[-1].time_s == pytest.approx(min(every))


def test_memory_counts_what_is_alive_at_the_peak() -> None:
    planner, analysis = priced(TIED, BF16)
    weighed = by_memory(planner, analysis)
    assert weighed.priced is Priced.MEMORY
    sized = by_size(planner, analysis)
    more = {f: weighed.times[f] - sized.times[f] for f in (FP32, BF16)}
    # a and b are alive as the relu runs.
    assert more[FP32].tolist() == pytest.approx([4000.0, 4000.0, 0.0, 0.0])
    assert more[BF16].tolist() == pytest.approx([2000.0, 2000.0, 0.0, 0.0])


def test_what_a_plan_takes_in_memory() -> None:
    planner, analysis = priced(TIED, BF16)
    names = [n.name for n in TIED.nodes]
    weights = 64000 + 640
    assert resident_bytes(planner, analysis, {}) == 4 * weights + 8000
    low = dict.fromkeys(names, BF16)
    assert resident_bytes(planner, analysis, low) == 2 * weights + 4000
    mixed = {**low, "second": FP32}  # both copies of w
    assert resident_bytes(planner, analysis, mixed) > 6 * 64000 + 2 * 640


def test_a_format_that_is_widened_takes_the_memory_of_fp32() -> None:
    """It counted half of that: the file has it, and the running model does not."""
    planner, analysis = priced(TIED, BF16, widened=frozenset({BF16}))
    weighed, sized = by_memory(planner, analysis), by_size(planner, analysis)
    more = {f: weighed.times[f] - sized.times[f] for f in (FP32, BF16)}
    assert more[BF16].tolist() == pytest.approx(more[FP32].tolist())
    low = dict.fromkeys((n.name for n in TIED.nodes), BF16)
    assert resident_bytes(planner, analysis, low) == resident_bytes(planner, analysis, {})
    weights = TIED.values[1]
    assert weighed.constant_cost is not None
    assert sized.constant_cost is not None
    assert weighed.constant_cost(weights, BF16) == 4 * 64000
    assert sized.constant_cost(weights, BF16) == 2 * 64000


@pytest.mark.parametrize("by", [by_size, by_memory])
def test_no_bytes_are_told_as_times(by: Callable[[Planner, Analysis], Analysis]) -> None:
    planner, analysis = priced(TIED, BF16)

    def evidence(of: Analysis) -> set[str]:
        found = proposal(planner, of, frontier_of(planner, of)[-1])
        return {key for d in found.plan.decisions for r in d.reasons for key in r.evidence}

    assert {"fp32 us", "bf16 us"} <= evidence(analysis)
    told = evidence(by(planner, analysis))
    assert "error if bf16" in told
    assert not [key for key in told if key.endswith(" us")]
