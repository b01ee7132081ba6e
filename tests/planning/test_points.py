"""Rounding points: values are rounded for single readers, and once if they are only moved."""

from __future__ import annotations

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.points import RoundingPoint, find_points, rounding_points
from finecast.planning.units import Units, make_units
from tests.graph.text import from_text, to_text
from tests.planning.test_units import GRAPH, IDS, permissions

LOW = (Format.BF16,)
# For each point its places as "reader.value" (".value" for an output of the model), and the
# names of the ops of which any rounds it.
Found = dict[frozenset[str], frozenset[str]]


def found(graph: Graph, units: Units, fused: list[frozenset[int]] | None = None) -> Found:
    def place(node: int | None, index: int) -> str:
        if node is None:
            return f".{graph.outputs[index].name}"
        value = graph.nodes[node].inputs[index]
        assert value is not None
        return f"{graph.nodes[node].name}.{graph.values[value].name}"

    def by(point: RoundingPoint) -> frozenset[str]:
        rounding = (*point.readers, *point.makers)
        return frozenset(graph.nodes[n].name for u in rounding for n in units.members[u])

    points = rounding_points(graph, units, fused or []).points
    made = {frozenset(place(*at) for at in p.places): by(p) for p in points}
    assert len(made) == len(points)
    return made


def of(**rounded: str) -> Found:
    """``erf_b="mm0 turn"``: value b, as ``erf`` reads it, is rounded if either op is low."""
    return {
        frozenset({key.replace("_", ".")}): frozenset(by.split())
        for key, by in rounded.items()
    }


def test_what_only_moves_is_rounded_once() -> None:
    units = make_units(GRAPH, permissions(GRAPH), LOW)
    # A reader of the shape is no point; an op of its own type reads as mm1 stores.
    assert found(GRAPH, units) == of(
        mm0_x="mm0",
        erf_b="mm0 turn erf",
        mul_c="erf mul",
        mm1_d="mul mm1",
        odd_e="mm1",
        _e="mm1",
    )


def test_constants_are_points_of_the_units_that_read_them() -> None:
    units = make_units(GRAPH, permissions(GRAPH, kept=("mm1",)), LOW)
    points = rounding_points(GRAPH, units)
    assert dict(zip(points.weight_units, points.weights, strict=True)) == {
        units.of[IDS["mm0"]]: {IDS["mm0"]: (1,)},
        units.of[IDS["mul"]]: {IDS["mul"]: (1,)},
    }


def test_the_number_that_a_pad_pads_by_is_no_point() -> None:
    """OpenVINO pads by another number where a switch computes it."""
    graph = from_text(
        "input %0 x fp32[4]\n"
        "constant %1 w fp32[4] size=4 largest=1.0 smallest_nonzero=0.1\n"
        "constant %2 number fp32 size=1 largest=0.1 smallest_nonzero=0.1\n"
        "node mul mul onnx::Mul fp32 (%0, %1) -> (%3 a fp32[4])\n"
        "node pad pad onnx::Pad fp32 (%3, %2) -> (%4 y fp32[6])\noutput %4\n"
    )
    allowed = permissions(graph)
    points = rounding_points(graph, make_units(graph, allowed, LOW))
    assert [*points.weights] == [{0: (1,)}]


def test_what_stays_inside_a_kernel_is_not_rounded() -> None:
    kernel = frozenset(IDS[n] for n in ("erf", "mul", "mm1"))
    units = make_units(GRAPH, permissions(GRAPH), LOW, [kernel])
    assert found(GRAPH, units, [kernel]) == of(
        mm0_x="mm0", erf_b="mm0 turn erf mul mm1", odd_e="erf mul mm1", _e="erf mul mm1"
    )


def test_what_one_kernel_computes_is_rounded_between_two_of_its_units() -> None:
    kernel = frozenset(IDS[n] for n in ("erf", "mul", "mm1"))
    units = make_units(GRAPH, permissions(GRAPH), LOW, [[IDS["erf"], IDS["mul"]]])
    assert found(GRAPH, units, [kernel])[frozenset({"mm1.d"})] == {"erf", "mul", "mm1"}


def test_an_output_is_rounded_though_its_readers_are_in_its_kernel() -> None:
    graph = from_text(to_text(GRAPH) + "output %5\n")
    kernel = frozenset(IDS[n] for n in ("erf", "mul", "mm1"))
    units = make_units(graph, permissions(graph), LOW, [kernel])
    made = found(graph, units, [kernel])
    assert frozenset({".c"}) in made
    assert not any("mm1.d" in places for places in made)


def test_what_no_plan_stores_low_is_not_rounded() -> None:
    kept = ("mm0", "turn", "erf", "mul", "mm1")
    units = make_units(GRAPH, permissions(GRAPH, kept=kept), LOW)
    assert found(GRAPH, units) == {}


def test_a_read_suffices_to_round() -> None:
    kept = ("mm0", "turn", "mul", "mm1", "size")
    units = make_units(GRAPH, permissions(GRAPH, kept=kept), LOW)
    assert found(GRAPH, units) == of(erf_b="erf", mul_c="erf")


RESIDUAL = from_text("""\
input %0 x fp32[4, 4]
constant %1 w fp32[4, 4] size=16 largest=1.0 smallest_nonzero=0.1
node mm matmul onnx::MatMul fp32 (%0, %1) -> (%2 a fp32[4, 4])
node add add onnx::Add fp32 (%0, %2) -> (%3 y fp32[4, 4])
output %3
""")


def test_a_value_is_rounded_for_the_reader_that_is_low() -> None:
    units = make_units(RESIDUAL, permissions(RESIDUAL), LOW)
    assert found(RESIDUAL, units) == of(mm_x="mm", add_x="add", add_a="mm add", _y="add")


def test_what_the_same_units_round_is_one_point() -> None:
    units = make_units(RESIDUAL, permissions(RESIDUAL), LOW, [[0, 1]])
    assert frozenset({"mm.x", "add.x"}) in found(RESIDUAL, units)


def test_ends_are_rounded_by_their_declared_type() -> None:
    units = make_units(RESIDUAL, permissions(RESIDUAL), LOW)
    ends = [p.ends for p in rounding_points(RESIDUAL, units).points]
    assert ends == [(0,), (0,), (), (3,)]


def test_constants_are_points_of_their_reader() -> None:
    points = find_points(RESIDUAL, frozenset({0}))
    assert [(p.reader, p.port, p.path) for p in points] == [
        (0, 0, (0,)),
        (0, 1, (0,)),
        (1, 1, (0,)),
    ]


SUBTRACTED = from_text("""\
input %0 x fp32[4, 4]
node tanh tanh onnx::Tanh fp32 (%0) -> (%1 a fp32[4, 4])
node exp exp onnx::Exp fp32 (%1) -> (%2 b fp32[4, 4])
node sub sub onnx::Sub fp32 (%1, %2) -> (%3 y fp32[4, 4])
output %3
""")


def test_an_op_rounds_its_result_for_all_readers_together() -> None:
    units = make_units(SUBTRACTED, permissions(SUBTRACTED), LOW)
    points = rounding_points(SUBTRACTED, units)
    (shared,) = points.shared
    unit, numbers = shared
    assert unit == units.of[0]
    places = {at for number in numbers for at in points.points[number].places}
    assert places == {(1, 0), (2, 0)}
    assert not rounding_points(SUBTRACTED, units, results=False).shared
