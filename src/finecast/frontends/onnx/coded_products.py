"""Products by constant codes as ONNX Runtime's op for them, ``MatMulNBits``.

ONNX states such a product by a DequantizeLinear and a MatMul. ONNX Runtime (1.31) fuses both
for some layouts of the weights only; else it widens the weights in each run, which is many
times slower than fp32. And one setting of a session says for all of these products whether
they round the values that they read. ``MatMulNBits`` says so by its own attribute
``accuracy_level``, and is fast in every layout.

A model with such ops is read as what it was written from (``restore_products``), so that its
graph is that of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import (
    ComputedTensor,
    constant_reader,
    constant_tensor,
)
from finecast.frontends.onnx.definitions import CONTRIB_DOMAIN
from finecast.frontends.onnx.editor import MARK, ROUNDING, Editor, drop_unread, turn_into
from finecast.numbers.encodings import packed
from finecast.numbers.formats import DYNAMIC, Format

# Metadata of such a product: the op that it was, and how its weights were stated, as JSON.
PRODUCT: Final = f"{MARK}.product"

_OP: Final = "MatMulNBits"
# Values of ``accuracy_level``: operands in fp32, and in 8 bits by blocks.
_EXACT, _ROUNDED = 1, 4
_SMALLEST_BLOCK: Final = 32  # of a value that is read exactly, if its channels have one scale
_BIAS: Final = 5  # the input that is added to the result
_MATRIX: Final = 2


def is_coded(node: ir.Node) -> bool:
    """Whether the node is a product by a matrix of codes that a conversion stored."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or len(node.inputs) < _MATRIX:
        return False
    weights = node.inputs[1]
    decodes = None if weights is None else weights.producer()
    if decodes is None or decodes.op_type != "DequantizeLinear" or _format(decodes) is None:
        return False
    tensors = [None if v is None else constant_tensor(v) for v in decodes.inputs]
    if None in tensors or tensors[0] is None or len(tensors[0].shape) != _MATRIX:
        return False
    stated = node.attributes
    plain = all(stated.get_float(name, 1.0) == 1.0 for name in ("alpha", "beta"))
    bias = node.inputs[2] if len(node.inputs) > _MATRIX else None
    flat = bias is None or (bias.shape is not None and len(bias.shape) == 1)
    rows = tensors[0].shape.numpy()[-1 if stated.get_int("transB", 0) else 0]
    whole = rows % _block(decodes) == 0
    return plain and flat and whole and not stated.get_int("transA", 0)


def _format(decodes: ir.Node) -> Format | None:
    """The format of constants alone that a DequantizeLinear was noted to decode."""
    label = decodes.metadata_props.get(ROUNDING, "").partition(" ")[0]
    fmt = next((f for f in Format if f.label == label), None)
    return fmt if fmt is not None and not fmt.encodes_values else None


def _block(decodes: ir.Node) -> int:
    """How many numbers share a scale: those that a kernel rounds have blocks of their own."""
    fmt = _format(decodes)
    rounds = None if fmt is None else fmt.dynamic_group
    return rounds or decodes.attributes.get_int("block_size", 0) or _SMALLEST_BLOCK


