"""An encoding with a scale, registered by the rows that a real one has: facts, codes, nodes.

Values have 256 codes and a zero point, constants 15 codes a channel; ONNX states them by
QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import onnx_ir as ir
import pytest

from finecast.frontends.onnx.constants import constant_tensor
from finecast.frontends.onnx.statements import STATEMENTS, Maker, Statement
from finecast.numbers import formats
from finecast.numbers.encodings import SCALED, Encoding, ScaledFormat
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Grid, Scaled

T = TypeVar("T")

LABEL: Final = "toy8"
INT8: Final = np.dtype(np.int8)
VALUES: Final = Grid(dtype=INT8, lowest=-128, highest=127)
CONSTANTS: Final = Grid(dtype=INT8, lowest=-7, highest=7, symmetric=True)
# DequantizeLinear by channel.
_SINCE: Final = 13


def install(monkeypatch: pytest.MonkeyPatch) -> Format:
    """The toy's format, known to the whole package until the test ends."""
    toy = object.__new__(Format)
    # A scale gives it fp32's range.
    toy._value_ = formats._Layout(exponent_bits=8, mantissa_bits=7, storage_bits=8)
    toy._name_ = LABEL.upper()
    monkeypatch.setitem(formats._BY_LABEL, LABEL, toy)
    monkeypatch.setitem(formats._DTYPES, toy, INT8)
    monkeypatch.setitem(_open(SCALED), toy, ScaledFormat(values=VALUES, constants=CONSTANTS))
    row = Statement(into=_quantize, back=_dequantize, since=_SINCE, read=_read)
    monkeypatch.setitem(_open(STATEMENTS), toy, row)
    return toy


def _open(table: Mapping[Format, T]) -> dict[Format, T]:
    assert isinstance(table, dict)
    return table


def _quantize(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    inputs, axis = [value, *_parameters(maker, value, to)], _axis(to)
    node = maker.node("QuantizeLinear", inputs, axis, label=LABEL, dtype=ir.DataType.INT8)
    return [node]


def _dequantize(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    inputs, axis = [value, *_parameters(maker, value, to)], _axis(to)
    node = maker.node("DequantizeLinear", inputs, axis, label="fp32", dtype=ir.DataType.FLOAT)
    return [node]


def _axis(to: Encoding) -> dict[str, int]:
    assert isinstance(to, Scaled)
    return {} if to.axis is None else {"axis": to.axis}


def _parameters(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Value]:
    assert isinstance(to, Scaled)
    scale = np.array(to.scale if to.axis is not None else to.scale[0], np.float32)
    made: list[ir.Value] = []
    for what, array in (("scale", scale), ("zero", np.full_like(scale, to.zero_point, INT8))):
        name = maker.fresh(f"{value.name}_{what}")
        tensor = ir.tensor(array, name=name)
        new = ir.Value(
            name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype)
        )
        new.const_value = tensor
        maker.register(new)
        made.append(new)
    return made


def _read(nodes: Sequence[ir.Node]) -> Scaled:
    scale, zero = (constant_tensor(v) for v in nodes[0].inputs[1:] if v is not None)
    if scale is None or zero is None:
        raise ValueError("no constants")
    axis = nodes[0].attributes.get("axis")
    return Scaled(
        format=Format.parse(LABEL),
        grid=CONSTANTS,
        scale=tuple(float(s) for s in scale.numpy().reshape(-1)),
        zero_point=int(zero.numpy().reshape(-1)[0]),
        axis=axis.as_int() if axis is not None else None,
    )
