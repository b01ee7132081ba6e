"""Ranges that a quantized model's scales cover, beside those that its values reach.

Law: a scale is wrong if a fitted one would have steps at least four times as fine, or if a
share of the numbers is beyond its range. Activations are judged by what was observed of them,
weights by their own numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import ConstantStats, Graph, Node, Value
from finecast.naming import number_of, percent
from finecast.planning.points import moves
from finecast.rules.facts import ValueFacts

Floats = NDArray[np.float64]

_COARSE: Final = 4.0
"""A step so many times as large as that of a fitted scale wastes two binary digits. Ranges of
other data than those that calibrated, as of a smaller batch, are rarely narrower than half."""

_ENOUGH_STEPS: Final = 64
"""Values that cover so many steps are fine whatever the scale: a quarter of 8 bits' steps."""

_MOST_BITS: Final = 16
"""Integers of more bits are sums: biases, whose scale is that of the product that they add to,
however small they are."""

_CLIPPED: Final = 0.001
"""A smaller share of clipped numbers is what calibration by percentiles leaves out."""

_SAME: Final = 0.9
_SAME_STEPS: Final = 2.0
"""Weights are those of the fp32 model if this share of them is within so many steps of what
the model stores: tools that correct errors round some to the next but one."""

_STEPS: Final = 8
"""Ops that are looked through for a quantization: a decoding of three, and some that move."""

_EVEN: Final = 0.01
"""Bounds that differ by less are printed as one number: int8 reaches from -128 to 127."""

