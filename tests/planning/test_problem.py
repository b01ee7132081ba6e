"""The solver's problem has the costs of the edits that the plan will take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.planning.edits import InsertCast, RoundTrip, edits, storage
from finecast.planning.points import Place, RoundingPoints, rounding_points
from finecast.planning.problem import Analysis, build_problem, pins, roundings
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.units import Units, make_units
from finecast.rules import Permission
from finecast.solver import labelling
from finecast.solver.labelling import LabelProblem
from tests.graph.text import from_text
from tests.solver.costs import evaluate

FP32, BF16, FP16 = Format.FP32, Format.BF16, Format.FP16


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs; some ports keep their own type, some ops are fixed.

    Casts read any format, and give a fixed one.
    """
    count = draw(st.integers(1, 5))
    lines = ["input %0 x fp32", "constant %1 w fp32 size=4"]
    ops = ["matmul onnx::MatMul", "transpose onnx::Transpose", "cast onnx::Cast"]
    for number in range(count):
        result = 2 + number
        sources = draw(st.lists(st.integers(0, result - 1), min_size=1, max_size=3))
        taken = [f"{draw(st.sampled_from(['', '', '', '~']))}%{s}" for s in sources]
        mark = draw(st.sampled_from(["", "", "", "~"]))
        op = draw(st.sampled_from(ops))
        fmt = draw(st.sampled_from(["fp32", "fp32", "fp32", "-"]))
        if op.startswith("cast"):
            taken, mark, fmt = [f"~%{sources[0]}"], "~", "-"
        lines.append(
            f"node n{number} {op} {fmt} ({', '.join(taken)})"
            f" -> ({mark}%{result} v{result} fp32)"
        )
    ends = draw(st.sets(st.integers(2, count + 1), min_size=1))
    return from_text("\n".join([*lines, *(f"output %{e}" for e in sorted(ends))]))


def free(
    graph: Graph, *, must: tuple[str, ...] = (), formats: tuple[Format, ...] = (FP32, BF16)
) -> dict[int, Permission]:
    return {
        n.id: Permission(formats=frozenset({BF16} if n.name in must else formats), reasons=())
        for n in graph.float_nodes
    }


def read_at(graph: Graph, place: Place) -> str:
    """The name of the value that is read at ``place``."""
    node, index = place
    value = graph.outputs[index].id if node is None else graph.nodes[node].inputs[index]
    assert value is not None
    return graph.values[value].name


def point_of(graph: Graph, points: RoundingPoints, name: str) -> int:
    """The point at which the value called ``name`` is rounded."""
    found = [{read_at(graph, at) for at in point.places} for point in points.points]
    return found.index({name})


def price(_value: Value, source: Format, to: Format) -> float:
    """A price that is different for every pair of formats, and in sums of a few."""
    order = list(Format)
    return 0.0 if source is to else 2.0 ** (8 * order.index(source) + order.index(to))


def stated(
    graph: Graph,
    units: Units,
    points: RoundingPoints,
    *,
    formats: tuple[Format, ...] = (FP32, BF16),
    io: dict[int, Format] | None = None,
    must: tuple[str, ...] = (),
    sensitivity: Sensitivity | None = None,
) -> LabelProblem:
    count = len(units.members)
    measured = sensitivity or Sensitivity.zero(points)
    pinned = pins(io or {}, formats)
    return build_problem(
        graph,
        free(graph, must=must, formats=formats),
        Analysis(
            units=units,
            times={f: np.full(count, 2.0 if f is FP32 else 1.0) for f in formats},
            cast_time=price,
            rounded={f: roundings(units, points, measured, pinned) for f in formats[1:]},
            io=io or {},
        ),
    )


def labellings(units: Units, count: int) -> Iterator[NDArray[np.int64]]:
    """All labellings of the first four units; the others have label 0."""
    for label in product(range(count), repeat=min(len(units.members), 4)):
        given = np.zeros(len(units.members), dtype=np.int64)
        given[: len(label)] = label
        yield given


# Declared formats of an input or output: none (fp32), one of the plan's, or another.
DECLARED = st.sampled_from([None, BF16, FP16])


