"""Einsum in bf16: ONNX does not define it, so it has to be one that is written as a MatMul."""

from __future__ import annotations

from typing import Final

from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.ops.einsum import as_product
from finecast.rules.base import KEEP, Context, Rule, Ruling

_NONE: Final = "onnx::Einsum has no bf16 in its definition"


def _judge(node: Node, context: Context) -> Ruling | None:
    if node.native != "onnx::Einsum" or context.low is not Format.BF16:
        return None
    if context.policy.keep_ops:
        return Ruling(permits=KEEP, text=f"{_NONE}, and ops are to be kept as they are")
    try:
        as_product(str(node.attributes.get("equation", "")))
    except ValueError as error:
        return Ruling(permits=KEEP, text=f"{_NONE}, and it is no MatMul: {error}")
    return None


EINSUM: Final = Rule(name="einsum", judge=_judge, hard=True)
