"""The problem that the solver gets costs what the edits of its answer will cost."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast import labelling
from finecast.edits import InsertCast, edits
from finecast.formats import Format
from finecast.graph import Graph
from finecast.graph_text import from_text
from finecast.problem import build_label_problem, build_problem, pins, roundings
from finecast.rules import Permission
from finecast.sensitivity import Sensitivity
from finecast.solve import Problem, evaluate
from finecast.units import RoundingPoints, Units, make_units, rounding_points

FP32, BF16, FP16 = Format.FP32, Format.BF16, Format.FP16


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Ops that read what came before; some ports keep their own type, some ops are fixed."""
    count = draw(st.integers(1, 5))
    lines = ["input %0 x fp32", "constant %1 w fp32 size=4"]
    for number in range(count):
        result = 2 + number
        sources = draw(st.lists(st.integers(0, result - 1), min_size=1, max_size=3))
        taken = [f"{draw(st.sampled_from(['', '', '', '~']))}%{s}" for s in sources]
        mark = draw(st.sampled_from(["", "", "", "~"]))
        op = draw(st.sampled_from(["matmul onnx::MatMul", "transpose onnx::Transpose"]))
        fmt = draw(st.sampled_from(["fp32", "fp32", "fp32", "-"]))
        lines.append(
            f"node n{number} {op} {fmt} ({', '.join(taken)})"
            f" -> ({mark}%{result} v{result} fp32)"
        )
    ends = draw(st.sets(st.integers(2, count + 1), min_size=1))
    return from_text("\n".join([*lines, *(f"output %{e}" for e in sorted(ends))]))


def free(graph: Graph, *, must: tuple[str, ...] = ()) -> dict[int, Permission]:
    return {
        n.id: Permission(
            formats=frozenset({BF16} if n.name in must else {FP32, BF16}), reasons=()
        )
        for n in graph.float_nodes
    }


def stated(
    graph: Graph,
    units: Units,
    points: RoundingPoints,
    *,
    io: dict[int, Format] | None = None,
    must: tuple[str, ...] = (),
    sensitivity: Sensitivity | None = None,
) -> Problem:
    count = len(units.members)
    measured = sensitivity or Sensitivity.zero(points)
    pinned = pins(io or {}, (FP32, BF16))
    return build_problem(
        graph,
        units,
        free(graph, must=must),
        {FP32: np.full(count, 2.0), BF16: np.ones(count)},
        lambda _value, _src, dst: 1.0 if dst is BF16 else 100.0,
        roundings(graph, units, points, measured, BF16, pinned),
        io=io or {},
    )


@given(graphs(), st.booleans(), st.booleans())
def test_casts_are_those_of_the_edits(graph: Graph, low_in: bool, low_out: bool) -> None:
    ports = [v for v, low in ((graph.inputs[0], low_in), (graph.outputs[0], low_out)) if low]
    io = {v.id: BF16 for v in ports}
    units = make_units(graph, free(graph), (BF16,))
    problem = stated(graph, units, rounding_points(graph, units), io=io)
    for low in product((False, True), repeat=len(units.members)):
        formats = {n: BF16 if low[u] else FP32 for n, u in units.of.items()}
        casts = [e for e in edits(graph, formats, io) if isinstance(e, InsertCast)]
        found = evaluate(problem, np.array(low, dtype=bool))
        paid = sum(1.0 if e.to is BF16 else 100.0 for e in casts)
        assert found.casts == len(casts)
        assert found.time_s == pytest.approx(paid + 2 * len(low) - sum(low))


@given(graphs(), st.booleans())
def test_casts_among_three_formats_are_those_of_the_edits(graph: Graph, low_in: bool) -> None:
    formats = (FP32, BF16, FP16)
    allowed = {
        n.id: Permission(formats=frozenset(formats), reasons=()) for n in graph.float_nodes
    }
    units = make_units(graph, allowed, formats[1:])
    io = {graph.inputs[0].id: FP16} if low_in else {}
    points = rounding_points(graph, units)
    free_of_error = roundings(
        graph, units, points, Sensitivity.zero(points), BF16, pins(io, formats)
    )
    prices = {f: 10.0**k for k, f in enumerate(formats)}
    problem = build_label_problem(
        graph,
        units,
        allowed,
        dict.fromkeys(formats, np.ones(len(units.members))),
        lambda _value, src, dst: 0.0 if src is dst else prices[dst],
        [free_of_error] * 2,
        io=io,
    )
    for label in product(range(3), repeat=min(len(units.members), 4)):
        given = np.zeros(len(units.members), dtype=np.int64)
        given[: len(label)] = label
        chosen = {n: formats[given[u]] for n, u in units.of.items()}
        casts = [e for e in edits(graph, chosen, io) if isinstance(e, InsertCast)]
        found = labelling.evaluate(problem, given)
        assert found.casts == len(casts)
        assert found.time_s == len(given) + sum(prices[e.to] for e in casts)


