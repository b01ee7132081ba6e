"""The formats that the op's definition admits at the model's opset; other types stay."""

from __future__ import annotations

from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.rules.base import Context, Rule, Ruling, only


def _judge(node: Node, context: Context) -> Ruling | None:
    own = node.format
    if own is None:
        return None
    if own is not Format.FP32:
        return Ruling(permits=only(own), text=f"already {own.label} in the model; kept")
    permits = (node.admits | only(own)) & frozenset({own, context.low})
    if not context.low.encodes_results:
        # An op that only moves numbers gains nothing from rounded operands, unless they are
        # constants, which are stored smaller.
        rounds = not context.low.encodes_values or not by_name(node.op).exact
        around = context.low in context.casts_around and rounds
        permits = frozenset({own, context.low}) if around else only(own)
    if context.low in permits:
        return None
    text = f"{node.native} has no {context.low.label} in its definition"
    if not context.low.encodes_results and context.low not in context.casts_around:
        text += ", and the model's opset has no op that rounds to it"
    return Ruling(permits=permits, text=text)


DEFINITION = Rule(name="definition", judge=_judge, hard=True)
