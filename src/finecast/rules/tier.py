"""What is known of an op's numerics before anything is measured: its tier, and long sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from finecast.graph import Dim, Graph, Node, Value
from finecast.ops import OpKind, Tier, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.constants import DIVISORS, scalars
from finecast.rules.facts import Facts
from finecast.rules.policy import Scope


def _judge_tier(node: Node, context: Context) -> Ruling | None:
    info = by_name(node.op)
    if info.tier is Tier.NEVER:
        what = "an op that is not known here" if info.name == "unknown" else f"{info.name}"
        return Ruling(permits=KEEP, text=f"{what} keeps its type")
    if info.tier is not Tier.SENSITIVE or context.policy.scope is not Scope.AUTO:
        return None
    if context.measured:
        return None  # the op's error on real data decides
    if divides_by_constant(context.graph, node):
        return None  # as well-behaved as a multiplication by the reciprocal
    if _pools_positions(node, context):
        return None
    return Ruling(
        permits=KEEP, text=f"{info.name} loses digits or range, and nothing was measured"
    )


def divides_by_constant(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a division whose divisor is a constant: ``scores / 8``."""
    if node.op != "div":
        return False
    port = DIVISORS[node.op]
    if port >= len(node.inputs):
        return bool(scalars(node))
    divisor = node.inputs[port]
    return divisor is not None and graph.values[divisor].constant is not None


_SQUARES = frozenset({"mul", "pow", "square"})


def _pools_positions(node: Node, context: Context) -> bool:
    """Whether ``node`` is a global average pool that is written as a mean.

    OpenVINO's IR and PyTorch's decompositions have no other op for it. It is the mean over
    all positions of signals, images or volumes, whose channels are the second axis or the
    last one. A mean of products, or one that is subtracted, belongs to a norm.
    """
    graph = context.graph
    read, result = graph.read(node, 0), node.outputs[0]
    if node.op != "reduce_mean" or read is None or result is None:
        return False
    rank, axes = len(_shape(read, context.facts) or ()), _axes(node, context, ())
    positions = sorted(axis % rank for axis in axes) if rank else []
    if rank < 3 or positions not in ([*range(2, rank)], [*range(1, rank - 1)]):
        return False
    maker = graph.maker(read)
    return (maker is None or maker.op not in _SQUARES) and all(
        reader.op != "sub" for reader in graph.readers(graph.values[result])
    )


TIER = Rule(name="tier", judge=_judge_tier)


_REDUCTIONS = frozenset({OpKind.REDUCTION, OpKind.LOSS})
# Norms and pools that sum powers, and the axes of those whose results have the size of their
# operands, by default. Other norms keep their statistics in fp32 by definition, or in the
# kernels that engines have for them.
_POWER_SUMS: Mapping[str, tuple[int, ...]] = {
    "lp_norm": (-1,),
    "lp_pool": (),
    "global_lp_pool": (),
}


def _judge_depth(node: Node, context: Context) -> Ruling | None:
    """Long sums outside the matmul engine: reduction depth times unit roundoff.

    The matmul engine accumulates in fp32, other reductions may not. Summing n terms in a
    format with unit roundoff u has a relative error of up to n*u (Higham, Accuracy and
    Stability of Numerical Algorithms, section 4.2). From 1 on that guarantees no digit.
    """
    info = by_name(node.op)
    sums = info.kind in _REDUCTIONS or node.op in _POWER_SUMS
    if not info.accumulates or not sums or context.measured:
        return None
    if _pools_positions(node, context):
        return None
    source, result = (
        elements(context.graph, p[0], context.facts) for p in (node.inputs, node.outputs)
    )
    depth = max(source // result if result else 0, _normalized(node, context))
    bound = depth * context.low.unit_roundoff
    if bound < 1:
        return None
    return Ruling(
        permits=KEEP,
        text=f"sums {depth} terms: n*u of {context.low.label} is {bound:.3g}",
        evidence={"depth": depth, "unit_roundoff": context.low.unit_roundoff},
    )


def elements(graph: Graph, index: int | None, facts: Facts) -> int:
    """Elements of a value by its observed shape, else its declared one; 0 if unknown."""
    shape = None if index is None else _shape(graph.values[index], facts)
    if shape is None or not all(isinstance(d, int) for d in shape):
        return 0
    return math.prod(d for d in shape if isinstance(d, int))


def _normalized(node: Node, context: Context) -> int:
    """Number of elements that each number of a norm's result depends on; 0 for other ops."""
    of, read = _POWER_SUMS.get(node.op, ()), context.graph.read(node, 0)
    shape = (None if read is None else _shape(read, context.facts)) or ()
    axes = _axes(node, context, of)
    sizes = [shape[a] for a in axes if of and -len(shape) <= a < len(shape)]
    return math.prod(s for s in sizes if isinstance(s, int)) if sizes else 0


def _shape(value: Value, facts: Facts) -> tuple[Dim, ...] | None:
    """The observed shape of ``value``, or the declared one."""
    return facts[value.id].shape if value.id in facts else value.shape


def _axes(node: Node, context: Context, default: tuple[int, ...]) -> tuple[int, ...]:
    """The axes that ``node`` sums over; none where they are computed."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:  # OpenVINO's ops read them
        constant = context.graph.values[node.inputs[1]].constant
        return () if constant is None else tuple(constant.read().reshape(-1).tolist())
    stated: Any = next(
        (node.attributes[key] for key in ("axes", "axis", "dim") if key in node.attributes),
        default,
    )
    return (stated,) if isinstance(stated, int) else tuple(stated)


DEPTH = Rule(name="reduction_depth", judge=_judge_depth)
