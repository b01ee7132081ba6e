"""Converts a model that another tool quantized back to floats: ``--from-type int8``.

Laws: pairs of QuantizeLinear and DequantizeLinear are removed, so values are read as they were
before rounding. Constant codes become the fp32 numbers that they stand for. How each was
encoded is kept, so that a plan can encode it the same way again. Ops that compute on integers
stay, with what they read and give.

Where the codes of a value begin at 0, tools remove a Relu or Clip before them, as the codes
saturate there anyway. That saturation stays: as a Clip to the range of the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.frontends.onnx.casts import bypass
from finecast.frontends.onnx.constants import (
    ComputedTensor,
    constant_reader,
    constant_tensor,
)
from finecast.frontends.onnx.definitions import (
    CLIP_BOUNDS_ARE_INPUTS,
    CONTRIB_DOMAIN,
    opset_of,
)
from finecast.frontends.onnx.editor import Editor, drop_unread, is_read
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format

ON_CODES: Final = frozenset(
    {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "QGemm", "QAttention"}
)
"""Ops that compute with codes, as QuantFormat.QOperator and quantize_dynamic write them."""
_CODERS: Final = frozenset({"QuantizeLinear", "DequantizeLinear"})
_FLOAT: Final = ir.DataType.FLOAT
# The default of the nodes' attribute ``axis``: that of the channels.
_AXIS: Final = 1
# Ops whose results are never negative, and ops that only pass such results on.
_NOT_NEGATIVE: Final = frozenset(
    {"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Abs", "Sqrt", "Exp"}
)
_PASSES_ON: Final = frozenset(
    {
        *("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Identity"),
        *("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Dropout", "ReduceMean"),
    }
)


@dataclass(frozen=True, slots=True)
class _Codes:
    """The parameters of codes: a scale and a zero point, for all numbers or by channel."""

    scale: NDArray[np.float32]
    zero: NDArray[np.generic] | None
    axis: int

    @classmethod
    def of(cls, node: ir.Node) -> _Codes | None:
        """The parameters of a QuantizeLinear or DequantizeLinear.

        None if they are not constant fp32 numbers, or are given by block.
        """
        tensors = [None if v is None else constant_tensor(v) for v in node.inputs[1:3]]
        stated = [v for v in node.inputs[1:3] if v is not None]
        if tensors[0] is None or len(stated) != sum(t is not None for t in tensors):
            return None
        if node.attributes.get_int("block_size", 0) or tensors[0].dtype is not _FLOAT:
            return None
        zero = tensors[1].numpy() if len(tensors) > 1 and tensors[1] is not None else None
        return cls(tensors[0].numpy(), zero, node.attributes.get_int("axis", _AXIS))

    def same(self, other: _Codes) -> bool:
        """Whether codes stand for the same numbers by both."""
        by_channel = self.scale.size > 1
        return (
            np.array_equal(self.scale, other.scale)
            and np.array_equal(self._zeros(), other._zeros())
            and (not by_channel or self.axis == other.axis)
        )

    def _zeros(self) -> NDArray[np.float32]:
        return (np.zeros(1) if self.zero is None else self.zero).astype(np.float32).reshape(-1)

    def misfit(self, shape: Sequence[int]) -> str:
        """Text: why no codes of this shape can be decoded; empty if they can."""
        for name, numbers in (("scale", self.scale), ("zero point", self._zeros())):
            if numbers.size == 1:
                continue
            if not -len(shape) <= self.axis < len(shape):
                return f"axis {self.axis} is none of integers with {len(shape)} dimensions"
            if numbers.size != shape[self.axis]:
                channels = shape[self.axis]
                return f"{numbers.size} numbers of {name} for {channels} channels of integers"
        return ""

    def decode(self, codes: NDArray[np.generic]) -> NDArray[np.float32]:
        """The numbers that ``codes`` stand for."""
        shape = [1] * codes.ndim
        if self.scale.size > 1:
            shape[self.axis] = -1
        zero = self._zeros()
        steps = codes.astype(np.float32) - (zero.reshape(shape) if zero.size > 1 else zero[0])
        with np.errstate(over="ignore"):
            numbers = np.asarray(steps * self.scale.reshape(shape if codes.ndim else ()))
        # The last step of a mask of -3.4e38 may be beyond fp32, and would be NaN times 0.
        largest = np.finfo(np.float32).max
        return np.clip(numbers, -largest, largest, dtype=np.float32)

    def largest(self, dtype: ir.DataType) -> float | None:
        """The largest number that such codes stand for, if 0 is the least; else None."""
        zeros = self._zeros()
        if self.scale.size > 1 or zeros.size > 1 or not dtype.is_integer():
            return None
        if zeros[0] != dtype.min:
            return None
        return float(self.scale.item() * (dtype.max - dtype.min))

    def encoding(
        self, codes: NDArray[np.generic] | None, dtype: np.dtype[np.generic]
    ) -> Scaled | None:
        """These codes as an encoding of ``Format.INT8``: of constant ``codes``, or of values.

        None if that format has no such codes. ``dtype`` is the type of the codes.
        """
        grid = Format.INT8.grid(constant=codes is not None)
        zeros, scales = np.unique(self._zeros()), self.scale.reshape(-1)
        if dtype.itemsize != 1 or dtype.kind not in "iu" or zeros.size != 1:
            return None
        if codes is None and scales.size != 1:
            return None
        # The zero point in the grid's type: signed and unsigned codes differ by 128.
        moved = int(zeros[0]) + _least(grid.dtype) - _least(dtype)
        if codes is not None:
            moved_codes = codes.astype(np.int64) - int(zeros[0]) + moved
            if moved or np.abs(moved_codes).max(initial=0) > grid.highest:
                return None
        try:
            return Scaled(
                format=Format.INT8,
                grid=grid,
                scale=tuple(float(s) for s in scales),
                zero_point=moved,
                axis=None if codes is None or scales.size == 1 else self.axis % codes.ndim,
            )
        except ValueError:
            return None


def _least(dtype: np.dtype[np.generic]) -> int:
    return -128 if dtype.kind == "i" else 0


@dataclass(slots=True)
class Dequantizing:
    """Converts one model in place.

    Attributes:
        model: The model.
        ops: How many DequantizeLinear nodes were removed.
        came_as: How values and constants were encoded, by name, where int8 can encode so.
    """

    model: ir.Model
    ops: int = 0
    came_as: dict[str, Scaled] = field(default_factory=dict[str, Scaled])
    _clips: dict[tuple[ir.Value, float], ir.Value] = field(
        default_factory=dict[tuple[ir.Value, float], ir.Value]
    )
    _editor: Editor = field(init=False)

    def __post_init__(self) -> None:
        """Make the editor of the model."""
        self._editor = Editor(self.model)

    def run(self) -> None:
        """Remove all nodes that can be removed, and set ``ops`` and ``came_as``."""
        encodings_by_value: dict[ir.Value, set[Scaled | None]] = {}
        coders = [n for n in self.model.graph.all_nodes() if n.op_type in _CODERS]
        operands = [v for n in coders for v in n.inputs if v is not None]
        constants = [v for v in operands if constant_tensor(v) is not None]
        for node in list(self.model.graph.all_nodes()):
            taken = self._take_out(node) if _is(node, "DequantizeLinear") else None
            if taken is not None:
                self.ops += 1
                encodings_by_value.setdefault(taken[0], set()).add(taken[1])
        for value, encodings in encodings_by_value.items():
            encoding = encodings.pop()
            if encoding is not None and not encodings:  # all say the same
                self.came_as[value.name or ""] = encoding
        for node in list(self.model.graph.all_nodes()):
            if _is(node, "QuantizeLinear") and not any(map(is_read, node.outputs)):
                assert isinstance(node.graph, ir.Graph)
                node.graph.remove(node, safe=True)
        drop_unread(dict.fromkeys(constants))

    def _take_out(self, node: ir.Node) -> tuple[ir.Value, Scaled | None] | None:
        """Remove a DequantizeLinear, unless it has to stay: then return None.

        Returns:
            The value that is read instead, and how it was encoded if int8 can encode so.
        """
        source, codes = node.inputs[0], _Codes.of(node)
        if source is None or codes is None or node.outputs[0].dtype not in (None, _FLOAT):
            return None
        tensor = constant_tensor(source)
        if tensor is not None:
            return self._constant(node, tensor, codes)
        before = source.producer()
        value = before.inputs[0] if before is not None and before.inputs else None
        if before is None or value is None or not _is(before, "QuantizeLinear"):
            return None
        stated = _Codes.of(before)
        if stated is None or not stated.same(codes) or value.dtype is not _FLOAT:
            return None
        encoding = codes.encoding(None, source.dtype.numpy()) if source.dtype else None
        top = codes.largest(source.dtype) if source.dtype else None
        if top is not None and not _is_positive(value):
            value = self._clipped(value, top)
        return (value, encoding) if bypass(node, value) else None

    def _clipped(self, value: ir.Value, top: float) -> ir.Value:
        """``value`` clipped to the range of codes that reach from 0 to ``top``."""
        if (value, top) in self._clips:
            return self._clips[value, top]
        editor = self._editor
        name = editor.fresh(f"{value.name}_clipped")
        inputs, attributes = [value], dict[str, float]()
        if opset_of(self.model) < CLIP_BOUNDS_ARE_INPUTS:
            attributes = {"min": 0.0, "max": top}
        else:
            inputs.append(editor.constant(f"{name}_low", np.array(0, np.float32)))
            inputs.append(editor.constant(f"{name}_high", np.array(top, np.float32)))
        clipped = editor.op(
            "Clip", inputs, attributes, name=name, node=f"clip_{name}", shape=value.shape
        )
        editor.place_after(value)
        self._clips[value, top] = clipped
        return clipped

    def _constant(
        self, node: ir.Node, tensor: ir.TensorProtocol, codes: _Codes
    ) -> tuple[ir.Value, Scaled | None] | None:
        """Replace ``node`` by a constant of its name: the numbers that ``codes`` stand for."""
        out = node.outputs[0]
        if out.is_graph_output() or not isinstance(node.graph, ir.Graph):
            return None
        if why := codes.misfit(tuple(tensor.shape.numpy())):
            raise ModelError(
                why, where=f"{node.op_type} {node.name!r}", fix="quantize the model again"
            )
        name = out.name or ""
        out.name = f"{name}_codes"
        constant = ir.val(name, const_value=ComputedTensor(tensor, codes.decode, name))
        self.model.graph.register_initializer(constant)
        out.replace_all_uses_with(constant)
        node.graph.remove(node, safe=True)
        array = constant_reader(tensor)()
        return constant, codes.encoding(array, array.dtype)


def _is_positive(value: ir.Value) -> bool:
    """Whether the op that makes ``value`` is known to give no negative numbers."""
    node = value.producer()
    while node is not None and node.op_type in _PASSES_ON and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Clip":
        return node is not None and node.op_type in _NOT_NEGATIVE
    if "min" in node.attributes:
        return node.attributes["min"].as_float() >= 0
    bound = node.inputs[1] if len(node.inputs) > 1 else None
    least = None if bound is None else constant_tensor(bound)
    return least is not None and bool((least.numpy() >= 0).all())


def _is(node: ir.Node, kind: str) -> bool:
    return node.op_type == kind and node.domain in ("", CONTRIB_DOMAIN)
