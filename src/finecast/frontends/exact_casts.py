"""Casts to bf16 that OpenVINO rounds wrongly: their numbers are rounded in fp32 before.

OpenVINO 2026.4 has a cast that rounds to the nearest number if that has an odd last digit, and
cuts digits off otherwise. By it run casts of values whose shape is open, casts in bodies, and
those of what is computed from constants, when a model is loaded. Numbers of bf16 it leaves as
they are: what products read is rounded first, by one more kernel, or by none of what is
computed once. Law: what products read is what a right cast gives; Inf alone comes out as NaN,
and of either a product makes Inf or NaN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from finecast.frontends.replaying import Restated
from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.edits import Edit, InsertCast, Use
from finecast.planning.plan import Plan
from finecast.planning.scalable import CONVOLUTIONS
from finecast.rules.folded import computed_once

_ENGINE: Final = "openvino"
_REASON: Final = f"{_ENGINE} rounds its cast wrongly, so it is rounded in fp32 before"
_LOW: Final = Format.BF16
_PART: Final = 2.0 ** (_LOW.mantissa_bits - Format.FP32.mantissa_bits)

# In x * FACTOR + x the product is rounded where bf16 ends, and what is left is a part of the
# rounded x, which BACK makes whole (T. J. Dekker, "A floating-point technique for extending
# the available precision", 1971). The product is nearer to 0 than x: one that is not may lie
# beyond a power of two, where digits are coarser, and what is just below 1 came out as .996.
# Of a difference OpenVINO would make one kernel more; and one more of a sum of what it just
# multiplied with itself: the second x has another shape. But what convolutions read rests in
# blocks of channels, and to reshape it takes longer than a kernel: there the second x is x.
FACTOR: Final = _PART - 1
BACK: Final = 1 / _PART


def rounded_first(graph: Graph, edits: Iterable[Edit], plan: Plan) -> frozenset[int]:
    """Ids of the values that are rounded before they are cast to bf16, for OpenVINO."""
    if plan.engine != _ENGINE or plan.keep_ops:
        return frozenset()
    casts = [e for e in edits if isinstance(e, InsertCast) and e.to is _LOW]
    fixed = computed_once(graph) if casts else frozenset[int]()
    return frozenset(
        cast.value
        for cast in casts
        if (cast.value in fixed or _is_wrong(graph, graph.values[cast.value]))
        and _products_read(graph, cast.uses)
    )


def restated(graph: Graph, rounded: Collection[int]) -> tuple[Restated, ...]:
    """What to say of the values ``rounded``, if there are any."""
    names = tuple(graph.values[i].name for i in sorted(rounded))
    return (Restated(nodes=names, reason=_REASON),) if names else ()


def in_blocks(graph: Graph, value: int) -> bool:
    """Whether a convolution reads what an op gives, which rests in blocks of channels then."""
    given = graph.values[value]
    readers = (graph.nodes[n].op for n in given.uses)
    return given.producer is not None and not CONVOLUTIONS.isdisjoint(readers)


def _is_wrong(graph: Graph, value: Value) -> bool:
    """Whether OpenVINO casts the value wrongly: one of open shape, or of a body."""
    if value.shape is None or not all(isinstance(size, int) for size in value.shape):
        return True
    if value.producer is None:
        return not value.is_input and value.constant is None  # an input of a body
    return graph.nodes[value.producer].region != 0


def _products_read(graph: Graph, uses: Iterable[Use]) -> bool:
    """Whether products alone read the value at ``uses``, moved or not."""
    waiting, seen = [use.node for use in uses], set[int]()
    while waiting:
        number = waiting.pop()
        if number is None:
            return False
        if number in seen:
            continue
        seen.add(number)
        node = graph.nodes[number]
        info = by_name(node.op)
        if info.places:
            moved = list(graph.following_outputs(node))
            waiting += [None for v in moved if v.is_output]
            waiting += [n for v in moved for n in v.uses]
        elif not info.matmul_engine:
            return False
    return True
