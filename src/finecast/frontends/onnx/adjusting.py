"""Constants with numbers added to them, and the way back.

Law: what an adjusted constant was stands beside the op that reads it, bit for bit: numbers
that were added do not come off again exactly. It is a number for each channel.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import MARK, constant_tensor
from finecast.frontends.onnx.reader import OnnxBinding
from finecast.frontends.onnx.types import every_node
from finecast.planning.adjustments import AdjustConstant

# Set on a node whose constant at the input named last was adjusted, to its bytes before.
_WAS: Final = f"{MARK}.constant."
_STORED: Final = np.dtype("<f4")


def adjust(binding: OnnxBinding, edits: Iterable[AdjustConstant]) -> None:
    """Make ``edits`` in the model behind ``binding``."""
    for edit in edits:
        value, port = binding.values[edit.value], binding.ports[edit.node][edit.port]
        tensor = constant_tensor(value)
        assert tensor is not None
        assert port is not None
        assert isinstance(port.owner, ir.Node)
        before = tensor.numpy().astype(np.float32)
        kept = base64.b64encode(before.astype(_STORED).tobytes()).decode()
        port.owner.metadata_props[f"{_WAS}{port.index}"] = kept
        _set(value, before + np.asarray(edit.add, np.float32).reshape(before.shape))


def take_back_constants(model: ir.Model) -> None:
    """Give adjusted constants their numbers back; what another tool replaced stays."""
    for node in every_node(model.graph):
        for key, text in node.metadata_props.items():
            if key.startswith(_WAS):
                _take_back(node, key.removeprefix(_WAS), text)


def _take_back(node: ir.Node, port: str, text: str) -> None:
    index = int(port) if port.isdecimal() else len(node.inputs)
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = None if value is None else constant_tensor(value)
    if value is None or tensor is None or len(value.uses()) != 1:
        return
    try:
        before = np.frombuffer(base64.b64decode(text, validate=True), _STORED)
    except (binascii.Error, ValueError):
        return
    shape = tensor.shape.numpy()
    if tensor.dtype == ir.DataType.FLOAT and before.size == int(np.prod(shape)):
        _set(value, before.astype(np.float32).reshape(shape))


def _set(value: ir.Value, array: NDArray[np.float32]) -> None:
    """Let the constant be ``array``."""
    tensor = ir.tensor(array, name=value.name)
    node = value.producer()
    if node is None:
        value.const_value = tensor
    else:
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