@given(
    graphs(),
    DECLARED,
    DECLARED,
    st.sampled_from([(BF16,), (BF16, FP16), (Format.INT8_WEIGHTS_BF16,)]),
)
def test_casts_are_those_of_the_edits(
    graph: Graph, read: Format | None, given: Format | None, lows: tuple[Format, ...]
) -> None:
    # An output in bf16 and a reader whose weights are decoded to bf16 count a cast each.
    assume(not (given is BF16 and Format.INT8_WEIGHTS_BF16 in lows))
    ports = ((graph.inputs[0], read), (graph.outputs[0], given))
    io = {v.id: f for v, f in ports if f is not None}
    formats = (FP32, *lows)
    units = make_units(graph, free(graph, formats=formats), lows)
    problem = stated(graph, units, rounding_points(graph, units), formats=formats, io=io)
    for label in labellings(units, len(formats)):
        chosen = {n: formats[label[u]] for n, u in units.of.items()}
        casts = [e for e in edits(graph, chosen, io) if isinstance(e, InsertCast)]
        found = labelling.evaluate(problem, label)
        stored = storage(graph, chosen, io)
        paid = sum(price(graph.values[e.value], stored[e.value], e.to) for e in casts)
        assert found.casts == len(casts)
        assert found.time_s == paid + 2 * len(label) - np.count_nonzero(label)


@given(graphs(), st.sampled_from([Format.TF32, Format.FP8_E4M3, Format.FP8_E5M2]))
def test_formats_of_operands_cost_what_their_edits_cost(graph: Graph, low: Format) -> None:
    formats = (FP32, low)
    units = make_units(graph, free(graph, formats=formats), (low,))
    problem = stated(graph, units, rounding_points(graph, units), formats=formats)
    for label in labellings(units, 2):
        chosen = {n: formats[label[u]] for n, u in units.of.items()}
        made = edits(graph, chosen)
        trips = [e for e in made if isinstance(e, RoundTrip)]
        assert len(trips) == len(made)
        casts = [e for e in trips if graph.values[e.value].constant is None]
        found = labelling.evaluate(problem, label)
        assert found.casts == len(casts)
        paid = len(casts) * price(graph.values[0], FP32, low)
        assert found.time_s == paid + 2 * len(label) - np.count_nonzero(label)


@given(
    graphs(),
    DECLARED,
    DECLARED,
    st.sampled_from([BF16, Format.TF32, Format.FP8_E4M3]),
    st.data(),
)
def test_the_exact_solver_is_given_the_same_problem(
    graph: Graph, read: Format | None, given: Format | None, low: Format, data: st.DataObject
) -> None:
    ports = ((graph.inputs[0], read), (graph.outputs[0], given))
    io = {v.id: f for v, f in ports if f is not None}
    formats = (FP32, low)
    units = make_units(graph, free(graph, formats=formats), (low,))
    points = rounding_points(graph, units)
    amounts = [
        np.array(data.draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)), dtype=float)
        for n in (len(points.points), len(points.weights), len(points.shared))
    ]
    measured = Sensitivity(values=amounts[0], weights=amounts[1], shared=amounts[2])
    many = stated(graph, units, points, formats=formats, io=io, sensitivity=measured)
    two = labelling.two_sided(many)
    for label in product(range(2), repeat=len(units.members)):
        given_label = np.array(label, dtype=np.int64)
        exact = evaluate(two, given_label.astype(np.bool_))
        labelled = labelling.evaluate(many, given_label)
        assert exact.time_s == labelled.time_s
        assert (exact.casts, exact.error) == (labelled.casts, labelled.error)


def test_only_two_labels_have_two_sides() -> None:
    units = make_units(CHAIN, free(CHAIN, formats=(FP32, BF16, FP16)), (BF16, FP16))
    points = rounding_points(CHAIN, units)
    problem = stated(CHAIN, units, points, formats=(FP32, BF16, FP16))
    with pytest.raises(ValueError, match="3 labels"):
        labelling.two_sided(problem)


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
    assert error_of(low, BF16, {}) == pytest.approx(error)


@pytest.mark.parametrize(
    ("low", "port", "error"),
    [
        ((), 0, 1.0),  # x is given in bf16: readers in bf16 add no error
        (("mm0",), 0, 1.0 + 10.0 + 1000.0),
        ((), 4, 100.0),  # y is declared in bf16
        (("mm1",), 4, 10.0 + 100.0 + 2000.0),
    ],
)
def test_a_declared_port_is_rounded_whatever_is_chosen(
    low: tuple[str, ...], port: int, error: float
) -> None:
    assert error_of(low, BF16, {port: BF16}) == pytest.approx(error)


