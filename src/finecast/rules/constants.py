"""Constants that the low format cannot hold: -3.4e38 masks, 1e-12 epsilons, huge scales.

A constant that becomes infinite or zero changes what the op computes. Such an op keeps fp32:
clamping the constant is no alternative, since a mask of -1e4 changes predictions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from finecast.graph import SCALARS, Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
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
    value: Value, low: Format, *, divides: bool = False
) -> ConstantProblem | None:
    """Why ``low`` cannot hold the constant ``value``; None if it can, or it is none.

    If it ``divides``, no element may become zero, however many there are.
    """
    constant = value.constant
    if constant is None or constant.size == 0:
        return None
    small = constant.smallest_nonzero if constant.size <= _FEW or divides else 0.0
    return _problem(constant.largest, small, low)


def scalars(node: Node) -> tuple[float, ...]:
    """Finite numbers that a node has as operands in attributes, as the 2 of ``add(x, 2)``."""
    given = node.attributes.get(SCALARS, ())
    found = given if isinstance(given, tuple) else (given,)
    return tuple(n for n in found if isinstance(n, int | float) and math.isfinite(n))


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
    operands = graph.following_inputs(node)
    for name, problem in (
        *((v.name, constant_problem(v, low, divides=v.id == divisor)) for v in operands),
        *((f"{n:g}", _problem(abs(n), abs(n), low)) for n in scalars(node)),
    ):
        if problem is not None:
            return name, problem
    return None


def _judge(node: Node, context: Context) -> Ruling | None:
    found = first_problem(context.graph, node, context.low)
    if found is None:
        return None
    name, problem = found
    return Ruling(
        permits=KEEP,
        text=f"constant {name} is {_SAYS[problem.what]} {context.low.label}",
        evidence={problem.what: problem.number, "limit": problem.limit},
    )


CONSTANTS = Rule(name="constants", judge=_judge)
