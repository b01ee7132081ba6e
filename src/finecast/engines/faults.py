"""What engines compute wrongly: patterns that are never written for them.

A fault is here because a test has shown it in the release that is pinned; the test fails when
a later release is right, and the row goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from finecast.engines.base import Engine
from finecast.graph import ConstantStats, Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name

Fault: TypeAlias = Callable[[Graph], Mapping[int, str]]

_MOVES: Final = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT, OpKind.CAST})
_ADDS: Final = frozenset({"add", "sub"})
_PRODUCTS: Final = frozenset({"matmul", "gemm"})


def faults(engine: Engine, graph: Graph, low: Format) -> Mapping[int, str]:
    """Ids of the nodes that ``engine`` may compute wrongly in ``low``, with the reason."""
    found: dict[int, str] = {}
    for fault in FAULTS.get((engine.name, low), ()):
        found |= fault(graph)
    return found


def _second_bias(graph: Graph) -> Mapping[int, str]:
    """Additions of several constant vectors, one after the other, to a product.

    OpenVINO 2026.4 fuses them into the product also where a cast to or from fp16 stands
    between; then it computes with the last alone (MatMul, Gemm; not convolutions). So all of
    them stay in one format. Scalars are another fusion, which is right; they and moves may
    stand between.
    """
    found: dict[int, str] = {}
    for product in graph.nodes:
        if product.op not in _PRODUCTS:
            continue
        for bias in _biases(graph, product):
            before = bias
            between, after = _next_bias(graph, before)
            while after is not None and after.id not in found:
                text = (
                    f"openvino leaves out the bias that {before.name} adds if {after.name} "
                    "adds another in fp16"
                )
                found |= dict.fromkeys((before.id, *between, after.id), text)
                before = after
                between, after = _next_bias(graph, before)
    return found


def _biases(graph: Graph, product: Node) -> list[Node]:
    """The ops that add the bias of ``product``: itself, or one behind it."""
    if product.op == "gemm" and len(product.inputs) > 2:
        return [product]
    _, after = _next_bias(graph, product)
    return [after] if after is not None else []


def _next_bias(graph: Graph, start: Node) -> tuple[set[int], Node | None]:
    """The next op that adds a constant of several elements, and ids of what stands before."""
    waiting, between, seen = list(start.outputs), set[int](), set[int]()
    while waiting:
        index = waiting.pop()
        if index is None or index in seen:
            continue
        seen.add(index)
        for node in (graph.nodes[n] for n in graph.values[index].uses):
            adds = node.op in _ADDS
            size = max((c.size for c in _constants(graph, node)), default=0)
            if adds and size > 1:
                return between, node
            if (adds and size) or by_name(node.op).kind in _MOVES:
                between.add(node.id)
                waiting.extend(node.outputs)
    return between, None


def _constants(graph: Graph, node: Node) -> list[ConstantStats]:
    values = (graph.values[i] for i in node.inputs if i is not None)
    return [v.constant for v in values if v.constant is not None]


FAULTS: Final[Mapping[tuple[str, Format], tuple[Fault, ...]]] = {
    ("openvino", Format.FP16): (_second_bias,),
}
