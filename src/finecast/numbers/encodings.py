"""Encodings: how numbers are stored and read back.

A float format is an encoding without parameters. One with parameters stores numbers as integer
codes: ``x`` is stored as ``x / scale``, rounded to nearest even, plus the zero point, and
clamped to the codes of the grid. A tensor has one scale, or one for each channel along an
axis, or one for each group of some numbers in a row along an axis. In formats of blocks the
numbers themselves give the scales (``numbers.blocks``), and the axis is the only parameter. A
new encoding is a row of ``formats.Format``, one in each frontend that states it, and one in
each engine that computes with it.
"""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeAlias

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from finecast.files.saved import converted
from finecast.numbers.blocks import BlockLayout, StoredBlocks
from finecast.numbers.formats import E5M2, Format, Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """An encoding with parameters: one scale for a tensor, or one per channel along ``axis``.

    Channels may lie along several axes, as those of a grouped convolution do: along ``axis``
    and as many axes after it as give one channel for each scale. With ``group``, that many
    numbers in a row along ``axis`` share a scale, apart for each index of the other axes.
    ``shifts`` are what is added to the nearest codes of a constant with groups, by element,
    as ``stored_shifts`` gives them; empty if nothing is.

    Laws, without shifts: ``round`` is idempotent; what is within the range moves by half a
    step at most, and what is beyond it, infinities too, becomes its end. Scales and decoded
    numbers are rounded to the format that codes are decoded to, which is fp32 or bf16. NaN has
    no code and becomes 0: a value in which one was observed must not be encoded. Each channel
    is encoded independently.

    Scales by group are many: one for 32 numbers or more, 50 million in a decoder of 7 billion
    weights. They are held and saved as the bytes of fp32, an eighth of Python's numbers.

    Raises:
        ValueError: If the parameters cannot store numbers.
    """

    format: Format
    grid: Grid
    scale: Sequence[float] = field(hash=False)  # an array has no hash
    zero_point: int = 0
    axis: int | None = None
    group: int | None = None
    shifts: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        grid, zero = self.grid, self.zero_point
        if not grid.lowest <= zero <= grid.highest or (grid.symmetric and zero):
            raise ValueError(f"{self.label} has no zero point {zero}")
        widest = max(grid.highest - zero, zero - grid.lowest)
        least, most = Format.FP32.smallest_normal, Format.FP32.max / widest
        scales = np.asarray(self.scale, np.float64)
        with np.errstate(over="ignore"):
            exact = self.format.result.round(scales.astype(np.float32)) == scales
        wrong = scales[~((least <= scales) & (scales <= most) & exact)]
        if wrong.size:
            raise ValueError(f"{float(wrong[0])!r} is no scale of {self.label}")
        if not len(self.scale) or (self.axis is None and len(self.scale) > 1):
            raise ValueError(f"{len(self.scale)} scales of one tensor")
        if self.axis is not None and self.axis < 0:
            raise ValueError(f"axis {self.axis}")
        if self.group is not None and (self.axis is None or self.group < 1):
            raise ValueError(f"groups of {self.group} along axis {self.axis}")
        if self.group is not None:
            object.__setattr__(self, "scale", array("f", scales.astype(np.float32).tobytes()))
        if self.shifts:
            self._shifts()

    @classmethod
    def fitted(
        cls,
        fmt: Format,
        grid: Grid,
        lows: NDArray[np.floating[Any]],
        highs: NDArray[np.floating[Any]],
        axis: int | None = None,
        group: int | None = None,
    ) -> Scaled:
        """The encoding whose range covers that from low to high, in each channel or group.

        Raises:
            ValueError: If an end is not finite, or too large for a scale.
        """
        ends = np.asarray([lows, highs], np.float64).reshape(2, -1)
        if not np.isfinite(ends).all():
            raise ValueError("a range that is not finite has no scale")
        scales, zero = grid.fit(*ends)
        scales = fmt.result.round(scales)
        scale = tuple(scales.tolist())
        return cls(format=fmt, grid=grid, scale=scale, zero_point=zero, axis=axis, group=group)

    @classmethod
    def of_value(cls, fmt: Format, low: float, high: float, *, signed: bool = False) -> Scaled:
        """The encoding in ``fmt`` of a value whose numbers go from ``low`` to ``high``.

        Raises:
            ValueError: As ``fitted``, or if ``fmt`` does not encode values.
        """
        grid = fmt.grid(constant=False, signed=signed)
        return cls.fitted(fmt, grid, np.asarray(low), np.asarray(high))

    @classmethod
    def of_constant(
        cls,
        fmt: Format,
        array: NDArray[np.generic],
        channels: tuple[int, ...] = (),
        *,
        least_error: bool = False,
    ) -> Scaled:
        """The encoding in ``fmt`` that covers all numbers of a constant.

        Args:
            fmt: A format with scales.
            array: The constant.
            channels: The axes of its channels, each of which has a scale; empty for one scale.
            least_error: Where numbers have a scale by group, each group's range is cut to the
                share of it that gives the least squared error, and numbers beyond are clipped.

        Raises:
            ValueError: As ``fitted``, or if the constant is empty.
        """
        array = array.astype(np.float32, copy=False)
        if not array.size:
            raise ValueError("it is empty")
        if fmt.group_sizes:
            axis, group = _grouping(array.shape, channels, fmt)
            rows = array.reshape(_split(array.shape, axis, group))
            ends = rows.min(axis=axis + 1), rows.max(axis=axis + 1)
            encoding = cls.fitted(fmt, fmt.grid(constant=True), *ends, axis=axis, group=group)
            return encoding.of_least_error(array) if least_error else encoding
        others = tuple(i for i in range(array.ndim) if i not in channels)
        ends = array.min(axis=others), array.max(axis=others)
        axis = min(channels, default=None)
        return cls.fitted(fmt, fmt.grid(constant=True), *ends, axis=axis)

    def of_least_error(self, array: NDArray[np.float32]) -> Scaled:
        """This encoding with each group's scale times the share that suits its numbers best.

        Law: the squared error of no group grows.
        """
        assert self.axis is not None
        shape, axis = self.split(array.shape), self.axis + 1
        rows, scales = array.reshape(shape), self.spread(array.shape)
        best, least = scales, np.full(scales.shape, np.inf, np.float32)
        for share in _SHARES:
            tried = np.maximum(scales * share, np.float32(Format.FP32.smallest_normal))
            tried = self.format.result.round(tried)
            codes = np.clip(
                self.grid.nearest(rows / tried), self.grid.lowest, self.grid.highest
            )
            error = np.square(codes * tried - rows).sum(axis=axis, keepdims=True)
            better = error < least
            best, least = np.where(better, tried, best), np.where(better, error, least)
        return replace(self, scale=best.reshape(-1).tolist())

    @property
    def label(self) -> str:
        """The format's name."""
        return self.format.label

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type that stores the codes."""
        return self.grid.dtype

    @property
    def range(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The least and the largest number that is stored, by channel."""
        scale, zero = np.asarray(self.scale, np.float32), self.zero_point
        return (self.grid.lowest - zero) * scale, (self.grid.highest - zero) * scale

    def bytes_for(self, count: int) -> int:
        """Bytes that ``count`` codes take with their scales."""
        return self.format.bytes_for(count) + self.format.result.bytes_for(len(self.scale))

    def encode(self, x: NDArray[np.generic]) -> NDArray[np.generic]:
        """The codes of ``x``."""
        return self.codes(x, self.along(x.shape), self.shifted(x.shape))

    def decode(self, codes: NDArray[np.generic]) -> NDArray[np.float32]:
        """The numbers that ``codes`` stand for."""
        steps = codes.astype(np.float32) - np.float32(self.zero_point)
        numbers = np.asarray(steps * self.along(codes.shape), np.float32)
        return self.format.result.round(numbers)

    def round(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """``x`` encoded and decoded."""
        return self.decode(self.encode(x))

    def moved(self, zero_point: int) -> Scaled:
        """The encoding of the same numbers by codes that are larger by ``zero_point``."""
        grid, zero = self.grid.moved(zero_point), self.zero_point + zero_point
        return replace(self, grid=grid, zero_point=zero)

    def before(self, order: Sequence[int], sizes: Sequence[int]) -> Scaled | None:
        """The encoding, with equal codes, of what is transposed to a tensor that has this one.

        Args:
            order: Of each axis of the tensor, the axis that it was before.
            sizes: The tensor's shape.

        Returns:
            None for groups, and for channels along several axes: their order may change.
        """
        if self.axis is None:
            return self
        axis = order[self.axis]
        if self.group is not None and not self.shifts:
            groups = [n // (self.group if i == self.axis else 1) for i, n in enumerate(sizes)]
            scales = np.asarray(self.scale, np.float32).reshape(groups)
            scales = scales.transpose(np.argsort(order)).reshape(-1)
            return replace(self, axis=axis, scale=scales.tolist())
        if self.group is not None or sizes[self.axis] != len(self.scale):
            return None
        return replace(self, axis=axis)

    def along(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The scale of each element of an array of ``shape``.

        Raises:
            ValueError: If the array does not have one channel, or group, for each scale.
        """
        return np.broadcast_to(self.spread(shape), self.split(shape)).reshape(shape)

    def shifted(self, shape: tuple[int, ...]) -> NDArray[np.int8] | None:
        """What is added to the nearest code of each element of an array of ``shape``."""
        return self._shifts().reshape(shape) if self.shifts else None

    def _shifts(self) -> NDArray[np.int8]:
        """The shifts, flat.

        Raises:
            ValueError: If there is not one for each number of each group.
        """
        count = len(self.scale) * (self.group or 0)
        try:
            shifts = zlib.decompressobj().decompress(self.shifts, count + 1)
        except zlib.error as error:
            raise ValueError(
                f"shifts of quantized numbers that cannot be read: {error}"
            ) from error
        if len(shifts) != count:
            raise ValueError(f"shifts of quantized numbers for other than {count} elements")
        return np.frombuffer(shifts, np.int8)

    def split(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """``shape`` with an axis of groups cut in two: groups, and the numbers of each."""
        if self.axis is None or self.group is None:
            return shape
        return _split(shape, self.axis, self.group)

    def spread(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The scales, in a shape that broadcasts to ``split(shape)``.

        Raises:
            ValueError: As ``along``.
        """
        scale = np.asarray(self.scale, np.float32)
        if self.axis is not None and self.group is not None:
            fits = self.axis < len(shape) and math.prod(shape) == scale.size * self.group
            if fits and shape[self.axis] % self.group == 0:
                groups = _split(shape, self.axis, self.group)
                return scale.reshape(*groups[: self.axis + 1], 1, *groups[self.axis + 2 :])
            raise ValueError(
                f"{scale.size} scales of {self.group} numbers each along axis {self.axis} of a"
                f" tensor of shape {shape}"
            )
        if self.axis is None:
            return scale.reshape(())
        for end in range(self.axis + 1, len(shape) + 1):
            channels = shape[self.axis : end]
            if math.prod(channels) == scale.size:
                return scale.reshape(*channels, *(1,) * (len(shape) - end))
        raise ValueError(
            f"{scale.size} scales along axis {self.axis} of a tensor of shape {shape}"
        )

    def codes(
        self,
        x: NDArray[np.generic],
        scale: NDArray[np.float32],
        shifts: NDArray[np.int8] | None = None,
    ) -> NDArray[np.generic]:
        """The codes of ``x`` where each element has its ``scale``, and perhaps its shift."""
        grid, zero = self.grid, np.float32(self.zero_point)
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.asarray(np.asarray(x, np.float32) / scale)
            steps = grid.nearest(steps)  # in place, as what follows: weights may be large
            steps += zero
        if shifts is not None:
            np.clip(steps, grid.lowest, grid.highest, out=steps)
            steps += shifts
        steps[np.isnan(steps)] = zero
        np.clip(steps, grid.lowest, grid.highest, out=steps)
        return steps.astype(grid.dtype)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON content, without the format and its grid."""
        stated = {"zero_point": self.zero_point, "axis": self.axis}
        if self.group is None:
            return {"scale": list(self.scale), **stated}
        packed = base64.b64encode(np.asarray(self.scale, _PACKED).tobytes()).decode()
        moved = {"shifts": base64.b64encode(self.shifts).decode()} if self.shifts else {}
        return {"scale": packed, **stated, "group": self.group, **moved}

    @classmethod
    def from_dict(cls, fmt: Format, grid: Grid, content: dict[str, Any]) -> Scaled:
        """Read what ``to_dict`` gave.

        Raises:
            ValueError: If ``content`` has another form.
        """
        stated = converted(content, _SavedScales)
        scale = stated.scale
        if isinstance(scale, bytes) != (stated.group is not None):
            raise ValueError("the bytes of scales are those of groups alone")
        if isinstance(scale, bytes):
            scale = np.frombuffer(scale, _PACKED).tolist()
        return cls(
            format=fmt,
            grid=grid,
            scale=tuple(scale),
            zero_point=stated.zero_point,
            axis=stated.axis,
            group=stated.group,
            shifts=stated.shifts,
        )


class _SavedScales(msgspec.Struct, kw_only=True):
    """The parameters of a ``Scaled``; bytes are text in base64."""

    scale: list[float] | bytes
    zero_point: int
    axis: int | None
    group: int | None = None
    shifts: bytes = b""


def stored_shifts(shifts: NDArray[np.int8]) -> bytes:
    """What is added to the nearest code of each element, in order, compressed.

    Most are 0: the shifts of a matrix take about one bit each.
    """
    return zlib.compress(np.ascontiguousarray(shifts).tobytes())


# How scales by group are saved: fp32, the least byte first, as text in base64.
_PACKED: Final = np.dtype("<f4")

# Shares of a group's range that are tried for the least error, the whole of it first. Of
# normally distributed numbers in groups of 128, 15 codes lose least at a share of 0.8.
_SHARES: Final = tuple(np.linspace(1.0, 0.6, 9, dtype=np.float32))


def group_size(fmt: Format, count: int) -> int | None:
    """How many of ``count`` numbers in a row share a scale; None if no size of groups fits."""
    least = fmt.fewest_groups
    fits = (s for s in fmt.group_sizes if count % s == 0 and count >= least * s)
    return next(fits, None)


def _grouping(
    shape: tuple[int, ...], channels: tuple[int, ...], fmt: Format
) -> tuple[int, int]:
    """The axis of a matrix that lies across its channels, and the size of groups along it.

    Raises:
        ValueError: If the constant is no matrix with channels, or no size divides it.
    """
    if len(shape) != 2 or len(channels) != 1:
        raise ValueError("groups are those of a matrix")
    axis = 1 - channels[0]
    size = group_size(fmt, shape[axis])
    if size is not None:
        return axis, size
    sizes = ", ".join(map(str, fmt.group_sizes))
    raise ValueError(
        f"{shape[axis]} numbers are not {fmt.fewest_groups} or more groups of one of {sizes}"
    )


def _split(shape: tuple[int, ...], axis: int, group: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // group, group, *shape[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a constant is stored in a format of blocks, which lie along ``axis``.

    Law: scales and codes are those that ``numbers.blocks`` finds in the numbers, so that a
    constant has one encoding along an axis. What is decoded is rounded to the format that ops
    compute in.

    Raises:
        ValueError: If the format has no blocks, or the axis is negative.
    """

    format: Format
    axis: int

    def __post_init__(self) -> None:
        if self.format.blocks is None or self.axis < 0:
            raise ValueError(f"{self.label} has no blocks along axis {self.axis}")

    @classmethod
    def of_constant(
        cls, fmt: Format, array: NDArray[np.generic], channels: tuple[int, ...]
    ) -> Blocks:
        """The encoding in ``fmt`` of a matrix, whose blocks lie across its ``channels``.

        Raises:
            ValueError: If it is no matrix with channels, is empty, or has NaN or Inf.
        """
        if array.ndim != _MATRIX or len(channels) != 1:
            raise ValueError("blocks are those of a matrix")
        if not array.size:
            raise ValueError("it is empty")
        if not np.isfinite(array.astype(np.float32, copy=False)).all():
            raise ValueError("a block with NaN or Inf has no scale")
        return cls(format=fmt, axis=1 - channels[0])

    @property
    def label(self) -> str:
        """The format's name."""
        return self.format.label

    @property
    def layout(self) -> BlockLayout:
        """What blocks of the format are."""
        assert self.format.blocks is not None
        return self.format.blocks

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type that stores the codes."""
        return self.format.dtype

    def bytes_for(self, count: int) -> int:
        """Bytes that ``count`` codes take with the scales of whole blocks."""
        return self.format.bytes_for(count)

    def stored(self, x: NDArray[np.generic]) -> StoredBlocks:
        """The codes and scales of ``x``."""
        return self.layout.stored(x.astype(np.float32, copy=False), self.axis)

    def encode(self, x: NDArray[np.generic]) -> NDArray[np.generic]:
        """The codes of ``x``."""
        return self.stored(x).codes

    def round(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """``x`` stored and read back."""
        return self.format.result.round(self.layout.round(x, self.axis))

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON content, without the format."""
        return {"axis": self.axis}


_MATRIX: Final = 2  # dimensions

Stored: TypeAlias = Scaled | Blocks
"""How a constant is stored in a format with scales."""


def stored_as(
    fmt: Format,
    array: NDArray[np.generic],
    channels: tuple[int, ...] = (),
    *,
    least_error: bool = False,
) -> Stored:
    """How a constant is stored in ``fmt``; as ``of_constant`` of both."""
    if fmt.blocks is not None:
        return Blocks.of_constant(fmt, array, channels)
    return Scaled.of_constant(fmt, array, channels, least_error=least_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """How a kernel rounds a value that it reads: by scales that it finds at run time.

    Each ``group`` numbers in a row along an axis share a scale, or all of them with
    ``WHOLE_ROW``: along the last axis, or the one before it in the second operand of a product
    of two values. By the scale the largest of them becomes the largest code, of e5m2 where
    the value is a ``gradient`` in fp8; in formats of blocks
    values are rounded as constants are. PyTorch states this
    rounding; nothing in other models does: the engine makes it where it finds constants in
    ``format``.

    Law: a number moves by half a step of its group at most.
    """

    format: Format
    group: int
    axis: int = -1
    gradient: bool = False

    def __post_init__(self) -> None:
        if self.group != self.format.dynamic_group:
            raise ValueError(f"{self.label} finds no scales for groups of {self.group}")
        if self.axis not in (-1, -2) or (self.gradient and not self.format.has_float_codes):
            raise ValueError(f"{self.label} has no such scales along axis {self.axis}")

    @property
    def label(self) -> str:
        """The format's name."""
        return self.format.label

    @property
    def largest(self) -> int:
        """The largest code."""
        return self.grid.highest

    @property
    def grid(self) -> Grid:
        """The codes: integers of 8 bits whatever the constants have, or their low floats."""
        if self.gradient:
            return E5M2
        of = self.format if self.format.has_float_codes else Format.INT8_DYNAMIC
        return of.grid(constant=True)

    def round(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """The numbers that the codes of ``x`` stand for.

        Raises:
            ValueError: If the axis is not made of whole groups; a block may be short.
        """
        if self.axis != -1:
            along = replace(self, axis=-1)
            return np.swapaxes(along.round(np.swapaxes(x, self.axis, -1)), self.axis, -1)
        if self.format.blocks is not None:
            return self.format.blocks.round(x, axis=-1)
        group = self.group or x.shape[-1]
        if x.shape[-1] % group:
            raise ValueError(f"{x.shape[-1]} numbers are no groups of {group}")
        rows = np.asarray(x, np.float32).reshape(-1, group)
        ends = np.maximum(np.abs(rows).max(axis=1, keepdims=True), self.least)
        scale = (ends / np.float32(self.largest)).astype(np.float32)
        return np.asarray(self.grid.nearest(rows / scale) * scale).reshape(x.shape)

    @property
    def least(self) -> np.float32:
        """What stands for the largest number of a group of zeros, which has no scale."""
        return np.float32(self.largest * Format.FP32.smallest_normal)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON content, without the format."""
        stated: dict[str, Any] = {"group": self.group}
        stated |= {"axis": self.axis} if self.axis != -1 else {}
        return stated | ({"gradient": True} if self.gradient else {})


Encoding: TypeAlias = Format | Scaled | Blocks
"""How numbers are stored."""
Reading: TypeAlias = Encoding | Dynamic
"""How an operand is rounded: as it is stored, or by the kernel that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encodings:
    """How an op whose format has parameters encodes its inputs, by index, and its result.

    The op computes on decoded inputs, so that its ``result`` is in the format that they are
    decoded to (``Format.result``); where the engine's kernel has to give codes, ``result`` is
    their encoding, for all readers.
    """

    operands: Mapping[int, Scaled | Dynamic] = field(
        default_factory=dict[int, "Scaled | Dynamic"]
    )
    constants: Mapping[int, Stored] = field(default_factory=dict[int, "Stored"])
    result: Encoding = Format.FP32

    def at(self, index: int) -> Stored | Dynamic | None:
        """The encoding of input ``index``; None if it is not encoded."""
        return self.operands.get(index) or self.constants.get(index)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON content, without the format."""
        roles: dict[str, Mapping[int, Stored | Dynamic]] = {
            "operands": self.operands,
            "constants": dict(self.constants),
        }
        inputs = {
            role: {str(index): _stated(e, role) for index, e in sorted(named.items())}
            for role, named in roles.items()
        }
        result = self.result
        stored = result.label if isinstance(result, Format) else _stated(result, "result")
        return {**inputs, "result": stored}

    @classmethod
    def from_dict(cls, fmt: Format, content: Mapping[str, Any]) -> Encodings:
        """Read what ``to_dict`` gave; a format without parameters has none.

        Raises:
            ValueError: If ``content`` has another form.
        """
        if not fmt.has_scales:
            stray = {f.name for f in fields(cls)} & content.keys()
            if stray:
                raise ValueError(f"{fmt.label} has no parameters for {min(stray)}")
            return cls()

        stated = converted(content, _SavedEncodings)
        if stated.operands and not fmt.multiplies_codes:
            raise ValueError(f"{fmt.label} encodes constants alone, not operands")

        def of_value(content: dict[str, Any]) -> Scaled:
            grid = fmt.grid(constant=False, signed=content.get(_SIGNED) is True)
            return Scaled.from_dict(fmt, grid, content)

        def operand(content: dict[str, Any]) -> Scaled | Dynamic:
            if fmt.dynamic_group is None:
                return of_value(content)
            return converted({**content, "format": fmt.label}, Dynamic)

        result: Encoding = fmt.result
        if isinstance(stated.result, dict) and fmt.runs_on_codes:
            result = of_value(stated.result)
        elif stated.result != result.label:
            raise ValueError(f"{fmt.label} ops give {result.label}, not {stated.result!r}")
        encodings = cls(
            operands={i: operand(e) for i, e in stated.operands.items()},
            constants={i: _constant(fmt, e) for i, e in stated.constants.items()},
            result=result,
        )
        # A format for constants alone has none where a conversion stored the constants before.
        if fmt.runs_on_codes and not (encodings.operands or encodings.constants):
            raise ValueError(f"{fmt.label} needs the parameters of an input")
        return encodings


class _SavedEncodings(msgspec.Struct):
    """The parts of a saved decision that have its parameters."""

    operands: dict[int, dict[str, Any]]
    constants: dict[int, dict[str, Any]]
    result: dict[str, Any] | str


_SIGNED: Final = "signed"
"""The key that says that the codes of a value are signed."""


def _constant(fmt: Format, content: dict[str, Any]) -> Stored:
    if fmt.blocks is not None:
        return converted({**content, "format": fmt.label}, Blocks)
    return Scaled.from_dict(fmt, fmt.grid(constant=True), content)


def _stated(encoding: Stored | Dynamic, role: str) -> dict[str, Any]:
    """The parameters as JSON content; those of values say if codes are signed."""
    signed = isinstance(encoding, Scaled) and encoding.grid.symmetric and role != "constants"
    return encoding.to_dict() | ({_SIGNED: True} if signed else {})


def stored_bytes(x: NDArray[np.generic], encoding: Encoding, *, piece: int) -> Iterator[bytes]:
    """The bytes that store the constant ``x``, in order, of at most ``piece`` elements each.

    Elements of 4 bits are packed in pairs, the first of them in the lower half of a byte, as
    ONNX and OpenVINO do; ``piece`` is even then.
    """
    if isinstance(encoding, Blocks):  # what lies in one block is not stored in a row
        yield packed(encoding.encode(x), encoding.layout.element.bits).tobytes()
        return
    flat = x.reshape(-1)
    scale = None if isinstance(encoding, Format) else encoding.along(x.shape).flat
    shifts = None if isinstance(encoding, Format) else encoding.shifted((x.size,))
    for start in range(0, flat.size, piece):
        part = slice(start, start + piece)
        if isinstance(encoding, Format):
            codes = encoding.encode(flat[part])
        else:
            assert scale is not None
            added = None if shifts is None else shifts[part]
            codes = encoding.codes(flat[part], scale[part], added)
        yield packed(codes, encoding.format.bits).tobytes()


def packed(codes: NDArray[np.generic], bits: int) -> NDArray[np.generic]:
    """``codes`` as an array of whole bytes: those of 4 bits in pairs, an odd one with a 0."""
    if bits != 4:
        return codes
    floats = codes.dtype == ml_dtypes.float4_e2m1fn
    halves = (codes if floats else codes.astype(np.int8)).view(np.uint8).reshape(-1) & 0xF
    halves = np.pad(halves, (0, halves.size % 2))
    return halves[0::2] | (halves[1::2] << 4)
