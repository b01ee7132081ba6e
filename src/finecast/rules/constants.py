"""Constants that the low format cannot hold: -3.4e38 masks, 1e-12 epsilons, huge scales.

A value that becomes infinite, or that vanishes, changes what the op computes; such an op
keeps fp32 rather than a clamped constant (clamping a mask to -1e4 changes predictions).
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
# Inputs at which a zero makes Inf: one element that vanishes there is one too many.
DIVISORS: Final[Mapping[str, int]] = {
    "div": 1,
    "mod": 1,
    "reciprocal": 0,
    "rsqrt": 0,
    "log": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantProblem:
    """Which magnitude of a constant (``largest`` or ``smallest``) is beyond which limit."""

    what: str
    number: float
    limit: float


def constant_problem(
    value: Value, low: Format, *, divides: bool = False
) -> ConstantProblem | None:
    """Why ``low`` cannot hold the constant ``value``; None if it can, or it is none.

    Of one that ``divides``, a single element that vanishes is one too many.
    """
    constant = value.constant
    if constant is None or constant.size == 0:
        return None
    if constant.largest >= overflow_limit(low):
        return ConstantProblem(what="largest", number=constant.largest, limit=low.max)
    small = constant.smallest_nonzero if constant.size <= _FEW or divides else 0.0
    if 0 < small < low.smallest_normal:
        return ConstantProblem(what="smallest", number=small, limit=low.smallest_normal)
    return None


def scalars(node: Node) -> tuple[float, ...]:
    """Finite numbers that are operands without being values: 2 of ``add(x, 2)``."""
    given = node.attributes.get(SCALARS, ())
    found = given if isinstance(given, tuple) else (given,)
    return tuple(n for n in found if isinstance(n, int | float) and math.isfinite(n))


def scalar_problem(number: float, low: Format) -> ConstantProblem | None:
    """Why ``low`` cannot hold ``number``: a constant of one element."""
    size = abs(number)
    if size >= overflow_limit(low):
        return ConstantProblem(what="largest", number=size, limit=low.max)
    if 0 < size < low.smallest_normal:
        return ConstantProblem(what="smallest", number=size, limit=low.smallest_normal)
    return None


_SAYS: Final = {"largest": "beyond the largest", "smallest": "below the normal range of"}


def first_problem(graph: Graph, node: Node, low: Format) -> tuple[str, ConstantProblem] | None:
    """The first constant operand of ``node`` that ``low`` cannot hold, by its name."""
    port = DIVISORS.get(node.op, len(node.inputs))
    divisor = node.inputs[port] if port < len(node.inputs) else None
    operands = graph.following_inputs(node)
    for name, problem in (
        *((v.name, constant_problem(v, low, divides=v.id == divisor)) for v in operands),
        *((f"{number:g}", scalar_problem(number, low)) for number in scalars(node)),
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