@given(graphs(), st.data())
def test_one_low_format_costs_the_same_as_a_labelling(
    graph: Graph, data: st.DataObject
) -> None:
    units = make_units(graph, free(graph), (BF16,))
    points = rounding_points(graph, units)
    numbers = st.floats(0, 4, width=16)
    measured = Sensitivity(
        values=np.array(
            data.draw(
                st.lists(numbers, min_size=len(points.classes), max_size=len(points.classes))
            )
        ),
        weights=np.array(
            data.draw(
                st.lists(numbers, min_size=len(points.weights), max_size=len(points.weights))
            )
        ),
    )
    two = stated(graph, units, points, sensitivity=measured)
    count = len(units.members)
    many = build_label_problem(
        graph,
        units,
        free(graph),
        {FP32: np.full(count, 2.0), BF16: np.ones(count)},
        lambda _value, src, dst: 0.0 if src is dst else 1.0 if dst is BF16 else 100.0,
        [roundings(graph, units, points, measured, BF16, {})],
        io={},
    )
    for low in product((False, True), repeat=count):
        side = np.array(low, dtype=bool)
        exact, labelled = evaluate(two, side), labelling.evaluate(many, side.astype(np.int64))
        assert (exact.time_s, exact.casts) == (labelled.time_s, labelled.casts)
        assert exact.error == pytest.approx(labelled.error)


CHAIN = from_text("""\
input %0 x fp32[4, 4]
constant %1 w fp32[4, 4] size=16
node mm0 matmul onnx::MatMul fp32 (%0, %1) -> (%2 a fp32[4, 4])
node turn transpose onnx::Transpose fp32 (%2) -> (%3 b fp32[4, 4])
node mm1 matmul onnx::MatMul fp32 (%3, %1) -> (%4 y fp32[4, 4])
output %4
""")


@pytest.mark.parametrize(
    ("low", "error"),
    [
        ((), 0.0),
        (("mm0",), 1.0 + 10.0 + 1000.0),  # x, the class {a, b}, w
        (("turn",), 10.0),
        (("mm0", "turn"), 1.0 + 10.0 + 1000.0),  # {a, b} once
        (("mm1",), 10.0 + 100.0 + 2000.0),
        (("mm0", "turn", "mm1"), 1.0 + 10.0 + 100.0 + 3000.0),
    ],
)
def test_each_rounding_counts_once(low: tuple[str, ...], error: float) -> None:
    units = make_units(CHAIN, free(CHAIN), (BF16,))
    points = rounding_points(CHAIN, units)
    ids = {v.name: v.id for v in CHAIN.values}
    values = np.zeros(len(points.classes))
    for name, amount in (("x", 1.0), ("b", 10.0), ("y", 100.0)):
        values[points.class_of[ids[name]]] = amount
    sensitivity = Sensitivity(values=values, weights=np.array([1000.0, 2000.0]))
    problem = stated(CHAIN, units, points, sensitivity=sensitivity)
    chosen = np.array([CHAIN.nodes[nodes[0]].name in low for nodes in units.members])
    assert evaluate(problem, chosen).error == pytest.approx(error)


def test_what_must_be_low_may_not_be_high() -> None:
    units = make_units(CHAIN, free(CHAIN), (BF16,))
    problem = stated(CHAIN, units, rounding_points(CHAIN, units), must=("turn",))
    assert np.isinf(problem.time_high).tolist() == [False, True, False]


def test_nothing_to_decide() -> None:
    units = make_units(CHAIN, {}, (BF16,))
    problem = stated(CHAIN, units, rounding_points(CHAIN, units))
    assert evaluate(problem, np.zeros(0, dtype=bool)).time_s == 0.0
