"""Casts to bf16 that OpenVINO rounds wrongly: their numbers are first rounded in fp32.

One of OpenVINO's casts rounds to the nearest number only if that number's last bit is
odd, and truncates otherwise. It is used for values of dynamic shape, in bodies, and when a
model is loaded, for what is computed from constants. It leaves numbers that bf16 holds as they
are. So values that matrix products and convolutions read are rounded in fp32 before the cast.
That costs one more kernel, and nothing at run time for what is computed from constants.

Law: products read what a correct cast gives. Only Inf becomes NaN, and a product of either is
Inf or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

from finecast.devices.faults import is_here
from finecast.frontends.replaying import Restated
from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.edits import Edit, InsertCast, Use
from finecast.planning.plan import Plan
from finecast.planning.scalable import CONVOLUTIONS
from finecast.rules.folded import computed_once

_ENGINE: Final = "openvino"
FAULT: Final = "openvino-cast-rounding"
"""The fault because of which the ops are there, as models note it."""
_REASON: Final = f"{_ENGINE} rounds its cast wrongly, so it is rounded in fp32 before"
_LOW: Final = Format.BF16
_PART: Final = 2.0 ** (_LOW.mantissa_bits - Format.FP32.mantissa_bits)

# Nodes compute (x * FACTOR + x) * BACK. Rounding x * FACTOR to fp32 drops the bits that bf16
# does not have; adding x leaves _PART times the rounded x, which BACK scales up again (T. J.
# Dekker, "A floating-point technique for extending the available precision", 1971). FACTOR is
# below 1 in magnitude, or the product of an x just below a power of two could lie above it,
# where fp32 is coarser: .99999 was rounded to .996.
# Two more choices save kernels in OpenVINO: a sum, not a difference; and the second x is
# reshaped to another rank, since a sum of a value and its own product would not be fused.
# What convolutions read is stored in blocks of channels, where a reshape costs more than a
# kernel: there the second x is x itself.
FACTOR: Final = _PART - 1
BACK: Final = 1 / _PART


def rounded_first(graph: Graph, edits: Iterable[Edit], plan: Plan) -> frozenset[int]:
    """Ids of the values that are rounded before they are cast to bf16, for OpenVINO."""
    if plan.engine != _ENGINE or plan.keep_ops or not is_here(FAULT):
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
    """The report of the values with ids ``rounded``; empty if there are none."""
    names = tuple(graph.values[i].name for i in sorted(rounded))
    return (Restated(nodes=names, reason=_REASON),) if names else ()


def rounded_by(step: Callable[..., Any], x: Any, axis: Any, *, blocks: bool) -> Any:
    """The tensor ``x`` rounded to bf16, in fp32.

    Args:
        step: Makes an op of its kind, its label and its inputs; returns the result.
        x: The tensor.
        axis: The constant [0].
        blocks: Whether OpenVINO stores ``x`` in blocks of channels.
    """
    scaled = step("multiply", "scaled", x, FACTOR)
    if blocks:
        return step("multiply", "rounded", step("add", "part", scaled, x), BACK)
    again = step("unsqueeze", "again", x, axis)
    whole = step("multiply", "whole", step("add", "part", scaled, again), BACK)
    return step("squeeze", "rounded", whole, axis)


def in_blocks(graph: Graph, value: int) -> bool:
    """Whether a convolution reads this result of an op: OpenVINO stores it channel-blocked."""
    given = graph.values[value]
    readers = (graph.nodes[n].op for n in given.uses)
    return given.producer is not None and not CONVOLUTIONS.isdisjoint(readers)


def _is_wrong(graph: Graph, value: Value) -> bool:
    """Whether OpenVINO casts the value wrongly: its shape is dynamic, or a body defines it."""
    if value.fixed_shape is None:
        return True
    if value.producer is None:
        return not value.is_input and value.constant is None  # an input of a body
    return graph.nodes[value.producer].region != 0


def _products_read(graph: Graph, uses: Iterable[Use]) -> bool:
    """Whether only matrix products and convolutions read the value at ``uses``.

    Ops that only move numbers are looked through.
    """
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
