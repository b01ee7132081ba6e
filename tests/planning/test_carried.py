"""State that is carried from call to call: inputs and outputs of one type, by one decision."""

from __future__ import annotations

import numpy as np
import pytest

from finecast.graph import Value
from finecast.numbers.formats import Format
from finecast.planning.carried import Carried
from finecast.planning.edits import InsertCast, edits
from finecast.planning.planner import Planner
from finecast.planning.points import rounding_points
from finecast.planning.problem import Analysis, roundings
from finecast.planning.proposing import frontier_of, proposal
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from tests.graph.text import from_text

FP32, BF16, INT8 = Format.FP32, Format.BF16, Format.INT8
STATE = {"past_key": "present_key", "past_value": "present_value"}
DECODER = from_text(
    """
    input %0 x fp32
    input %1 past_key fp32
    input %2 past_value fp32
    constant %3 w fp32 size=4
    node size shape onnx::Shape - (~%1) -> (~%4 size int64)
    node project matmul onnx::MatMul fp32 (%0, %3) -> (%5 new fp32)
    node keys concat onnx::Concat fp32 (%1, %5) -> (%6 present_key fp32)
    node values concat onnx::Concat fp32 (%2, %5) -> (%7 present_value fp32)
    node scores matmul onnx::MatMul fp32 (%5, %6) -> (%8 scores fp32)
    node mix matmul onnx::MatMul fp32 (%8, %7) -> (%9 y fp32)
    output %6
    output %7
    output %9
    """
)
CARRIED = Carried.of(DECODER, STATE)


def planner(
    formats: tuple[Format, ...] = (BF16,),
    fixed: tuple[str, ...] = (),
    carried: Carried = CARRIED,
) -> Planner:
    permissions = {
        n.id: Permission(
            formats=frozenset({FP32} if n.name in fixed else {FP32, *formats}), reasons=()
        )
        for n in DECODER.float_nodes
    }
    return Planner(
        graph=DECODER,
        policy=Policy(formats=formats),
        permissions=permissions,
        carried=carried,
    )


def analysis(planner: Planner, low_s: float) -> Analysis:
    """Each op takes a second in fp32 and ``low_s`` in bf16; a cast of cached values four."""
    units = make_units(DECODER, planner.permissions, (BF16,), [planner.carried.nodes])
    points = rounding_points(DECODER, units)
    count = np.array([len(nodes) for nodes in units.members], dtype=np.float64)

    def cast(value: Value, source: Format, to: Format) -> float:
        return 0.0 if source is to else 4.0 if "p" in value.name[:1] else 0.1

    return Analysis(
        units=units,
        times={FP32: count, BF16: low_s * count},
        cast_time=cast,
        rounded={BF16: roundings(units, points, Sensitivity.zero(points), {})},
        carried=planner.carried.unit(units),
    )


def test_state_is_what_reads_and_makes_it() -> None:
    names = {DECODER.values[v].name for v in CARRIED.ports}
    assert names == {*STATE, *STATE.values()}
    assert {DECODER.nodes[n].name for n in CARRIED.nodes} == {"keys", "values"}


def test_the_ops_of_all_state_are_one_unit() -> None:
    found = planner()
    units = make_units(DECODER, found.permissions, (BF16,), [CARRIED.nodes])
    assert len({units.of[node] for node in CARRIED.nodes}) == 1
    assert CARRIED.unit(units).keys() == CARRIED.ports


@pytest.mark.parametrize(("carried", "low"), [(CARRIED, True), (Carried(), False)])
def test_a_cache_is_low_where_its_casts_would_cost_more_than_low_ops_gain(
    carried: Carried, low: bool
) -> None:
    found = planner(carried=carried)
    costs = analysis(found, low_s=0.5)
    fastest = frontier_of(found, costs)[-1]
    plan = proposal(found, costs, fastest).plan
    assert plan.io == (dict.fromkeys([*STATE, *STATE.values()], BF16) if low else {})
    assert {plan.formats["keys"], plan.formats["values"]} == {BF16 if low else FP32}
    if low:  # five ops, and casts of x and y
        assert fastest.time_s == pytest.approx(5 * 0.5 + 0.1 + 0.1)


def test_predicted_casts_are_those_of_the_edits() -> None:
    found = planner()
    costs = analysis(found, low_s=0.5)
    for choice in frontier_of(found, costs):
        plan = proposal(found, costs, choice).plan
        ids = {v.name: v.id for v in DECODER.values}
        formats = {n.id: plan.formats[n.name] for n in DECODER.float_nodes}
        io = {ids[name]: fmt for name, fmt in plan.io.items()}
        casts = [e for e in edits(DECODER, formats, io) if isinstance(e, InsertCast)]
        cast_s = sum(
            costs.cast_time(v, FP32, BF16) for e in casts for v in [DECODER.values[e.value]]
        )
        ops_s = sum(0.5 if fmt is BF16 else 1.0 for fmt in formats.values())
        assert choice.time_s == pytest.approx(ops_s + cast_s)


def test_state_whose_ops_differ_keeps_its_type() -> None:
    keys, values = (n.id for n in DECODER.nodes if n.name in ("keys", "values"))
    assert CARRIED.declared(DECODER, {keys: BF16, values: FP32}) == {}
    assert CARRIED.declared(DECODER, {keys: INT8, values: INT8}) == {}  # results are fp32
    fixed = planner(fixed=("values",))
    units = make_units(DECODER, fixed.permissions, (BF16,), [CARRIED.nodes])
    assert CARRIED.unit(units) == {}
    assert fixed.lowest().io == {}
    assert planner().lowest().io == dict.fromkeys([*STATE, *STATE.values()], BF16)


def test_a_low_state_is_left_alone() -> None:
    low = from_text(
        """
        input %0 past_key fp16
        input %1 past_value fp32
        node keys concat onnx::Concat fp16 (%0, %0) -> (%2 present_key fp16)
        node values concat onnx::Concat fp32 (%1, %1) -> (%3 present_value fp32)
        output %2
        output %3
        """
    )
    found = Carried.of(low, STATE)
    assert {low.values[v].name for v in found.ports} == {"past_value", "present_value"}
