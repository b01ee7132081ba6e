"""Constants in blocks as ONNX states them, and models with such constants for engines here.

DequantizeLinear decodes blocks. Its scales are of type float8e8m0 in the formats of OCP MX; in
NVFP4 they are float8e4m3fn, decoded by another DequantizeLinear with the scale of the tensor.
How kernels round the values that meet them is not stated. No engine here runs such nodes
(ONNX Runtime 1.31, OpenVINO 2026.4), so that ``decoded`` gives them the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ComputedTensor,
    constant_reader,
    constant_tensor,
    unrounded,
)
from finecast.frontends.onnx.editor import drop_unread
from finecast.numbers.blocks import BlockLayout
from finecast.numbers.encodings import Blocks, Encoding
from finecast.numbers.formats import Format

if TYPE_CHECKING:
    from finecast.frontends.onnx.statements import Maker

_DECODES: Final = "DequantizeLinear"
_FP4, _E8M0 = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E8M0
# The first opsets of DequantizeLinear with elements of 4 bits, and with scales in e8m0.
_FP4_SINCE: Final = 23
_E8M0_SINCE: Final = 24


def since(layout: BlockLayout) -> int:
    """The first opset that states constants stored so."""
    return _FP4_SINCE if layout.per_tensor else _E8M0_SINCE


def read_from(maker: Maker, stored: ir.Value, to: Encoding) -> ir.Value:
    """The numbers of a constant that is stored in ``to``, in the type that ops compute in."""
    assert isinstance(to, Blocks)
    assert stored.const_value is not None
    source, layout, result = unrounded(stored.const_value), to.layout, to.format.result
    shape = [d if isinstance(d, int) else 0 for d in stored.shape or ()]
    shape[to.axis] = -(-shape[to.axis] // layout.size)
    dtype = ir.DataType.from_numpy(layout.scale_dtype)
    held = ComputedTensor(source, partial(_scales, to), dtype=dtype, shape=ir.Shape(shape))
    scales = maker.editor.constant(f"{stored.name}_scale", held)
    if layout.per_tensor:
        scalar = ComputedTensor(source, partial(_tensor_scale, to), shape=ir.Shape([]))
        of_tensor = maker.editor.constant(f"{stored.name}_tensor_scale", scalar)
        scales = maker.node(
            _DECODES, [scales, of_tensor], label=Format.FP32.label, dtype=ir.DataType.FLOAT
        )
    return maker.node(
        _DECODES,
        [stored, scales],
        {
            "axis": to.axis,
            "block_size": layout.size,
            "output_dtype": int(DATA_TYPES[result]),
        },
        label=result.label,
        dtype=DATA_TYPES[result],
    )


def _scales(to: Blocks, numbers: NDArray[Any]) -> NDArray[Any]:
    return to.stored(numbers).scales


def _tensor_scale(to: Blocks, numbers: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(to.stored(numbers).tensor_scale, np.float32)


def decoded(model: ir.Model) -> ir.Model:
    """A copy with constants in blocks as the numbers that they stand for; else the model."""
    if not any(True for _ in _decoding(model)):
        return model
    copy = model.clone()
    for node, codes, scales in list(_decoding(copy)):
        (result,), name = node.outputs, node.outputs[0].name or ""
        dtype = result.dtype or ir.DataType.FLOAT
        stated = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
        compute = partial(_numbers, scales, *stated)
        numbers = ComputedTensor(codes, compute, name=name, dtype=dtype)
        constant = ir.val(name, dtype, result.shape, const_value=numbers)
        read = [v for v in node.inputs if v is not None]
        result.replace_all_uses_with(constant, replace_graph_outputs=True)
        copy.graph.register_initializer(constant)
        assert node.graph is not None
        node.graph.remove(node, safe=True)
        drop_unread(read)
    return copy


def _decoding(
    model: ir.Model,
) -> Iterator[tuple[ir.Node, ir.TensorProtocol, NDArray[np.float32]]]:
    """The nodes that decode constants in blocks of types that no engine here decodes.

    Each with the constant's codes, and the scales of blocks.
    """
    for node in model.graph.all_nodes():
        if node.op_type != _DECODES or not node.attributes.get_int("block_size", 0):
            continue
        codes, scales = node.inputs[:2]
        known = None if codes is None else constant_tensor(codes)
        if known is None or scales is None:
            continue
        if known.dtype is _FP4 or scales.dtype is _E8M0:
            numbers = _constant_scales(scales)
            if numbers is not None:
                yield node, known, numbers


def _constant_scales(scales: ir.Value) -> NDArray[np.float32] | None:
    """Scales that are constant, or decoded from constants by the scale of a tensor."""
    tensor, maker = constant_tensor(scales), scales.producer()
    if tensor is not None:
        return constant_reader(tensor)().astype(np.float32)
    if maker is None or maker.op_type != _DECODES or len(maker.inputs) != 2:
        return None
    both = [None if v is None else constant_tensor(v) for v in maker.inputs]
    codes, of_tensor = (None if t is None else constant_reader(t)() for t in both)
    if codes is None or of_tensor is None or of_tensor.size != 1:
        return None
    return codes.astype(np.float32) * of_tensor.astype(np.float32).reshape(())


def _numbers(
    scales: NDArray[np.float32], axis: int, size: int, codes: NDArray[Any]
) -> NDArray[np.float32]:
    """The numbers that codes in blocks of a size along an axis stand for, by ONNX."""
    each = np.repeat(scales, size, axis=axis)
    return codes.astype(np.float32) * np.take(each, range(codes.shape[axis]), axis=axis)
