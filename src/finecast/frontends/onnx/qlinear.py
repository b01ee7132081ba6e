"""Ops that compute on codes, written as float ops between codes.

ONNX Runtime's ``QuantFormat.QOperator`` gives QLinearConv and its like: an op, the scales and
zero points of its operands, and those of its result. The same is stated by DequantizeLinear,
the float op and QuantizeLinear, in which the value before its codes can be seen and replaced.

Law: outputs are the same but for codes of numbers in the middle between two. An op whose
scales are computed, or whose layout is another one, stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.editor import Editor

_CODES, _NODE = "_quantized", "_quant"
"""What ONNX Runtime appends to the names of values and of ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Which float op it is, and where operands, the result's scale and the bias stand.

    An operand is followed by its scale and zero point, the result's scale by its zero point.
    """

    op: str
    operands: Sequence[int]
    result: int
    bias: int | None = None


def _binary(op: str) -> _Layout:
    return _Layout(op=op, operands=(0, 3), result=6)


def _unary(op: str) -> _Layout:
    return _Layout(op=op, operands=(0,), result=3)


_LAYOUTS: Final = {
    "QLinearConv": _Layout(op="Conv", operands=(0, 3), result=6, bias=8),
    "QGemm": _Layout(op="Gemm", operands=(0, 3), result=7, bias=6),
    "QLinearMatMul": _binary("MatMul"),
    "QLinearAdd": _binary("Add"),
    "QLinearMul": _binary("Mul"),
    "QLinearAveragePool": _unary("AveragePool"),
    "QLinearGlobalAveragePool": _unary("GlobalAveragePool"),
    "QLinearLeakyRelu": _unary("LeakyRelu"),
    "QLinearSigmoid": _unary("Sigmoid"),
    "QLinearSoftmax": _unary("Softmax"),
}
_OWN: Final = frozenset({"channels_last", "opset"})
"""Attributes that the float ops do not have."""


_SCALES_BY_CHANNEL_FROM: Final = 13
"""The opset from which on DequantizeLinear has an axis of scales."""


def opset_to_write_out(model: ir.Model) -> int:
    """The least opset at which the ops on codes of ``model`` can be written as float ops."""
    return _SCALES_BY_CHANNEL_FROM if any(n.op_type in _LAYOUTS for n in model.graph) else 0


def write_out_codes(model: ir.Model) -> None:
    """Write ops on codes of the main graph as float ops between codes, in place."""
    # The value before codes gets the name that their numbers have behind them.
    for node in model.graph:
        result = node.outputs[0]
        if node.op_type == "DequantizeLinear" and not result.is_graph_output():
            result.name = f"{result.name}_decoded"
    editor = Editor(model)
    for node in list(model.graph):
        layout = _LAYOUTS.get(node.op_type)
        if layout is not None and not node.attributes.get_int("channels_last", 0):
            _write_out(editor, node, layout)


def _write_out(editor: Editor, node: ir.Node, layout: _Layout) -> None:
    scales = [_constant(node, place + 1) for place in layout.operands]
    known = [scale for scale in scales if scale is not None]
    bias = None if layout.bias is None else _constant(node, layout.bias)
    has_bias = layout.bias is not None and _input(node, layout.bias) is not None
    if len(known) != len(scales) or (has_bias and bias is None):
        return
    (codes,) = node.outputs
    stem = (codes.name or "").removesuffix(_CODES)
    places = zip(layout.operands, known, strict=True)
    operands = [_decoded(editor, node, place, scale.size) for place, scale in places]
    if bias is not None:  # codes of 32 bits, whose scale is the product of the operands'
        numbers = bias.astype(np.float64)
        for scale in known:
            numbers = numbers * scale.reshape(-1).astype(np.float64)
        operands.append(editor.constant(f"{stem}_bias", numbers.astype(np.float32)))
    name = (node.name or "").removesuffix(_NODE)
    result = editor.op(layout.op, operands, name=editor.fresh(stem), node=editor.fresh(name))
    for attribute in node.attributes.values():
        if attribute.name not in _OWN:
            editor.made[-1].attributes[attribute.name] = attribute
    if (scale := _input(node, layout.result)) is not None:
        read = [result, scale, _input(node, layout.result + 1)]
        name = editor.fresh(f"{stem}_codes")
        result = editor.op("QuantizeLinear", read, name=name, dtype=codes.dtype)
    codes.replace_all_uses_with(result, replace_graph_outputs=True)
    node.append(editor.take())
    editor.main.remove(node, safe=True)


def _decoded(editor: Editor, node: ir.Node, place: int, scales: int) -> ir.Value:
    """The numbers of the codes of an operand; several scales are by its output channel."""
    read = [_input(node, place + k) for k in range(3)]
    by_row = node.op_type == "QLinearConv" or node.attributes.get_int("transB", 0)
    axis = {"axis": 0 if by_row else 1} if scales > 1 else {}
    operand = read[0].name if read[0] is not None else ""
    name = editor.fresh(f"{operand}_{node.name}_{place}")
    return editor.op("DequantizeLinear", read, axis, name=name)


def _input(node: ir.Node, place: int) -> ir.Value | None:
    return node.inputs[place] if place < len(node.inputs) else None


def _constant(node: ir.Node, place: int) -> NDArray[np.generic] | None:
    """The numbers of a constant that the node reads; None if it is none."""
    value = _input(node, place)
    tensor = None if value is None else constant_tensor(value)
    return None if tensor is None else tensor.numpy()
