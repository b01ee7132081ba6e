"""Constants that the low format cannot hold: -3.4e38 masks, 1e-12 epsilons, huge scales.

A constant that becomes infinite or zero changes what the op computes. Such an op keeps fp32:
clamping the constant is no alternative, since a mask of -1e4 changes predictions. So do ops
that read a value which such a constant is carried to, and divisions which it guards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from finecast.graph import SCALARS, Graph, Node, Value
from finecast.graph.worklist import Worklist
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import MOVES, OpKind, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

# A weight matrix may hold a few tiny elements that vanish without harm; a scalar may not.
_FEW = 16
# By op, the input at which a zero gives Inf, so that not a single element may become zero.
DIVISORS: Final[Mapping[str, int]] = {
    "div": 1,
    "mod": 1,
    "reciprocal": 0,
    "rsqrt": 0,
    "log": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantProblem:
    """The magnitude (``what``: ``largest`` or ``smallest``) that is beyond ``limit``."""

    what: str
    number: float
    limit: float


def constant_problem(
    value: Value, low: Format, *, divides: bool = False, multiplies: bool = False
) -> ConstantProblem | None:
    """Why ``low`` cannot hold the constant ``value``; None if it can, or it is none.

    If it ``divides``, no element may become zero, however many there are. If it ``multiplies``
    as the weights of a product, some may; but the largest keeps as many digits as in bf16.
    """
    constant = value.constant
    if constant is None or constant.size == 0:
        return None
    least = low.smallest_subnormal * 2.0**Format.BF16.mantissa_bits
    small = constant.largest if multiplies and constant.largest < least else 0.0
    if constant.size <= _FEW or divides:
        small = constant.smallest_nonzero
    return _problem(constant.largest, small, low)


def scalars(node: Node) -> tuple[float, ...]:
    """Finite numbers that a node has as operands in attributes, as the 2 of ``add(x, 2)``."""
    attribute = node.attributes.get(SCALARS, ())
    numbers = attribute if isinstance(attribute, tuple) else (attribute,)
    return tuple(n for n in numbers if isinstance(n, int | float) and math.isfinite(n))


def _problem(largest: float, smallest: float, low: Format) -> ConstantProblem | None:
    if largest >= overflow_limit(low):
        return ConstantProblem(what="largest", number=largest, limit=low.max)
    if 0 < smallest < low.smallest_normal:
        return ConstantProblem(what="smallest", number=smallest, limit=low.smallest_normal)
    return None


_SAYS: Final = {"largest": "beyond the largest", "smallest": "below the normal range of"}


def first_problem(graph: Graph, node: Node, low: Format) -> tuple[str, ConstantProblem] | None:
    """The name and the problem of the first constant operand that ``low`` cannot hold."""
    port = DIVISORS.get(node.op, len(node.inputs))
    divisor = node.inputs[port] if port < len(node.inputs) else None
    product = by_name(node.op).matmul_engine
    weights = next(iter(node.inputs[1:2]), None) if product else None
    operands = graph.following_inputs(node)
    for name, problem in (
        *(
            (
                v.name,
                constant_problem(v, low, divides=v.id == divisor, multiplies=v.id == weights),
            )
            for v in operands
        ),
        *((f"{n:g}", _problem(abs(n), abs(n), low)) for n in scalars(node)),
    ):
        if problem is not None:
            return name, problem
    return None


def _judge_constants(node: Node, context: Context) -> Ruling | None:
    named_problem = first_problem(context.graph, node, context.low)
    if named_problem is None:
        return None
    name, problem = named_problem
    return Ruling(
        permits=KEEP,
        text=f"constant {name} is {_SAYS[problem.what]} {context.low.label}",
        evidence={problem.what: problem.number, "limit": problem.limit},
    )


CONSTANTS = Rule(name="constants", judge=_judge_constants)


_CARRYING_KINDS: Final = MOVES | {OpKind.CONSTANT}
_CARRYING_OPS: Final = frozenset(
    {"add", "sub", "mul", "sum", "neg", "abs", "where", "cast", "phi"}
)


def _judge_carried(node: Node, context: Context) -> Ruling | None:
    """Values that contain a constant beyond the low format's range, such as a masked tensor.

    An op that adds or selects -3.4e38 keeps fp32 because of its constant. Its result contains
    that number: stored in fp16 it is -Inf, and a softmax over a row of nothing else gives NaN,
    where fp32 gives equal shares. So the readers of such a value keep fp32 as well, up to the
    first op that does not pass large magnitudes on.
    """
    carrying = context.graph.once(_carrying, context.low)
    if not carrying:
        return None
    for value in context.graph.following_inputs(node):
        if value.id in carrying and value.id not in context.facts:
            return Ruling(
                permits=KEEP,
                text=f"{value.name} has a constant beyond the largest {context.low.label}",
                evidence={"limit": context.low.max},
            )
    return None


def _carrying(graph: Graph, low: Format) -> frozenset[int]:
    """Ids of the values, without the constants themselves, that such a constant reaches."""
    limit = overflow_limit(low)
    sources = {
        v.id
        for v in graph.values
        if v.format is Format.FP32 and v.constant is not None and v.constant.largest >= limit
    }
    # Results of ops that have such a number as a scalar attribute.
    brought = {
        v.id
        for node in graph.float_nodes
        if any(abs(number) >= limit for number in scalars(node))
        for v in graph.following_outputs(node)
        if _hands_on(node)
    }
    if not sources and not brought:
        return frozenset()
    reached = Worklist(sources | brought)
    for value in reached:
        for node in graph.readers(graph.values[value]):
            if _hands_on(node) and any(v.id == value for v in graph.following_inputs(node)):
                reached.add(v.id for v in graph.following_outputs(node))
    return frozenset(reached.seen - sources)


def _hands_on(node: Node) -> bool:
    return by_name(node.op).kind in _CARRYING_KINDS or node.op in _CARRYING_OPS


CARRIED = Rule(name="carried_constants", judge=_judge_carried)


def _judge_guarded(node: Node, context: Context) -> Ruling | None:
    """Divisions guarded by a tiny constant: ``x / max(norm, 1e-12)``, ``rsqrt(mean + 1e-8)``.

    The rule ``constants`` keeps the op with the constant in fp32. But its result would still
    become 0 when it is cast for a low division: where the norm is 0, fp32 gives 0 and fp16
    NaN. So the division and all ops between it and the constant keep fp32.
    """
    guard = context.graph.once(_guarded, context.low).get(node.id)
    if guard is None:
        return None
    return Ruling(
        permits=KEEP,
        text=f"{context.graph.nodes[guard].name} keeps a divisor from 0 by a constant below "
        f"the normal range of {context.low.label}",
        evidence={"limit": context.low.smallest_normal},
    )


def _guarded(graph: Graph, low: Format) -> dict[int, int]:
    """By node id, for guarded divisions and ops in front of them, the constant's node."""
    guards: dict[int, int] = {}
    for node in graph.float_nodes:
        port = DIVISORS.get(node.op)
        if port is not None and port < len(node.inputs):
            path, guard = _way_back(graph, node.inputs[port], low)
            if guard is not None:
                guards.update(dict.fromkeys((node.id, *path), guard))
    return guards


def _way_back(graph: Graph, value: int | None, low: Format) -> tuple[list[int], int | None]:
    """The nodes in front of ``value`` that move numbers or take roots, and the guard's node.

    The guard is None if the way back ends at no op with a tiny constant.
    """
    path: list[int] = []
    while (node := graph.maker(value)) is not None:
        problem = first_problem(graph, node, low)
        if problem is not None and problem[1].what == "smallest":
            return path, node.id
        floats = [v.id for v in graph.following_inputs(node)]
        if not (by_name(node.op).exact or node.op == "sqrt") or len(floats) != 1:
            break
        path.append(node.id)
        value = floats[0]
    return path, None


GUARDED = Rule(name="guarded_division", judge=_judge_guarded)
