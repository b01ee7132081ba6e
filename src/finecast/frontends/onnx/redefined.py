"""Ops that a later opset defines anew, where onnx's converter leaves them as they were.

Law: after ``restate`` the ops of a raised model compute what they did in its own opset. As of
onnx 1.23 the converter renames Upsample to Resize and adds inputs, but does not state the
coordinates that the old definition takes; and it knows nothing of Hardmax,
GroupNormalization and norms that train. Without this the numbers would be others, and no error
would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.devices.faults import is_here
from finecast.errors import ModelError
from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.definitions import FLATTENING_AXIS
from finecast.frontends.onnx.editor import Editor, is_read

TRAINING_STATED_FROM: Final = 14
"""The opset from which on an attribute says that a BatchNormalization trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Misread:
    """Ops that an engine reads otherwise at some opsets, where ``when`` holds of a node."""

    fault: str
    ops: frozenset[str]
    at: range
    when: Callable[[ir.Node], bool]


_MISREAD: Final[Sequence[_Misread]] = (
    _Misread(
        fault="openvino-reduce-axes",
        ops=frozenset({"ReduceL1", "ReduceLogSum", "ReduceLogSumExp"}),
        at=range(13, 18),
        when=lambda node: "axes" in node.attributes,
    ),
    _Misread(
        fault="openvino-softmax-11",
        ops=frozenset({"Softmax", "LogSoftmax", "Hardmax"}),
        at=range(11, 13),
        when=lambda node: node.attributes.get_int("axis", FLATTENING_AXIS) != -1,
    ),
)


def misread(model: ir.Model, version: int) -> tuple[list[ir.Node], int]:
    """The ops of ``model`` that an engine misreads at opset ``version``.

    Returns:
        These ops, and the first opset from ``version`` on at which there are none.
    """
    found: list[ir.Node] = []
    for row in _MISREAD:
        if version in row.at and is_here(row.fault):
            nodes = (n for n in model.graph.all_nodes() if not n.domain)
            wrong = [n for n in nodes if n.op_type in row.ops and row.when(n)]
            found += wrong
            version = row.at.stop if wrong else version
    return found, version


def trains(node: ir.Node) -> bool:
    """Whether ``node`` is a BatchNormalization that takes its statistics from its own input.

    Before opset 14 having more than one output says so, from then on the attribute
    ``training_mode``.
    """
    if node.op_type != "BatchNormalization" or node.domain:
        return False
    stated = node.attributes.get("training_mode")
    return len(node.outputs) > 1 if stated is None else bool(stated.as_int())


def restate(model: ir.Model, before: int, version: int) -> None:
    """State the ops of ``model`` by the definitions of ``version``, in place.

    Args:
        model: The model as onnx's converter raised it.
        before: The opset that it was raised from.
        version: The opset that it was raised to.

    Raises:
        ModelError: If the later definition cannot state an op.
    """
    editor = Editor(model)
    for since, op, change in _REDEFINED:
        if before < since <= version:
            for node in list(model.graph.all_nodes()):
                if not node.domain and node.op_type == op:
                    change(node, editor)


def _resize(node: ir.Node, editor: Editor) -> None:
    """Before opset 11 coordinates are divided by the scale alone, from the first pixel on.

    The nearest pixel is the one before, and where the size becomes smaller the one after: so
    engines have it, as the definition leaves it open.
    """
    node.attributes["coordinate_transformation_mode"] = ir.AttrString(
        "coordinate_transformation_mode", "asymmetric"
    )
    if node.attributes.get_string("mode", "nearest") != "nearest":
        return
    given = node.inputs[2] if len(node.inputs) > 2 else None
    tensor = None if given is None else constant_tensor(given)
    if tensor is None:
        raise _cannot(
            node, "its scales are computed, and which pixel is nearest hinges on them"
        )
    scales = np.asarray(tensor.numpy(), np.float32)
    smaller, larger = bool((scales < 1).any()), bool((scales > 1).any())
    if smaller and larger:
        raise _cannot(node, "it makes one axis larger and another one smaller")
    mode = "ceil" if smaller else "floor"
    node.attributes["nearest_mode"] = ir.AttrString("nearest_mode", mode)


def _hardmax(node: ir.Node, editor: Editor) -> None:
    """Before opset 13 Hardmax is of a matrix: the axes from ``axis`` on are its columns."""
    x, out = node.inputs[0], node.outputs[0]
    if x is None or node.graph is None:
        return
    axis = node.attributes.get_int("axis", FLATTENING_AXIS)
    if axis == -1:  # over the last axis both definitions say the same
        return

    def op(kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        name = editor.fresh(f"{out.name}_{kind.lower()}")
        return editor.op(kind, inputs, attributes, name=name, dtype=None)

    shape, flat = op("Shape", x), op("Flatten", x, axis=axis)
    node.prepend(editor.take())
    node.replace_input_with(0, flat)
    node.attributes["axis"] = ir.AttrInt64("axis", -1)
    final = op("Reshape", out, shape)
    final.type = out.type
    editor.replace_result(out, final)
    out.name, final.name = final.name, out.name


def _batch_normalization(node: ir.Node, editor: Editor) -> None:
    """Before opset 14 a norm with five outputs trains; the last two no longer exist."""
    if not trains(node):
        return
    saved = node.outputs[3:]
    if any(map(is_read, saved)):
        raise _cannot(node, "its saved mean or variance is read, which no later opset gives")
    node.resize_outputs(3)
    node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)


def _dropout(node: ir.Node, editor: Editor) -> None:
    """Opset 10 makes numbers of the mask booleans, opset 12 an unstated mask one of True."""
    if any(map(is_read, node.outputs[1:])):
        raise _cannot(node, "its mask is read, which later opsets define otherwise")


def _group_normalization(node: ir.Node, editor: Editor) -> None:
    """Before opset 21 scale and bias have a number for each group, then for each channel."""
    x, groups = node.inputs[0], node.attributes.get_int("num_groups", 1)
    channels = x.shape[1] if x is not None and x.shape is not None else None
    for index in (1, 2):
        value = node.inputs[index]
        tensor = None if value is None else constant_tensor(value)
        if value is None or tensor is None or not isinstance(channels, int):
            raise _cannot(node, "its channels, its scale or its bias are not constant")
        numbers = np.repeat(tensor.numpy(), channels // groups)
        by_channel = editor.constant(f"{value.name}_by_channel", numbers)
        node.replace_input_with(index, by_channel)


def _cannot(node: ir.Node, why: str) -> ModelError:
    return ModelError(
        f"a later opset, which the format needs, cannot state {node.op_type} {node.name!r}:"
        f" {why}",
        fix="export the model at a newer opset, or use fp16",
    )


# The first opset of a new definition, the op, and what restates a node of the old one.
_REDEFINED: Final[Sequence[tuple[int, str, Callable[[ir.Node, Editor], None]]]] = (
    (10, "Dropout", _dropout),
    (11, "Resize", _resize),
    (12, "Dropout", _dropout),
    (13, "Hardmax", _hardmax),
    (TRAINING_STATED_FROM, "BatchNormalization", _batch_normalization),
    (21, "GroupNormalization", _group_normalization),
)
