"""Casts to bf16 that OpenVINO rounds wrongly: their numbers are first rounded in fp32.

One of OpenVINO's casts rounds to the nearest number only if that number's last bit is
odd, and truncates otherwise. It is used for values of dynamic shape, in bodies, and when a
model is loaded, for what is computed from constants. It leaves numbers that bf16 holds as they
are. So values that matrix products and convolutions read are rounded in fp32 before the cast.
That costs one more kernel, and nothing at run time for what is computed from constants.

Law: products read what a correct cast gives. Only Inf becomes NaN, and a product of either is
Inf or NaN. Where OpenVINO's precision hint is a low format, they read numbers rounded to that
format, as all products do then, and then to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, auto
from typing import Any, Final

from finecast.devices.faults import is_here
from finecast.frontends.replaying import Restated
from finecast.graph import PHI, Graph, Node, Value
from finecast.graph.worklist import Worklist
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.edits import Edit, InsertCast, Use
from finecast.planning.plan import Plan
from finecast.planning.products import CONVOLUTIONS
from finecast.rules.folded import computed_once

_ENGINE: Final = "openvino"
FAULT: Final = "openvino-cast-rounding"
"""The fault because of which the ops are there, as models note it."""
_REASON: Final = "OpenVINO rounds its cast wrongly, so it is rounded in fp32 before"
_LOW: Final = Format.BF16
_PART: Final = 2.0 ** (_LOW.mantissa_bits - Format.FP32.mantissa_bits)

# Nodes compute (x * FACTOR + x) * BACK. Rounding x * FACTOR to fp32 drops the bits that bf16
# does not have; adding x leaves _PART times the rounded x, which BACK scales up again (T. J.
# Dekker, "A floating-point technique for extending the available precision", 1971). FACTOR is
# below 1 in magnitude, or the product of an x just below a power of two could lie above it,
# where fp32 is coarser: .99999 was rounded to .996.
# A sum, not a difference, saves a kernel in OpenVINO. So does another tensor as the second x,
# since a kernel ends before an op that reads one of its tensors again. One of the two is x
# reshaped to another rank; or a copy in blocks of channels, in which what convolutions read
# is stored, and a reshape costs more than a kernel.
#
# The sum cancels, and what its operands differ by otherwise comes out 65536 times as large. A
# low hint (bf16 is OpenVINO's default on CPUs that have it) rounds what kernels read and give,
# while each computes in fp32. So the product and the sum have to be of one kernel, and read
# the same numbers, whatever OpenVINO does before:
# 1. It moves products with constants above a reshape, or into the division of a norm, but no
#    maximum of two tensors. So x's maximum with itself, which is x, is what is multiplied.
# 2. Kernels of pointwise ops read an input in fp32 even then, but reshapes read it rounded.
#    So an input is first copied by a kernel.
# 3. Where shapes are fixed later, a kernel has all pointwise ops between two reshapes. So the
#    x that is multiplied is the one behind the reshape; and what an op gives that itself may
#    be a reshape, with which that one would cancel, is copied first, too.
# 4. Kernels of integers give fp32 even then, to what reads their results as integers. So do
#    those that begin with a cast to fp32. In a model that has either, the x that is multiplied
#    is a copy, too.
# A copy in blocks is a power of 1, which is faster than a maximum.
_FACTOR: Final = _PART - 1
_BACK: Final = 1 / _PART
_SAME: Final = 1.0
_AXES: Final = [0]


class StoredAs(Enum):
    """How OpenVINO keeps a value; the ops that round it depend on that.

    Attributes:
        PLAIN: As a kernel gave it.
        GIVEN: As an input of the model or of a body, as an op gave it that moves numbers, or
            by a kernel that may give fp32 under a low hint.
        BLOCKS: In blocks of channels.
        FP32_BLOCKS: In blocks of channels, by a kernel that may give fp32 under a low hint.
    """

    PLAIN = auto()
    GIVEN = auto()
    BLOCKS = auto()
    FP32_BLOCKS = auto()


def rounded_first(graph: Graph, edits: Iterable[Edit], plan: Plan) -> Mapping[int, StoredAs]:
    """The values that are rounded before they are cast to bf16, for OpenVINO, by their ids."""
    if plan.engine != _ENGINE or plan.keep_ops or not is_here(FAULT):
        return {}
    inserted = [e for e in edits if isinstance(e, InsertCast)]
    casts = [e for e in inserted if e.to is _LOW]
    fixed = computed_once(graph) if casts else frozenset[int]()
    integers = any(fmt.multiplies_integers for fmt in plan.low_formats)
    widened = any(
        e.to is Format.FP32 and any(u.node is not None for u in e.uses) for e in inserted
    )
    return {
        cast.value: stored_as(graph, cast.value, wide=integers or widened)
        for cast in casts
        if (cast.value in fixed or _is_wrong(graph, graph.values[cast.value]))
        and _products_read(graph, cast.uses)
    }


def restated(graph: Graph, rounded: Collection[int]) -> tuple[Restated, ...]:
    """The report of the values with ids ``rounded``; empty if there are none."""
    names = tuple(graph.values[i].name for i in sorted(rounded))
    return (Restated(nodes=names, reason=_REASON),) if names else ()


def rounded_by(step: Callable[..., Any], x: Any, stored: StoredAs) -> Any:
    """The tensor ``x`` rounded to bf16, in fp32.

    Args:
        step: Makes an op of its kind, its label, a tensor and another one, or a number or a
            list of axes; returns the result.
        x: The tensor.
        stored: How OpenVINO keeps ``x``.
    """
    if stored is StoredAs.FP32_BLOCKS:
        x = step("power", "first", x, _SAME)
    if stored in (StoredAs.BLOCKS, StoredAs.FP32_BLOCKS):
        scaled = step("multiply", "scaled", x, _FACTOR)
        part = step("add", "part", scaled, step("power", "copy", x, _SAME))
        return step("multiply", "rounded", part, _BACK)
    if stored is StoredAs.GIVEN:
        x = step("maximum", "copy", x, x)
    again = step("unsqueeze", "again", x, _AXES)
    scaled = step("multiply", "scaled", step("maximum", "most", again, again), _FACTOR)
    whole = step("multiply", "whole", step("add", "part", scaled, x), _BACK)
    return step("squeeze", "rounded", whole, _AXES)


def stored_as(graph: Graph, value: int, *, wide: bool = False) -> StoredAs:
    """How OpenVINO keeps a value. Results of ops that convolutions read are in blocks.

    A moved input is one: OpenVINO drops an op that moves nothing.

    Args:
        graph: The graph.
        value: The value's id.
        wide: Whether the model has kernels that may give fp32 under a low hint.
    """
    maker = source = _maker(graph, value)
    while source is not None and by_name(source.op).places:
        moved = source.inputs[0]
        source = None if moved is None else _maker(graph, moved)
    if maker is None or source is None:
        return StoredAs.GIVEN
    readers = (graph.nodes[n].op for n in graph.values[value].uses)
    if not CONVOLUTIONS.isdisjoint(readers):
        return StoredAs.FP32_BLOCKS if wide else StoredAs.BLOCKS
    moves = by_name(maker.op).kind is OpKind.MOVEMENT
    return StoredAs.GIVEN if moves or wide else StoredAs.PLAIN


def _maker(graph: Graph, value: int) -> Node | None:
    """The op that computes a value; None if that is an input of the model or of a body."""
    node = graph.maker(value)
    return None if node is None or node.op == PHI else node


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
    readers = {use.node for use in uses}
    nodes = Worklist(readers)
    for number in nodes:
        node = graph.nodes[number]
        info = by_name(node.op)
        moved = list(graph.following_outputs(node)) if info.places else []
        if any(v.is_output for v in moved) or not (info.places or info.matmul_engine):
            return False
        nodes.add(n for v in moved for n in v.uses)
    return None not in readers
