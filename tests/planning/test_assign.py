"""The lowest plan: every op that may be low is, but for movers and parts of kernels."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.planner import lowest
from finecast.rules import Permission
from tests.graph.text import from_text

FP32, BF16 = Format.FP32, Format.BF16
FREE, FIXED = frozenset({FP32, BF16}), frozenset({FP32})
KINDS = ("transpose onnx::Transpose", "relu onnx::Relu", "reshape onnx::Reshape")


def permissions(graph: Graph, fixed: set[int]) -> dict[int, Permission]:
    return {
        n.id: Permission(formats=FIXED if n.id in fixed else FREE, reasons=())
        for n in graph.float_nodes
    }


def chain(*ops: str, source: str = "input %0 x fp32[2]") -> Graph:
    """A chain of ops, each reading the result of the one in front."""
    lines = ["graph 0", source]
    for i, op in enumerate(ops):
        lines.append(f"node n{i} {op} fp32 (%{i}) -> (%{i + 1} v{i} fp32[2])")
    return from_text("\n".join([*lines, f"output %{len(ops)}"]))


def formats(graph: Graph, fixed: set[int]) -> str:
    found = lowest(graph, permissions(graph, fixed), BF16)
    return "".join("l" if found[n.id] is BF16 else "h" for n in graph.nodes)


def test_what_is_moved_between_fp32_stays() -> None:
    move, compute, place = KINDS
    assert formats(chain(compute, move, place, compute), {0, 3}) == "hhhh"
    assert formats(chain(move, place), set()) == "hh"


def test_what_is_moved_to_or_from_a_low_op_is_low() -> None:
    move, compute, place = KINDS
    assert formats(chain(compute, move, place, compute), {0}) == "hlll"
    assert formats(chain(compute, move, place, compute), {3}) == "lllh"


def test_a_constant_is_stored_low() -> None:
    constant = "constant %0 w fp32[2] size=2"
    assert formats(chain(KINDS[0], KINDS[1], source=constant), {1}) == "lh"


def test_what_an_integer_kernel_adds_and_scales_by_is_not_cast_before() -> None:
    """But what is read by others, too, or behind another op, is no part of the kernel."""
    graph = from_text(
        "graph 0\ninput %0 x fp32[2, 8, 4, 4]\nconstant %1 w fp32[8, 8, 1, 1] size=64\n"
        "constant %2 c fp32[1, 8, 1, 1] size=8\n"
        "node conv conv onnx::Conv fp32 (%0, %1) -> (%3 a fp32[2, 8, 4, 4])\n"
        "node scale mul onnx::Mul fp32 (%3, %2) -> (%4 b fp32[2, 8, 4, 4])\n"
        "node bias add onnx::Add fp32 (%2, %4) -> (%5 d fp32[2, 8, 4, 4])\n"
        "node twice add onnx::Add fp32 (%5, %2) -> (%6 e fp32[2, 8, 4, 4])\n"
        "node act relu onnx::Relu fp32 (%5) -> (%7 f fp32[2, 8, 4, 4])\n"
        "node after add onnx::Add fp32 (%7, %2) -> (%8 g fp32[2, 8, 4, 4])\n"
        "output %6\noutput %8"
    )
    both = {n.id: Permission(formats=FREE, reasons=()) for n in graph.float_nodes}
    both[0] = Permission(formats=FREE | {Format.INT8}, reasons=())
    names = {n.id: n.name for n in graph.nodes}
    stay = {names[i] for i, f in lowest(graph, both, Format.INT8, BF16).items() if f is FP32}
    assert stay == {"scale", "bias"}
    assert BF16 in {lowest(graph, both, BF16)[n.id] for n in graph.nodes if n.name == "bias"}


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Graph, set[int]]:
    """Random graphs, with the ids of the ops that are fixed to fp32."""
    lines = ["graph 0", "input %0 x fp32[2]"]
    count = draw(st.integers(1, 8))
    for i in range(count):
        read = draw(st.lists(st.integers(0, i), min_size=1, max_size=2))
        kind = draw(st.sampled_from(KINDS))
        values = ", ".join(f"%{index}" for index in read)
        lines.append(f"node n{i} {kind} fp32 ({values}) -> (%{i + 1} v{i} fp32[2])")
    fixed = draw(st.sets(st.integers(0, count - 1)))
    return from_text("\n".join([*lines, f"output %{count}"])), fixed


@given(graphs())
def test_a_mover_is_low_where_movers_join_it_to_a_low_op(case: tuple[Graph, set[int]]) -> None:
    graph, fixed = case
    count = len(graph.nodes)
    free = np.array([n.id not in fixed for n in graph.nodes])
    moves = free & np.array([by_name(n.op).places for n in graph.nodes])
    gives = np.array([[a.outputs[0] in b.inputs for b in graph.nodes] for a in graph.nodes])
    # A path goes from a mover to its neighbours, over movers, and may end in any op.
    steps = ((gives | gives.T) & moves[:, None]) | np.eye(count, dtype=bool)
    reach = np.linalg.matrix_power(steps.astype(int), count) > 0
    computes = free & ~moves
    wanted = computes | (moves & (reach & computes).any(axis=1))
    assert formats(graph, fixed) == "".join("l" if one else "h" for one in wanted)