_ZERO: Final = np.zeros(())
_INTEGER: Final = re.compile(r"(u?)int(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRange:
    """The numbers that a quantized value can have: from ``lowest`` to ``highest`` in steps.

    The arrays broadcast to the value: they have one number, or one for each channel.
    ``source`` is what is quantized, or the integers of which it is read. ``first`` is the
    integer that stands for ``lowest``.
    """

    lowest: Floats
    highest: Floats
    step: Floats
    source: Value
    first: float = 0

    @property
    def is_weight(self) -> bool:
        """Whether a constant is quantized."""
        return self.source.constant is not None

    def scaled(self, by: Floats) -> StoredRange:
        """That of the numbers times positive ones."""
        lowest, highest, step = (a * by for a in (self.lowest, self.highest, self.step))
        return replace(self, lowest=lowest, highest=highest, step=step)

    def moved(self, by: Floats) -> StoredRange:
        """That of the numbers less ``by``."""
        return replace(self, lowest=self.lowest - by, highest=self.highest - by)

    @property
    def widest(self) -> StoredRange:
        """One number each: the widest range, in its largest steps."""
        ends = self.lowest.min(), self.highest.max(), self.step.max()
        lowest, highest, step = map(np.asarray, ends)
        return replace(self, lowest=lowest, highest=highest, step=step)

    def over(self, shape: tuple[int, ...]) -> StoredRange:
        """With one number for each channel of ``shape``; the widest where it does not fit."""
        sizes = self.step.shape
        fits = len(sizes) == len(shape) and all(
            size in (1, d) for size, d in zip(sizes, shape, strict=True)
        )
        if fits:
            lowest, highest = (np.broadcast_to(a, sizes) for a in (self.lowest, self.highest))
            return replace(self, lowest=lowest, highest=highest)
        ones, one = (1,) * len(shape), self.widest
        return one.moved(np.zeros(ones)).scaled(np.ones(ones))

    def numbers(self, original: ConstantStats | None) -> Floats | None:
        """Those of the weight: of ``original`` if it is what was quantized, else as stored.

        None if there is no weight. Other tools quantize weights that they changed before: by
        a batch norm that they took in, by training, by factors between layers.
        """
        if (stats := self.source.constant) is None:
            return None
        stored = stats.read().astype(np.float64)
        if _integers(self.source) is not None:
            stored = self.lowest + (stored - self.first) * self.step
        if original is None:
            return stored
        exact = original.read().astype(np.float64)
        if exact.shape != stored.shape:
            return stored
        apart = np.abs(np.clip(exact, self.lowest, self.highest) - stored)
        return exact if np.mean(apart <= _SAME_STEPS * self.step) >= _SAME else stored


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongScale:
    """A scale that does not fit the numbers of its value.

    Attributes:
        covers: The least and the largest number that the scale can express.
        reaches: The least and the largest number of the value.
        constant: Whether the value is a weight, whose numbers do not depend on data.
        too_coarse: How many times as fine the steps of a fitted scale are; 1 at least.
        clipped: The share of numbers that are beyond the range, over all channels.
        channel: The worst channel, whose range and factor these are; None if there is one
            scale.
        channels: How many channels have a wrong scale.
    """

    value: str
    covers: tuple[float, float]
    reaches: tuple[float, float]
    constant: bool
    too_coarse: float
    clipped: float
    channel: int | None = None
    channels: int = 1

    @property
    def order(self) -> tuple[float, float]:
        """What sorts scales, the worst first: those too coarse, then those that clip."""
        return -self.too_coarse, -self.clipped

    @property
    def text(self) -> str:
        """What is wrong, in words."""
        reach = "its numbers reach" if self.constant else "its values on your data reach"
        wrong = f"{percent(self.clipped, 2)} of them are clipped"
        if self.too_coarse >= _COARSE:
            wrong = f"{self.too_coarse:.3g} times too coarse"
        covered, reached = _spelled(*self.covers), _spelled(*self.reaches)
        of = self.value if self.channel is None else f"{self.value}, channel {self.channel},"
        text = f"the scale of {of} covers {covered}, {reach} {reached}: {wrong}"
        if self.channels > 1:
            text += f"; so for {number_of(self.channels, 'channel')}"
        return text

    @property
    def fitting(self) -> str:
        """The range that a fitting scale covers, in words; empty unless this is too coarse."""
        if self.too_coarse < _COARSE:
            return ""
        channel = "" if self.channel is None else f" in channel {self.channel}"
        return f"{_spelled(*self.reaches)} for {self.value}{channel}"

    def to_dict(self) -> dict[str, Any]:
        """All of it as strict JSON."""
        return {
            "value": self.value,
            "covers": list(self.covers),
            "reaches": list(self.reaches),
            "constant": self.constant,
            "times_too_coarse": self.too_coarse,
            "clipped_share": self.clipped,
            "channel": self.channel,
            "channels": self.channels,
        }


def stored_range(graph: Graph, value: Value | None, steps: int = _STEPS) -> StoredRange | None:
    """What the quantization that gives ``value`` can express.

    None if nothing quantizes it within so many ops, or its scale is computed in each run.
    """
    maker = graph.maker(value)
    if value is None or maker is None or not steps:
        return None
    inner = graph.read(maker, 0)
    if maker.op == "fake_quantize":
        return _of_levels(graph, maker)
    if maker.op == "dequantize":
        return _decoded(graph, maker, value)
    if maker.op == "cast":  # OpenVINO decodes by three ops: cast, ``sub``, ``mul``
        if inner is not None and inner.format is not None:
            return stored_range(graph, inner, steps - 1)
        weights = inner is not None and inner.constant is not None
        return _integers(inner) if weights else None
    if moves(maker):
        moved = stored_range(graph, inner, steps - 1)
        return moved if moved is None or moved.is_weight else moved.widest
    if maker.op in ("sub", "mul"):
        before = stored_range(graph, inner, steps - 1)
        number = _number(graph, maker, 1)
        if before is None or number is None:
            return None
        return before.moved(number) if maker.op == "sub" else before.scaled(number)
    return None


def wrong_scale(
    value: Value, covered: StoredRange, facts: Mapping[int, ValueFacts]
) -> WrongScale | None:
    """What is wrong with the scale of a value; None if nothing is.

    Args:
        value: The fp32 model's value that is quantized, or else a weight of the other model.
        covered: What its scale covers.
        facts: What was observed of the fp32 model's values.
    """
    reached = _reached(value, covered, facts)
    if reached is None:
        return None
    covered, lowest, highest, clipped = reached
    whole = covered.highest - covered.lowest
    # Fitted ranges have 0 in them, and one with as much on both sides is fitted as such.
    lowest, highest = np.minimum(lowest, 0), np.maximum(highest, 0)
    even = np.abs(covered.lowest + covered.highest) <= 2 * covered.step
    width = np.where(even, 2 * np.maximum(-lowest, highest), highest - lowest)
    used = width > 0  # a channel of zeros has no error
    coarse = np.where(used, whole / np.where(used, width, 1), 1)
    coarse = np.where(width / covered.step < _ENOUGH_STEPS, coarse, 1)
    wrong = coarse >= _COARSE
    # The squared error is that of all channels: those with large steps count most.
    error = np.where(wrong, whole**2, 0)
    if not wrong.any() or np.sum(error) < (_COARSE**2 - 1) * np.sum(width**2):
        error, wrong = clipped, clipped >= _CLIPPED
        if np.mean(clipped) < _CLIPPED:
            return None
    worst = int(np.argmax(error))
    low, high, least, most, factor = (
        float(a.flat[worst])
        for a in (covered.lowest, covered.highest, lowest, highest, coarse)
    )
    return WrongScale(
        value=value.name,
        covers=(low, high),
        reaches=(least, most),
        constant=covered.is_weight,
        too_coarse=max(factor, 1.0),
        clipped=float(np.mean(clipped)),
        channel=worst if whole.size > 1 else None,
        channels=int(np.sum(wrong)),
    )


def _reached(
    value: Value, covered: StoredRange, facts: Mapping[int, ValueFacts]
) -> tuple[StoredRange, Floats, Floats, Floats] | None:
    """By channel the range, the least and the largest number, and the share that is clipped.

    Activations have one channel: what is observed of them is of all their numbers.
    """
    if not covered.is_weight:
        seen, covered = facts.get(value.id), covered.widest
        if seen is None or seen.highest < seen.lowest:  # no finite number
            return None
        left, right = seen.histogram.edges
        half = covered.step / 2
        beyond = (left > covered.highest + half) | (right < covered.lowest - half)
        clipped = np.asarray(seen.histogram.counts[beyond].sum() / seen.count)
        return covered, np.asarray(seen.lowest), np.asarray(seen.highest), clipped
    numbers = covered.numbers(value.constant)
    if numbers is None or not numbers.size:
        return None
    covered = covered.over(numbers.shape)
    axes = tuple(k for k, size in enumerate(covered.step.shape) if size == 1)
    half = covered.step / 2
    beyond = (numbers > covered.highest + half) | (numbers < covered.lowest - half)
    lowest, highest = (f(numbers, axis=axes, keepdims=True) for f in (np.min, np.max))
    return covered, lowest, highest, np.mean(beyond, axis=axes, keepdims=True)


def _integers(value: Value | None) -> StoredRange | None:
    """All numbers of an integer type that operands have; None of other types."""
    named = None if value is None else _INTEGER.fullmatch(value.dtype)
    if value is None or named is None or (bits := int(named[2])) > _MOST_BITS:
        return None
    lowest = 0 if named[1] else -(2 ** (bits - 1))
    least, most, step = (np.asarray(float(n)) for n in (lowest, lowest + 2**bits - 1, 1))
    return StoredRange(lowest=least, highest=most, step=step, source=value, first=lowest)


def _decoded(graph: Graph, node: Node, value: Value) -> StoredRange | None:
    """What a node that dequantizes gives, if its scale and zero point are constants."""
    integers = graph.read(node, 0)
    stored, quantizes = _integers(integers), graph.maker(integers)
    if stored is not None and quantizes is not None and quantizes.op == "quantize":
        stored = replace(stored, source=graph.read(quantizes, 0) or stored.source)
    scale, zero = _number(graph, node, 1, "scale"), _number(graph, node, 2, "zero_point")
    if stored is None or scale is None or (zero is None and graph.read(node, 2) is not None):
        return None
    if (bounds := _bounds(node)) is not None:
        least, most = bounds
        stored = replace(
            stored, lowest=np.asarray(least), highest=np.asarray(most), first=least
        )
    shape = value.shape
    if scale.ndim == 1 and scale.size > 1:
        axis = node.attributes.get("axis", 1)
        if shape is None or not isinstance(axis, int):
            return stored.moved(zero if zero is not None else _ZERO).scaled(scale).widest
        sizes = [1] * len(shape)
        sizes[axis] = scale.size
        scale = scale.reshape(sizes)
        zero = zero.reshape(sizes) if zero is not None and zero.size > 1 else zero
    return stored.moved(_ZERO if zero is None else zero).scaled(scale)


def _of_levels(graph: Graph, node: Node) -> StoredRange | None:
    """What OpenVINO's FakeQuantize takes in: its second and third operand are the bounds."""
    source, levels = graph.read(node, 0), node.attributes.get("levels")
    lowest, highest = (_number(graph, node, port) for port in (1, 2))
    if source is None or lowest is None or highest is None:
        return None
    if not isinstance(levels, int) or levels <= 1:
        return None
    step = (highest - lowest) / (levels - 1)
    return StoredRange(lowest=lowest, highest=highest, step=step, source=source)


def _bounds(node: Node) -> tuple[float, float] | None:
    """The least and the largest integer that PyTorch's ops give; None if none are named."""
    least, most = (node.attributes.get(name) for name in ("quant_min", "quant_max"))
    if not isinstance(least, int) or not isinstance(most, int):
        return None
    return float(least), float(most)


def _number(graph: Graph, node: Node, port: int, argument: str = "") -> Floats | None:
    """The numbers of a constant operand, or of the argument that PyTorch's ops have for it.

    None if neither is there.
    """
    value, number = graph.read(node, port), node.attributes.get(argument)
    if value is None and isinstance(number, int | float):
        return np.asarray(float(number))
    if value is None or value.constant is None or not value.constant.size:
        return None
    return value.constant.read().astype(np.float64)


def _spelled(lowest: float, highest: float) -> str:
    """A range in words: ``±3`` or ``0 to 3``."""
    if math.isclose(-lowest, highest, rel_tol=_EVEN):
        return f"±{highest:.3g}"
    return f"{lowest:.3g} to {highest:.3g}"
