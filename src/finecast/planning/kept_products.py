"""The products that a plan leaves in fp32: they bound how fast its model can be.

A user whose largest product stays fp32 has to know which one it is, and what keeps it: a
definition without the format, weights that are computed in each call, an engine without the
kernel, or times. This is read from graph and plan alone, and so holds for every library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.ops.flops import Shapes, flops
from finecast.planning.plan import Plan
from finecast.rules.folded import settled

_LEAST_SHARE: Final = 0.01
"""A product of a smaller share of the operations is not named: even if it took no time, the
model would gain less than races tell apart."""
_LONGEST_NAME: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProducts:
    """The largest product that a plan leaves in fp32, and how many there are.

    Attributes:
        count: Products in fp32.
        node: The name of the largest one.
        native: Its op, as the model's library calls it.
        share: Its share of the operations of all products; None where one of those cannot be
            counted.
        is_largest: Whether no other product of the model is larger.
    """

    count: int
    node: str
    native: str
    share: float | None
    is_largest: bool
    why: str

    @property
    def text(self) -> str:
        """A sentence on it."""
        share = "" if self.share is None else f", {self.share:.0%} of the products' operations"
        which = f"{self.node[:_LONGEST_NAME]!r} ({self.native}{share})"
        why = self.why.removeprefix("kept fp32: ")
        if self.count == 1:
            return f"1 product stays fp32, {which}: {why}"
        return f"{self.count} products stay fp32, the largest of them {which}: {why}"


def kept_products(
    graph: Graph, plan: Plan, shapes: Shapes | None = None
) -> KeptProducts | None:
    """The products that ``plan`` leaves in fp32; None where all are low or those are small.

    Products are ordered by their operations, or by their weights where the operations of one
    cannot be counted, as its shape is not known.

    ``shapes`` are observed ones by value id, which take precedence over the graph's.
    """
    decided = {d.node: d for d in plan.decisions}
    counts = {n.id: flops(graph, n, shapes) for n in graph.nodes if _is_product(graph, n)}
    known = {i: count for i, count in counts.items() if count is not None}
    counted = len(known) == len(counts)
    sizes = known if counted else {i: _weights(graph, i) for i in counts}
    kept = [
        i
        for i in sizes
        if (own := decided.get(graph.nodes[i].name)) and own.format is Format.FP32
    ]
    if not kept:
        return None
    largest, total = max(kept, key=sizes.__getitem__), sum(sizes.values())
    share = sizes[largest] / total if counted and total else None
    if share is not None and share < _LEAST_SHARE:
        return None
    node = graph.nodes[largest]
    return KeptProducts(
        count=len(kept),
        node=node.name,
        native=node.native.rpartition("::")[2],
        share=share,
        is_largest=sizes[largest] == max(sizes.values()),
        why=decided[node.name].why,
    )


def _is_product(graph: Graph, node: Node) -> bool:
    """Whether an op multiplies matrices.

    Of an op that is not known here only its weights tell, and a Fourier transform is a product
    by constants that it does not read.
    """
    info = by_name(node.op)
    if info.kind is OpKind.UNKNOWN:
        return _weights(graph, node.id) > 0
    return info.matmul_engine or (info.kind is OpKind.SIGNAL and info.accumulates)


def _weights(graph: Graph, index: int) -> float:
    """How many numbers the largest matrix has that a node reads and that never changes."""
    fixed = graph.once(settled).intersection(graph.nodes[index].inputs)
    matrices = (graph.values[i].fixed_shape or () for i in fixed)
    return max((float(math.prod(shape)) for shape in matrices if len(shape) > 1), default=0.0)
