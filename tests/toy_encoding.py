"""An encoding with a scale, registered by the rows that a real one has: facts and nodes.

Values have 256 codes and a zero point, constants 15 codes a channel; ONNX states them by
QuantizeLinear and DequantizeLinear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import numpy as np
import pytest

from finecast.frontends.onnx.statements import STATEMENTS, by_codes
from finecast.numbers import formats
from finecast.numbers.formats import Format, Grid

T = TypeVar("T")

LABEL: Final = "toy8"
INT8: Final = np.dtype(np.int8)
VALUES: Final = Grid(dtype=INT8, lowest=-128, highest=127)
CONSTANTS: Final = Grid(dtype=INT8, lowest=-7, highest=7, symmetric=True)


def install(monkeypatch: pytest.MonkeyPatch) -> Format:
    """The toy's format, known to the whole package until the test ends."""
    toy = object.__new__(Format)
    # A scale gives it fp32's range.
    toy._layout = formats._Layout(
        exponent_bits=8,
        mantissa_bits=7,
        bits=8,
        codes=formats._Codes(values=VALUES, constants=CONSTANTS),
    )
    toy._name_, toy._value_ = LABEL.upper(), LABEL
    monkeypatch.setitem(formats._BY_LABEL, LABEL, toy)
    monkeypatch.setitem(formats._DTYPES, toy, INT8)
    monkeypatch.setitem(_open(STATEMENTS), toy, by_codes(toy))
    return toy


def _open(table: Mapping[Format, T]) -> dict[Format, T]:
    assert isinstance(table, dict)
    return table
