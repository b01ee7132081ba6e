"""Sensitive ops that end the model: a softmax whose shares are what a caller gets, in fp32.

In a low format the result would be rounded, to be cast back at once: digits are lost and ties
among shares made, and hardly a byte is saved. Products gain by their operands, and ops without
an opinion of their own run in the kernels of others: they are not judged.

Scope ``all`` is the Neuron compilers' word for every op, this one among them. In an engine
that has a mixed precision of its own, which keeps it, ``all`` is to be no less exact.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Node, Value
from finecast.numbers.formats import Format
from finecast.ops import Tier, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.policy import Policy, Scope

_WITH_ITS_OWN: Final = frozenset({"tensorflow"})
"""Engines whose own mixed precision, Grappler's here, gives such a result in fp32."""


def _judge(node: Node, context: Context) -> Ruling | None:
    policy, graph = context.policy, context.graph
    if context.engine not in _WITH_ITS_OWN or context.low.operands_only:
        return None
    if policy.scope is not Scope.ALL or context.measured:
        return None  # elsewhere its tier decides, or its measured error
    results = list(graph.following_outputs(node))
    computed = any(v.producer is not None for v in graph.following_inputs(node))
    sensitive = by_name(node.op).tier is Tier.SENSITIVE
    if not (sensitive and computed and results and all(_ends(v, policy) for v in results)):
        return None
    return Ruling(
        permits=KEEP,
        text=f"{results[0].name} is given out in fp32: {context.low.label} would round it,"
        " and be cast back at once",
    )


def _ends(value: Value, policy: Policy) -> bool:
    """Whether ``value`` is read by nothing but an output that stays fp32."""
    declared = policy.io.get(value.name, Format.FP32)
    fp32 = declared is Format.FP32 and not policy.io_low
    return value.is_output and not value.uses and fp32


ENDS: Final = Rule(name="ends", judge=_judge)
