"""ONNX nodes that round a value in fp32: by casts, or else by exact arithmetic.

Laws: numbers in the format's normal range become what ``roundmodes.convert`` gives, bit for
bit. Exceptions are fp32's subnormals, and stochastic rounding, whose draws come from another
table. Arithmetic leaves numbers beyond 2^104 unrounded in formats with fp32's range.
Sources: T. J. Dekker, "A floating-point technique for extending the available precision"
(1971), for splitting; adding and subtracting 1.5 * 2^23 units rounds to a whole unit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.numbers.encodings import Dynamic, Scaled
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder, Rounding, draws

# Length of the table of draws: a prime, so that it has no common factor with the size of a
# sample, and samples do not draw the same numbers after a few.
_TABLE: Final = 1_048_573
# Largest magnitude that is split: its product with 2^23 + 1 stays below 2^128. The largest
# fp32 numbers are multiples of it, so subtracting it and adding it back is exact for them.
_SPLIT_LIMIT: Final = 2.0**104
_FRACTION: Final = Format.FP32.mantissa_bits


def _no_stream() -> ir.Value:
    raise ValueError("stochastic rounding needs the index of the batch in the stream")


@dataclass(slots=True)
class RoundOps:
    """Makes nodes that round.

    Attributes:
        register: Takes each constant that the nodes read, once.
        offset: Gives a scalar int64 value, the index of the batch's first sample among all
            samples of the run. Only stochastic rounding calls it.
        constants: The constants made so far.
        made: The nodes of the rounding being made.
        label: Prefix of the names of its nodes' results.
        count: How many names it has used.
    """

    register: Callable[[ir.Value], None]
    offset: Callable[[], ir.Value] = _no_stream
    constants: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])
    made: list[ir.Node] = field(default_factory=list[ir.Node])
    label: str = ""
    count: int = 0

    def round(
        self, value: ir.Value, how: Rounder, label: str
    ) -> tuple[list[ir.Node], ir.Value]:
        """Nodes, in order, and the value that the last one gives: ``value`` rounded."""
        self.made, self.label, self.count = [], label, 0
        if isinstance(how.encoding, Dynamic):
            return self.made, self._by_groups(value, how.encoding)
        if how.encoding is not None:
            return self.made, self._by_codes(value, how.encoding)
        if how.format is Format.FP32:  # only subnormals change, as in an engine's own sums
            return self.made, self._flushed(value, how.format)
        to_nearest = how.rounding is Rounding.NEAREST_EVEN
        if to_nearest and how.format in _CASTS:
            out = self._by_cast(value, how)
        elif to_nearest and how.format is Format.TF32:
            out = self._by_split(value, how)
        else:
            out = self._by_grid(value, how)
        if how.flush_subnormals:
            out = self._flushed(out, how.format)
        return self.made, out

    def constant(self, array: NDArray[np.generic]) -> ir.Value:
        """An initializer; equal scalars, and equal lists of one number, are shared.

        Of larger arrays there is one of each type: the table of draws.
        """
        key = f"list_{array.dtype}" if array.ndim else f"{array.dtype}"
        key = f"{key}_{array.item()}" if array.size == 1 else f"table_{array.dtype}"
        if key not in self.constants:
            name = f"finecast_{key}".replace("-", "m").replace("+", "").replace(".", "_")
            tensor = ir.tensor(array, name=name)
            self.constants[key] = value = ir.val(name, const_value=tensor)
            self.register(value)
        return self.constants[key]

    def scalar(self, x: float) -> ir.Value:
        """An fp32 constant."""
        return self.constant(np.array(x, dtype=np.float32))

    def op(
        self,
        kind: str,
        *inputs: ir.Value,
        dtype: ir.DataType = ir.DataType.FLOAT,
        **attributes: int | list[int],
    ) -> ir.Value:
        """Append one node; returns its result."""
        other_shape = dtype is _INT or kind in ("Gather", "Reshape", "MaxPool")
        shape = None if other_shape else inputs[0].shape
        out = ir.val(f"{self.label}_{self.count}", dtype, shape)
        self.count += 1
        self.made.append(ir.node(kind, list(inputs), attributes, outputs=[out]))
        return out

    def _by_codes(self, value: ir.Value, encoding: Scaled) -> ir.Value:
        """By QuantizeLinear and DequantizeLinear, with one scale for the whole tensor."""
        scale = self.scalar(encoding.scale[0])
        zero = self.constant(np.array(encoding.zero_point, dtype=encoding.dtype))
        dtype = ir.DataType.from_numpy(encoding.dtype)
        codes = self.op("QuantizeLinear", value, scale, zero, dtype=dtype)
        return self.op("DequantizeLinear", codes, scale, zero)

    def _by_groups(self, value: ir.Value, encoding: Dynamic) -> ir.Value:
        """By the scales that a kernel finds for groups of numbers in a row."""
        group = encoding.group
        rows = self.op("Reshape", value, self._sizes([1, -1, group]))
        # ReduceMax takes its axes as an attribute or as an input, by the operation set.
        wide = self.op("MaxPool", self.op("Abs", rows), kernel_shape=[group], strides=[group])
        largest = self.scalar(float(encoding.largest))
        ends = self.op("Max", wide, self.scalar(float(encoding.least)))
        scales = self.op("Div", ends, largest)
        steps = self.op("Round", self.op("Div", rows, scales))
        shape = self.op("Shape", value, dtype=_INT)
        out = self.op("Reshape", self.op("Mul", steps, scales), shape)
        out.shape = value.shape
        return out

    def _sizes(self, numbers: list[int]) -> ir.Value:
        """A list of int64."""
        key = "_".join(str(n) for n in numbers).replace("-", "m")
        if key not in self.constants:
            name = f"finecast_sizes_{key}"
            tensor = ir.tensor(np.array(numbers, np.int64), name=name)
            self.constants[key] = ir.val(name, const_value=tensor)
            self.register(self.constants[key])
        return self.constants[key]

    def _by_cast(self, value: ir.Value, how: Rounder) -> ir.Value:
        if how.saturate:
            value = self._clipped(value, how.format.max)
        dtype = DATA_TYPES[how.format]
        low = self.op("Cast", value, dtype=dtype, to=int(dtype))
        return self.op("Cast", low, to=int(ir.DataType.FLOAT))

    def _by_split(self, value: ir.Value, how: Rounder) -> ir.Value:
        """Round to nearest even by Dekker's splitting; numbers that it overflows on pass."""
        drop = _FRACTION - how.format.mantissa_bits
        near = self._clipped(value, _SPLIT_LIMIT)
        product = self.op("Mul", near, self.scalar(2.0**drop + 1))
        rounded = self.op("Sub", product, self.op("Sub", product, near))
        # What was clipped away comes back unrounded; within the limit that adds nothing.
        # Subtracting the difference, not adding its opposite, keeps the sign of zeros.
        out = self.op("Sub", rounded, self.op("Sub", near, value))
        return self._clipped(out, how.format.max) if how.saturate else out

    def _by_grid(self, value: ir.Value, how: Rounder) -> ir.Value:
        """Round the magnitude by adding and subtracting 1.5 * 2^23 quanta of its binade.

        ``power`` is the power of two nearest to the magnitude, and ``binade`` the one not
        above it. A quantum is the distance between the format's numbers there. Modes other
        than to nearest correct the nearest number by a quantum.
        """
        fmt = how.format
        magnitude = self.op("Abs", value)
        top = min(fmt.max, _SPLIT_LIMIT)
        inside = self.op("Clip", magnitude, self.scalar(fmt.smallest_normal), self.scalar(top))
        product = self.op("Mul", inside, self.scalar(2.0**_FRACTION + 1))
        power = self.op("Sub", product, self.op("Sub", product, inside))
        above = self.op("Greater", power, inside, dtype=_BOOL)
        binade = self.op("Where", above, self.op("Mul", power, self.scalar(0.5)), power)
        magic = self.op(
            "Mul", binade, self.scalar(1.5 * 2.0 ** (_FRACTION - fmt.mantissa_bits))
        )
        wanted = magnitude
        quantum = self.op("Mul", binade, self.scalar(fmt.epsilon))
        if how.rounding is Rounding.STOCHASTIC:
            step = self.op("Mul", self._draws(value, how.seed), quantum)
            wanted = self.op("Add", magnitude, step)
        rounded = self.op("Sub", self.op("Add", wanted, magic), magic)
        if how.rounding is Rounding.UP_FROM_ODD:
            rounded = self._up_from_odd(rounded, magnitude, magic, quantum)
        elif how.rounding is not Rounding.NEAREST_EVEN:
            over = self.op("Greater", rounded, wanted, dtype=_BOOL)
            lower = self.op("Sub", rounded, quantum)
            rounded = self.op("Where", over, lower, rounded)
        rounded = self._limited(rounded, magnitude, how)
        # Sign(x) * y would lose the sign of zeros.
        negative = self.op("Less", value, self.scalar(0.0), dtype=_BOOL)
        return self.op("Where", negative, self.op("Neg", rounded), rounded)

    def _up_from_odd(
        self, nearest: ir.Value, magnitude: ir.Value, magic: ir.Value, quantum: ir.Value
    ) -> ir.Value:
        """Take back a step where rounding went up, from an even number to an odd one."""
        double = self.op("Mul", magic, self.scalar(2.0))
        even = self.op("Sub", self.op("Add", nearest, double), double)
        is_even = self.op("Equal", even, nearest, dtype=_BOOL)
        stays = self.op("LessOrEqual", nearest, magnitude, dtype=_BOOL)
        keeps = self.op("Or", is_even, stays, dtype=_BOOL)
        return self.op("Where", keeps, nearest, self.op("Sub", nearest, quantum))

    def _limited(self, rounded: ir.Value, magnitude: ir.Value, how: Rounder) -> ir.Value:
        fmt = how.format
        if fmt.max > _SPLIT_LIMIT:
            large = self.op("Greater", magnitude, self.scalar(_SPLIT_LIMIT), dtype=_BOOL)
            rounded = self.op("Where", large, magnitude, rounded)
        beyond = self.op("Greater", rounded, self.scalar(fmt.max), dtype=_BOOL)
        stays = how.saturate or how.rounding is Rounding.TOWARD_ZERO
        infinity = np.nan if fmt.finite_only else np.inf
        limit = self.scalar(fmt.max if stays else infinity)
        out = self.op("Where", beyond, limit, rounded)
        if how.saturate or how.rounding is not Rounding.TOWARD_ZERO:
            return out
        endless = self.op("IsInf", magnitude, dtype=_BOOL)
        return self.op("Where", endless, self.scalar(infinity), out)

    def _flushed(self, value: ir.Value, fmt: Format) -> ir.Value:
        small = self.op(
            "Less", self.op("Abs", value), self.scalar(fmt.smallest_normal), dtype=_BOOL
        )
        return self.op("Where", small, self.op("Mul", value, self.scalar(0.0)), value)

    def _clipped(self, value: ir.Value, limit: float) -> ir.Value:
        return self.op("Clip", value, self.scalar(-limit), self.scalar(limit))

    def _draws(self, value: ir.Value, seed: int) -> ir.Value:
        """A draw from a table for each element, by its index among those of the whole run.

        Indices count on from batch to batch along the first axis, so an element's draw does
        not depend on how samples are split into batches. They wrap around at the table's end.
        """
        table = self.constant(
            (np.floor(draws(_TABLE, seed=seed) * 4096) / 4096).astype(np.float32)
        )
        shape = self.op("Shape", value, dtype=_INT)
        size = self.op("ReduceProd", shape, dtype=_INT, keepdims=0)
        one, ones = (self.constant(np.array(n, dtype=np.int64)) for n in (1, [1]))
        first = self.op(
            "Gather",
            self.op("Concat", shape, ones, dtype=_INT, axis=0),
            self.constant(np.array(0, dtype=np.int64)),
            dtype=_INT,
        )
        rows = self.op("Max", first, one, dtype=_INT)
        each = self.op("Div", size, rows, dtype=_INT)
        start = self.op("Mul", self.offset(), each, dtype=_INT)
        salt = self.constant(np.array(_salt(self.label), dtype=np.int64))
        start = self.op("Add", start, salt, dtype=_INT)
        zero = self.constant(np.array(0, dtype=np.int64))
        index = self.op("Range", zero, size, one, dtype=_INT)
        prime = self.constant(np.array(_TABLE, dtype=np.int64))
        index = self.op("Mod", self.op("Add", index, start, dtype=_INT), prime, dtype=_INT)
        return self.op("Reshape", self.op("Gather", table, index), shape)


_BOOL: Final = ir.DataType.BOOL
_INT: Final = ir.DataType.INT64
# Formats whose casts ONNX Runtime computes right in every case. Its casts to fp8 are not:
# without saturation they give 448 for 464 < x < 496 in e4m3, and NaN for Inf in e5m2.
_CASTS: Final = frozenset({Format.BF16, Format.FP16})


def _salt(label: str) -> int:
    """Where a rounding starts in the table: a hash of its label, the same in every process."""
    total = 0
    for character in label.encode():
        total = (total * 257 + character) % _TABLE
    return total