def write_product(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Turn a product for which ``is_coded`` holds into a ``MatMulNBits``."""
    weights = node.inputs[1]
    decodes = None if weights is None else weights.producer()
    assert weights is not None
    assert decodes is not None
    tensors = (constant_tensor(v) for v in decodes.inputs if v is not None)
    codes, *others = [tensor for tensor in tensors if tensor is not None]
    scales, *zeros = (constant_reader(tensor)() for tensor in others)
    by_row = bool(node.attributes.get_int("transB", 0))
    block = _block(decodes)
    zero = int(zeros[0].reshape(-1)[0]) if zeros else 0
    bits = codes.dtype.bitwidth
    columns, rows = codes.shape.numpy() if by_row else codes.shape.numpy()[::-1]
    own = decodes.attributes.get_int("block_size", 0)
    by_column = scales.astype(np.float32)
    if own:
        by_column = by_column if by_row else by_column.T
        by_column = by_column.repeat(own // block, axis=1)
    else:
        by_column = np.broadcast_to(by_column.reshape(-1, 1), (columns, rows // block))
    stored = ComputedTensor(
        codes,
        partial(_stored, by_row=by_row, zero=zero, bits=bits, blocks=rows // block),
        dtype=ir.DataType.UINT8,
        shape=ir.Shape([columns, rows // block, block * bits // 8]),
    )
    name = weights.name or ""
    notes = {
        "op": node.op_type,
        "weights": name,
        "rounding": decodes.metadata_props[ROUNDING],
        "block_size": own,
        "zero": zero,
    }
    rounds = _format(decodes) in DYNAMIC and not zero
    extra = node.inputs[2] if len(node.inputs) > _MATRIX else None
    inputs = [
        node.inputs[0],
        editor.constant(f"{name}_codes", stored),
        editor.constant(f"{name}_scales", np.ascontiguousarray(by_column).reshape(-1)),
        *([None, None, extra] if extra is not None else []),
    ]
    attributes = {
        "K": rows,
        "N": columns,
        "bits": bits,
        "block_size": block,
        "accuracy_level": _ROUNDED if rounds else _EXACT,
    }
    turn_into(node, _OP, inputs, attributes, CONTRIB_DOMAIN)
    node.metadata_props[PRODUCT] = json.dumps(notes)
    editor.model.graph.opset_imports.setdefault(CONTRIB_DOMAIN, 1)
    if not weights.uses() and decodes.graph is not None:
        read = [v for v in decodes.inputs if v is not None]
        decodes.graph.remove(decodes, safe=True)
        drop_unread(read)
    return [node]


def _stored(
    codes: NDArray[Any], *, by_row: bool, zero: int, bits: int, blocks: int
) -> NDArray[np.uint8]:
    """The codes of a DequantizeLinear as ``MatMulNBits`` stores them: by column, from 0."""
    steps = codes.astype(np.int8) if by_row else codes.astype(np.int8).T
    shifted = (steps - np.int16(zero - 2 ** (bits - 1))).astype(np.uint8)
    stored = packed(shifted, bits).astype(np.uint8)
    return stored.reshape(len(steps), blocks, -1)


def restore_products(model: ir.Model) -> None:
    """Turn each ``MatMulNBits`` that a conversion wrote into the nodes that it was, in place.

    One that another tool changed stays.
    """
    if CONTRIB_DOMAIN not in model.graph.opset_imports:
        return
    editor, matrices = Editor(model), dict[str, ir.Value]()
    for node in [n for n in model.graph.all_nodes() if PRODUCT in n.metadata_props]:
        try:
            notes = json.loads(node.metadata_props[PRODUCT])
            _restore(editor, node, notes, matrices)
        except (KeyError, TypeError, ValueError, AssertionError):
            continue  # the note was not written by finecast, or not for this op
        del node.metadata_props[PRODUCT]
    if not any(n.domain == CONTRIB_DOMAIN for n in model.graph.all_nodes()):
        model.graph.opset_imports.pop(CONTRIB_DOMAIN, None)


def _restore(
    editor: Editor, node: ir.Node, notes: dict[str, str | int], matrices: dict[str, ir.Value]
) -> None:
    stated = {name: node.attributes.get_int(name) for name in ("K", "N", "bits", "block_size")}
    columns, rows, bits, block = (stated[n] or 0 for n in ("N", "K", "bits", "block_size"))
    tensors = [None if v is None else constant_tensor(v) for v in node.inputs[1:3]]
    assert tensors[0] is not None
    assert tensors[1] is not None
    op, own, zero = str(notes["op"]), int(notes["block_size"]), int(notes["zero"])
    bytes_, scales = tensors[0].numpy().reshape(columns, -1), tensors[1].numpy()
    if bits < 8:
        bytes_ = np.stack([bytes_ & 0xF, bytes_ >> 4], axis=-1).reshape(columns, rows)
    steps = bytes_.astype(np.int16) - 2 ** (bits - 1) + zero
    by_column = scales.reshape(columns, rows // block)
    by_row = op == "Gemm"
    kind = ir.DataType.INT4 if bits < 8 else ir.DataType.INT8
    codes = steps if by_row else steps.T
    attributes = {"axis": 0 if by_row else 1}
    if own:
        by_column = by_column[:, :: own // block]
        by_column = by_column if by_row else by_column.T
        attributes = {"axis": 1 if by_row else 0, "block_size": own}
    else:
        by_column = by_column[:, 0]
    name, rounding = str(notes["weights"]), str(notes["rounding"])
    if name not in matrices:
        stored = codes.astype(kind.numpy())
        operands = [
            editor.constant(f"{name}_codes", ir.tensor(stored, dtype=kind)),
            editor.constant(f"{name}_scale", np.ascontiguousarray(by_column)),
        ]
        if zero:
            zeros = np.full(by_column.shape, zero).astype(kind.numpy())
            operands.append(editor.constant(f"{name}_zero", ir.tensor(zeros, dtype=kind)))
        shape = ir.Shape(codes.shape)
        matrices[name] = editor.op(
            "DequantizeLinear", operands, attributes, name=editor.fresh(name), shape=shape
        )
        editor.made[-1].metadata_props.update({MARK: "", ROUNDING: rounding})
        editor.place_after(operands[0])
    bias = node.inputs[_BIAS] if len(node.inputs) > _BIAS else None
    extra = [bias] if bias is not None else []
    how = {"transB": 1} if by_row else {}
    stale = [v for v in node.inputs[1:3] if v is not None]
    turn_into(node, op, [node.inputs[0], matrices[name], *extra], how)
    drop_unread(stale)
