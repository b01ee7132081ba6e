"""Formats that an op's definition admits, and that the engine has a right kernel for."""

from __future__ import annotations

from typing import Final

from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.einsum import as_product
from finecast.rules.base import KEEP, Context, Rule, Ruling, only
from finecast.rules.policy import Scope


def _judge_definition(node: Node, context: Context) -> Ruling | None:
    """The formats that the op's definition admits at the model's opset; other types stay."""
    own, policy = node.format, context.policy
    if own is None:
        return None
    if own is not Format.FP32:
        return Ruling(permits=only(own), text=f"already {own.label} in the model; kept")
    if policy.scope is Scope.NONE and not policy.op_formats:
        return None  # nothing is lowered, so that the opset was not raised for it
    low, around = context.low, context.low in context.casts_around
    stated = low.storage in node.admits or not low.encodes_results
    if low.has_scales or not low.encodes_results:
        # An op that only moves numbers gains nothing from rounded operands, unless they are
        # constants, which are stored smaller.
        for_constants = low.has_scales and not low.runs_on_codes
        stated &= around and (for_constants or not by_name(node.op).exact)
    else:
        around = True  # nothing is rounded
    if stated:
        return None
    text = f"{node.native} has no {low.label} in its definition"
    if not around:
        text += ", and the model's opset has no op that rounds to it"
    return Ruling(permits=only(own), text=text)


DEFINITION = Rule(name="definition", judge=_judge_definition, hard=True)


_NO_EINSUM: Final = "onnx::Einsum has no bf16 in its definition"


def _judge_einsum(node: Node, context: Context) -> Ruling | None:
    """ONNX defines no Einsum in bf16, so it has to be one that can be written as a MatMul."""
    if node.native != "onnx::Einsum" or context.low.storage is not Format.BF16:
        return None
    if context.policy.keep_ops:
        return Ruling(permits=KEEP, text=f"{_NO_EINSUM}, and ops are to be kept as they are")
    try:
        as_product(str(node.attributes.get("equation", "")))
    except ValueError as error:
        return Ruling(permits=KEEP, text=f"{_NO_EINSUM}, and it is no MatMul: {error}")
    return None


EINSUM: Final = Rule(name="einsum", judge=_judge_einsum, hard=True)


def _judge_kernel(node: Node, context: Context) -> Ruling | None:
    """The engine has to have a kernel for the op in the format, and no known fault in it."""
    fault = context.faults.get(context.low, {}).get(node.id)
    if fault:
        return Ruling(permits=KEEP, text=fault)
    if fault is None and context.kernels(node, context.low) is not False:
        return None
    return Ruling(
        permits=KEEP,
        text=f"{context.engine} has no working {context.low.label} kernel for {node.native}",
    )


KERNEL = Rule(name="kernel", judge=_judge_kernel, hard=True)
