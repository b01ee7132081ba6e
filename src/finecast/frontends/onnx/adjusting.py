"""Adjusts operands as a plan says, and takes that back.

Law: an adjusted constant gets its former numbers back bit for bit. A multiplication by powers
of two is undone by the inverse one: the metadata of the op that reads the constant has the
exponents. An addition is not exact: the metadata has the former numbers.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.onnx.constants import (
    MARK,
    AdjustedTensor,
    constant_tensor,
    constant_value,
)
from finecast.frontends.onnx.names import FreshNames
from finecast.frontends.onnx.opset import FREE_INITIALIZERS
from finecast.frontends.onnx.placing import place_after
from finecast.frontends.onnx.reader import OnnxBinding
from finecast.frontends.onnx.types import every_node
from finecast.planning.adjustments import Adjustment, AdjustOperand

# Metadata of a node, with the index of its input as suffix: the bytes, in base64, of the
# constant there before numbers were added to it.
_WAS: Final = f"{MARK}.constant."
# Metadata of a node, with ``INPUT.AXIS`` as suffix, the axis counted from the end: the
# exponents of two that the constant there was multiplied by.
_TIMES: Final = f"{MARK}.exponents."
# Metadata of a multiplication that was inserted in front of an op: that op's name.
SCALES: Final = f"{MARK}.scales"
_STORED: Final = np.dtype("<f4")


def adjust(binding: OnnxBinding, edits: Iterable[AdjustOperand]) -> None:
    """Make ``edits`` in the model behind ``binding``, which has to be read again then."""
    scales = _Scales(binding.model)
    for edit in edits:
        value, port = binding.values[edit.value], binding.ports[edit.node][edit.what.port]
        assert port is not None
        assert isinstance(port.owner, ir.Node)
        tensor = constant_tensor(value)
        if tensor is None:
            port.owner.replace_input_with(port.index, scales.of(value, edit.what))
        else:
            _mark(port.owner, port.index, tensor, edit.what)
            _set(value, AdjustedTensor(tensor, edit.what, value.name or ""))


def _mark(node: ir.Node, port: int, tensor: ir.TensorProtocol, what: Adjustment) -> None:
    if what.add:
        before = tensor.numpy().astype(_STORED)
        kept = base64.b64encode(before.tobytes()).decode()
        node.metadata_props[f"{_WAS}{port}"] = kept
    else:
        key = f"{_TIMES}{port}.{-what.axis}"
        node.metadata_props[key] = " ".join(map(str, what.exponents))


class _Scales:
    """Inserts multiplications of values: one for all ops that read the same product."""

    def __init__(self, model: ir.Model) -> None:
        self.main = model.graph
        self.fresh = FreshNames(model)
        self.list_initializers = (model.ir_version or 0) < FREE_INITIALIZERS
        self.made: dict[tuple[ir.Value, int, tuple[int, ...]], ir.Value] = {}

    def of(self, value: ir.Value, what: Adjustment) -> ir.Value:
        """``value``, multiplied."""
        key = (value, what.axis, what.exponents)
        if key not in self.made:
            self.made[key] = self._multiplied(value, what)
        return self.made[key]

    def _multiplied(self, value: ir.Value, what: Adjustment) -> ir.Value:
        name = self.fresh(f"finecast_scale_{value.name}")
        ones = np.ones((what.channels, *(1,) * (-what.axis - 1)), np.float32)
        by = constant_value(self.fresh(f"{name}_by"), what.of(ones))
        self.main.register_initializer(by)
        if self.list_initializers:
            self.main.inputs.append(by)
        out = ir.Value(name=name, type=value.type, shape=value.shape)
        node = ir.node("Mul", [value, by], outputs=[out], name=name)
        node.metadata_props[MARK] = ""
        node.metadata_props[SCALES] = what.node
        place_after(value, [node], self.main)
        return out


def take_back_constants(model: ir.Model) -> None:
    """Give adjusted constants their numbers back; constants that do not fit the notes stay."""
    for node in every_node(model.graph):
        for key, text in [*node.metadata_props.items()]:
            if key.startswith(_WAS):
                _give_back(node, key.removeprefix(_WAS), text)
            elif key.startswith(_TIMES):
                port, _, axis = key.removeprefix(_TIMES).partition(".")
                _divide(node, port, axis, text)


def _give_back(node: ir.Node, port: str, text: str) -> None:
    value = _own_constant(node, port)
    if value is None:
        return
    try:
        before = np.frombuffer(base64.b64decode(text, validate=True), _STORED)
    except (binascii.Error, ValueError):
        return
    tensor = constant_tensor(value)
    shape = () if tensor is None else tensor.shape.numpy()
    if before.size == int(np.prod(shape)):
        _set(value, ir.tensor(before.astype(np.float32).reshape(shape), name=value.name))


def _divide(node: ir.Node, port: str, axis: str, text: str) -> None:
    value = _own_constant(node, port)
    tensor = None if value is None else constant_tensor(value)
    if value is None or tensor is None or not axis.isdecimal():
        return
    try:
        content = {"node": "", "port": 0, "axis": -int(axis), "exponents": text}
        what = Adjustment.from_dict(content)
    except (ValueError, TypeError):
        return
    shape = tensor.shape.numpy()
    if len(shape) >= -what.axis and shape[what.axis] == what.channels:
        back = replace(what, exponents=tuple(-e for e in what.exponents))
        _set(value, AdjustedTensor(tensor, back, value.name or ""))


def _own_constant(node: ir.Node, port: str) -> ir.Value | None:
    """The fp32 constant at input ``port`` of ``node``; None if other ops read it, too."""
    index = int(port) if port.isdecimal() else len(node.inputs)
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = None if value is None else constant_tensor(value)
    own = value is not None and len(value.uses()) == 1
    return value if own and tensor is not None and tensor.dtype == ir.DataType.FLOAT else None


def _set(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Replace the numbers of the constant ``value`` by ``tensor``."""
    node = value.producer()
    if node is None:
        value.const_value = tensor
    else:
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)