@pytest.mark.parametrize("fmt", [Format.TF32, Format.FP8_E4M3, Format.INT8])
def test_an_op_that_rounds_its_operands_alone_rounds_no_result(fmt: Format) -> None:
    assert error_of(("mm0",), fmt, {}) == pytest.approx(1.0 + 1000.0)
    assert error_of(("mm1",), fmt, {}) == pytest.approx(10.0 + 2000.0)


def error_of(low: tuple[str, ...], fmt: Format, io: dict[int, Format]) -> float:
    """The squared error, if rounding x causes 1, the class {a, b} 10 and y 100."""
    formats = (FP32, fmt)
    units = make_units(CHAIN, free(CHAIN, formats=formats), (fmt,))
    points = rounding_points(CHAIN, units, results=fmt.encodes_results)
    values = np.zeros(len(points.points))
    for name, amount in (("x", 1.0), ("b", 10.0), ("y", 100.0)):
        values[point_of(CHAIN, points, name)] = amount
    weights = np.array([1000.0, 2000.0])
    sensitivity = replace(Sensitivity.zero(points), values=values, weights=weights)
    problem = stated(CHAIN, units, points, formats=formats, io=io, sensitivity=sensitivity)
    chosen = np.array([CHAIN.nodes[nodes[0]].name in low for nodes in units.members])
    return labelling.evaluate(problem, chosen.astype(np.int64)).error


def test_what_must_be_low_may_not_be_high() -> None:
    units = make_units(CHAIN, free(CHAIN), (BF16,))
    problem = stated(CHAIN, units, rounding_points(CHAIN, units), must=("turn",))
    assert np.isinf(problem.time[:, 0]).tolist() == [False, True, False]


def test_nothing_to_decide() -> None:
    units = make_units(CHAIN, {}, (BF16,))
    problem = stated(CHAIN, units, rounding_points(CHAIN, units))
    assert labelling.evaluate(problem, np.zeros(0, dtype=np.int64)).time_s == 0.0


def test_around_constants_alone_nothing_is_cast() -> None:
    """Ops with weights in 8 bits read and give fp32."""
    weights = Format.INT8_WEIGHTS
    graph = from_text(
        "input %0 x fp32\nconstant %1 w fp32 size=4\n"
        "node a matmul onnx::MatMul fp32 (%0, %1) -> (%2 v fp32)\n"
        "node b matmul onnx::MatMul fp32 (%2, %1) -> (%3 y fp32)\noutput %3"
    )
    formats = (FP32, BF16, weights)
    units = make_units(graph, free(graph, formats=formats), formats[1:])
    problem = stated(graph, units, rounding_points(graph, units), formats=formats)
    assert problem.cast[0, 1].all()
    assert np.array_equal(problem.cast[2], problem.cast[0])
    assert np.array_equal(problem.cast[:, 2], problem.cast[:, 0])


@pytest.mark.parametrize(
    ("other", "codes", "wide"),
    [
        # All readers can take codes: the kernel was timed storing codes.
        ("matmul onnx::MatMul", False, True),
        # One cannot: it was timed storing fp32.
        ("tanh onnx::Tanh", True, False),
    ],
)
def test_what_an_op_on_codes_gives_is_as_it_was_timed(
    other: str, codes: bool, wide: bool
) -> None:
    int8 = Format.INT8
    graph = from_text(
        "input %0 x fp32\nconstant %1 w fp32 size=4\n"
        "node a matmul onnx::MatMul fp32 (%0, %1) -> (%2 v fp32)\n"
        "node b matmul onnx::MatMul fp32 (%2, %1) -> (%3 y fp32)\n"
        f"node c {other} fp32 (%2) -> (%4 z fp32)\noutput %3\noutput %4"
    )
    takes = {
        n.id: Permission(
            formats=frozenset({FP32, int8} if n.op == "matmul" else {FP32}), reasons=()
        )
        for n in graph.nodes
    }
    units = make_units(graph, takes, (int8,))
    points = rounding_points(graph, units)
    count = len(units.members)
    analysis = Analysis(
        units=units,
        times={f: np.ones(count) for f in (FP32, int8)},
        cast_time=lambda value, source, to: float(source is not to),
        rounded={int8: roundings(units, points, Sensitivity.zero(points), {})},
    )
    problem = build_problem(graph, takes, analysis)
    made = int(np.flatnonzero(problem.producer == units.of[0])[0])
    cast = problem.cast[:, :, made]
    assert cast[0].tolist() == [0.0, 1.0]
    assert cast[1].tolist() == [float(wide), float(codes)]
