"""Units are the kernels' ops, as far as they permit the same stored formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.planner import chosen
from finecast.planning.problem import Choice
from finecast.planning.units import deciding, make_units, pattern_kernels
from finecast.rules import Permission
from tests.graph.text import from_text

BOTH = frozenset({Format.FP32, Format.BF16})
# x -> matmul(w) -> transpose -> gelu parts (erf, mul) -> matmul(w) -> y, with a shape read on
# the side and an op of its own type at the end.
GRAPH = from_text("""\
input %0 x fp32[4, 4]
constant %1 w fp32[4, 4] size=16 largest=1.0 smallest_nonzero=0.1
constant %2 k fp32 size=1 largest=0.5 smallest_nonzero=0.5
node mm0 matmul onnx::MatMul fp32 (%0, %1) -> (%3 a fp32[4, 4])
node turn transpose onnx::Transpose fp32 (%3) -> (%4 b fp32[4, 4])
node erf erf onnx::Erf fp32 (%4) -> (%5 c fp32[4, 4])
node mul mul onnx::Mul fp32 (%5, %2) -> (%6 d fp32[4, 4])
node mm1 matmul onnx::MatMul fp32 (%6, %1) -> (%7 e fp32[4, 4])
node size shape onnx::Shape fp32 (%7) -> (%8 f int64[2])
node odd unknown my::Op - (~%7) -> (~%9 y fp32[4, 4])
output %7
output %9
""")
IDS = {n.name: n.id for n in GRAPH.nodes}
VALUES = {v.name: v.id for v in GRAPH.values}


def permissions(graph: Graph, *, kept: tuple[str, ...] = ()) -> dict[int, Permission]:
    keep = frozenset({Format.FP32})
    return {
        n.id: Permission(formats=keep if n.name in kept else BOTH, reasons=())
        for n in graph.float_nodes
    }


def names(groups: tuple[tuple[int, ...], ...], *, of: str = "nodes") -> set[frozenset[str]]:
    table = GRAPH.nodes if of == "nodes" else GRAPH.values
    return {frozenset(table[i].name for i in group) for group in groups}


def test_without_kernels_each_op_decides_alone() -> None:
    units = make_units(GRAPH, permissions(GRAPH, kept=("erf",)), (Format.BF16,))
    assert names(units.members) == {
        frozenset({n}) for n in ("mm0", "turn", "mul", "mm1", "size")
    }
    assert all(node in units.members[u] for node, u in units.of.items())


def test_ops_of_one_kernel_decide_together() -> None:
    kernels = [[IDS["mm0"], IDS["turn"]], [IDS["erf"], IDS["mul"]], [IDS["mul"], IDS["mm1"]]]
    units = make_units(GRAPH, permissions(GRAPH), (Format.BF16,), kernels)
    expected = ({"mm0", "turn"}, {"erf", "mul", "mm1"}, {"size"})
    assert names(units.members) == {frozenset(e) for e in expected}


def test_a_kernel_with_weights_decoded_to_bf16_is_one_unit_of_their_format() -> None:
    coded = Format.INT8_WEIGHTS_BF16
    allowed = permissions(GRAPH)
    allowed[IDS["mm1"]] = Permission(formats=BOTH | {coded}, reasons=())
    kernel = [IDS["erf"], IDS["mul"], IDS["mm1"]]
    units = make_units(GRAPH, allowed, (Format.BF16, coded), [kernel])
    unit = units.of[IDS["mm1"]]
    assert sorted(units.members[unit]) == sorted(kernel)
    labels = [coded if u == unit else Format.FP32 for u in range(len(units.members))]
    made = chosen(allowed, units, Choice(formats=tuple(labels), time_s=1.0, error=0.0))
    assert [made[n] for n in kernel] == [Format.BF16, Format.BF16, coded]
    assert deciding([made[n] for n in kernel]) == {coded}


RESIDUAL = from_text("""\
input %0 x fp32[4, 4]
constant %1 w fp32[4, 4] size=16 largest=1.0 smallest_nonzero=0.1
constant %2 b fp32[4] size=4 largest=0.5 smallest_nonzero=0.5
node mm matmul onnx::MatMul fp32 (%0, %1) -> (%3 a fp32[4, 4])
node bias add onnx::Add fp32 (%3, %2) -> (%4 c fp32[4, 4])
node sum add onnx::Add fp32 (%4, %0) -> (%5 d fp32[4, 4])
node act relu onnx::Relu fp32 (%5) -> (%6 y fp32[4, 4])
output %6
""")


@pytest.mark.parametrize(
    ("on_codes", "expected"),
    [
        ({"mm", "sum"}, [{"mm", "bias"}, {"sum", "act"}]),
        ({"mm"}, [{"mm", "bias", "sum", "act"}]),
        ({"sum"}, [{"mm", "bias"}, {"sum", "act"}]),
        (set(), [{"mm", "bias", "sum", "act"}]),
    ],
)
def test_a_further_value_is_on_codes_or_not_by_itself(
    on_codes: set[str], expected: list[set[str]]
) -> None:
    """A sum with a residual, in one kernel with a product, where it may be on codes."""
    codes = Format.INT8
    allowed = {
        n.id: Permission(formats=BOTH | ({codes} if n.name in on_codes else set()), reasons=())
        for n in RESIDUAL.float_nodes
    }
    kernel = [n.id for n in RESIDUAL.nodes]
    units = make_units(RESIDUAL, allowed, (Format.BF16, codes), [kernel])
    groups = [{RESIDUAL.nodes[i].name for i in members} for members in units.members]
    assert groups == expected


def test_an_op_that_must_be_low_does_not_force_its_kernel() -> None:
    allowed = permissions(GRAPH)
    allowed[IDS["mul"]] = Permission(formats=frozenset({Format.BF16}), reasons=())
    units = make_units(GRAPH, allowed, (Format.BF16,), [[IDS["erf"], IDS["mul"]]])
    assert units.of[IDS["erf"]] != units.of[IDS["mul"]]


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=4))
def test_units_are_a_partition_that_no_kernel_crosses(kernels: list[list[int]]) -> None:
    allowed = permissions(GRAPH, kept=("turn",))
    units = make_units(GRAPH, allowed, (Format.BF16,), kernels)
    free = [i for i, p in allowed.items() if Format.BF16 in p.formats]
    assert sorted(n for nodes in units.members for n in nodes) == free
    for kernel in kernels:
        assert len({units.of[i] for i in kernel if i in units.of}) <= 1


@pytest.mark.parametrize(
    ("also", "joined"),
    [
        ("", True),
        ("node late relu onnx::Relu fp32 (%2) -> (%4 z fp32)\noutput %4\n", False),
        # Readers of its result do not matter.
        ("node late matmul onnx::MatMul fp32 (%3) -> (%4 z fp32)\noutput %4\n", True),
    ],
)
def test_a_pointwise_op_joins_the_kernel_before_it_as_its_sole_reader(
    also: str, joined: bool
) -> None:
    graph = from_text(
        "input %0 x fp32\nconstant %1 w fp32 size=4\n"
        "node product matmul onnx::MatMul fp32 (%0, %1) -> (%2 a fp32)\n"
        f"node act tanh onnx::Tanh fp32 (%2) -> (%3 y fp32)\n{also}output %3\n"
    )
    product, act = (next(n.id for n in graph.nodes if n.name == x) for x in ("product", "act"))
    kernels = pattern_kernels(graph)
    assert any({product, act} <= k for k in kernels) == joined
    assert all(len(k) > 1 for k in kernels)
