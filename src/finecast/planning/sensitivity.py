"""Sensitivities: the squared relative output error that each rounding point causes by itself.

Of a model with several outputs it is the error of that output which is worst.
Roundings are independent to first order, so the squared errors of a plan's rounding points
add up to the plan's (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019), until they saturate. Where several ops read a value, the op that makes it
rounds it once for all of them. They read the same error, which may cancel or add up in the
outputs, so the points of such a value are also probed together. Many points are probed in
groups first: a group whose error is negligible is not probed point by point. Weights are
always probed in groups first, as they mostly bring little beside values: their codes have a
scale for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.rounding import widened
from finecast.planning.free_rows import FreeOutput, is_float, matched
from finecast.planning.points import RoundingPoints
from finecast.planning.slices import WHOLE, Slice, slices_of

# The errors of a model's outputs, each by itself, and the outputs that they are told of.
#
# Laws: the error of several outputs is that of the worst, as a mean over many would hide
# one; so is that of the slices of an output that have different units. An output that mostly
# copies an input, as a decoder gives back the keys and values that came in, is small in error
# whatever the model computes: it is left out where others are left.


_Array = NDArray[np.generic]

# An output copies an input if at least this share of its power is numbers of the input in
# their places: what the model computes of it then shows less than its own error.
_MOSTLY: Final = 0.5


class Counted(frozenset[int]):
    """Numbers of the outputs that errors are told of.

    ``free`` are outputs of free length, whose names are their numbers.
    """

    free: Sequence[FreeOutput] = ()

    @classmethod
    def of(cls, numbers: Iterable[int], free: Mapping[int, FreeOutput]) -> Counted:
        """Those numbers, and the outputs of free length among all."""
        counted = cls(numbers)
        counted.free = [replace(one, name=str(number)) for number, one in free.items()]
        return counted

    def matched(
        self, outputs: Sequence[_Array], reference: Sequence[_Array]
    ) -> tuple[Sequence[_Array], Sequence[_Array]]:
        """Both with the rows of outputs of free length beside their partners."""
        got, wanted = (
            {str(number): array for number, array in enumerate(arrays)}
            for arrays in (outputs, reference)
        )
        pairs = matched(self.free, got, wanted)
        return [*pairs.got.values()], [*pairs.wanted.values()]


Slices: TypeAlias = Mapping[int, tuple[Slice, ...]]
"""The slices by which outputs are compared, by the output's number."""


def output_slices(
    reference: Sequence[_Array],
    counted: Collection[int] | None = None,
    axis: int | None = None,
) -> Slices:
    """The slices of each float output of ``reference``, once for all that is compared with it.

    ``counted`` are the outputs to look at; None for all. ``axis`` is the axis of the slices;
    None to find them.
    """
    if isinstance(counted, Counted):
        _, reference = counted.matched(reference, reference)
    return {
        number: slices_of(array, axis)
        for number, array in enumerate(reference)
        if is_float(array) and (counted is None or number in counted)
    }


def squared_errors(
    outputs: Sequence[_Array],
    reference: Sequence[_Array],
    counted: Collection[int] | None = None,
    slices: Slices | None = None,
) -> dict[tuple[int, Slice], float]:
    """||y - r||^2 / ||r||^2 of each slice of each float output; inf where y is NaN or Inf.

    Keys are the output's number and the slice. An output whose shape depends on computed
    numbers and differs from the reference's is left out; if all differ they have 1, all lost.
    ``counted`` are the outputs to look at; None for all that hold floats. Of others it is the
    squared share of numbers that differ. ``slices`` are those of ``reference``, where many
    outputs are compared with it.
    """
    slices = output_slices(reference, counted) if slices is None else slices
    errors: dict[tuple[int, Slice], float] = {}
    lost: list[tuple[int, Slice]] = []
    if isinstance(counted, Counted):
        outputs, reference = counted.matched(outputs, reference)
    for number, (got, wanted) in enumerate(zip(outputs, reference, strict=True)):
        wholes = not is_float(wanted)
        ignored = wholes if counted is None else number not in counted
        if ignored or not wanted.size:
            continue
        if got.shape != wanted.shape:
            lost.append((number, WHOLE))
            continue
        if wholes:
            errors[number, WHOLE] = float(np.mean(got != wanted)) ** 2
            continue
        for part in slices.get(number, (WHOLE,)):
            y, r = (widened(part.of(array)) for array in (got, wanted))
            ok = np.isfinite(r)
            norm = float(np.sum(r[ok] ** 2))
            finite = np.isfinite(y[ok]).all()
            difference = float(np.sum((y[ok] - r[ok]) ** 2)) if finite else np.inf
            errors[number, part] = difference / norm if norm else difference
    return errors or dict.fromkeys(lost, 1.0)


def squared_error(
    outputs: Sequence[_Array],
    reference: Sequence[_Array],
    counted: Collection[int] | None = None,
    slices: Slices | None = None,
) -> float:
    """The largest of ``squared_errors``; 0 if there are none."""
    return max(squared_errors(outputs, reference, counted, slices).values(), default=0.0)


def counted_outputs(inputs: Iterable[_Array], outputs: Sequence[_Array]) -> frozenset[int]:
    """Numbers of the float outputs that errors are told of: those that copy no input.

    All float outputs, if each of them copies one.
    """
    given = [x for x in inputs if is_float(x)]
    floats = [number for number, y in enumerate(outputs) if is_float(y)]
    own = [n for n in floats if not any(_copies(x, outputs[n]) for x in given)]
    return frozenset(own or floats)


def _copies(x: _Array, y: _Array) -> bool:
    """Whether most of ``y`` is ``x``: with some elements replaced, or longer or moved on.

    A cache gets new rows at its end, or loses old ones at its start, or has rows written over.
    """
    if x.dtype != y.dtype or x.ndim != y.ndim or not x.ndim or not x.size or not y.size:
        return False
    unlike = [axis for axis in range(x.ndim) if x.shape[axis] != y.shape[axis]]
    power = _power(y)
    if len(unlike) > 1 or not 0 < power < np.inf:
        return False
    least = _MOSTLY * power
    if not unlike and _shared_power(x, y) >= least:
        return True
    return any(
        _moved_power(np.moveaxis(x, axis, 0), np.moveaxis(y, axis, 0)) >= least
        for axis in unlike or range(x.ndim)
    )


def _moved_power(x: _Array, y: _Array) -> float:
    """Power of the rows of ``y`` that are rows of ``x`` in their order, at either end of y."""
    rows = tuple(range(1, x.ndim))
    starts = np.flatnonzero((x == y[0]).all(axis=rows))
    start = int(starts[0]) if len(starts) else len(x)
    front = min(len(x) - start, len(y))
    back = min(len(x), len(y))
    return max(
        _shared_power(x[start : start + front], y[:front]),
        _shared_power(x[:back], y[len(y) - back :]),
    )


def _shared_power(x: _Array, y: _Array) -> float:
    """Power of the elements of ``y`` that equal those of ``x``."""
    return _power(y[x == y])


def _power(array: _Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sum(np.square(widened(array))))


# Runs the model with the given rounding points switched on, and returns its outputs.
Probe = Callable[[NDArray[np.bool_]], Sequence[NDArray[np.generic]]]


# The squared error of outputs of which nothing is left: it is as large as they are.
_LOST: Final = 1.0
# Infinite and larger errors count as this, so that they stay comparable.
_WORST: Final = 1e6
# A group that brings at most this share of the error of all groups is not split. Of 160 groups
# most do; what is wrong within one of them moves a plan's error by 1.5% at most.
_NEGLIGIBLE: Final = 0.03
# A group of weights is not split if it brings at most this share of the error of all values
# but the worst ones. Those may stay high, and then what other points bring decides.
_MINOR: Final = 0.25
_WORST_VALUES: Final = 0.25
# Fewer weights than this are probed one by one.
_FEW: Final = 9
# Up to this many points each is probed on its own; beyond, in groups first. A group is split
# into so many parts: the one bad point of 32 takes ten probes.
_PROBE_EACH: Final = 160
_PARTS: Final = 4
MOST_PROBES: Final = 4 * _PROBE_EACH
"""The most runs for single points, so that time grows with the ops and not with their square.
A net of 5,000 ops took 510 and 640. With half of that its weights, of which one in a hundred
makes two thirds of the error, were not told apart."""
_MOST_OF_VALUES: Final = 3 * MOST_PROBES // 4
# Values with several readers whose points are probed together, too: those of most error, of
# at least this share of all single errors. A difference below ``_COMMON`` of the points' sum
# counts as none: it is mostly the noise of few samples, and the solver is faster without.
_MOST_SHARED: Final = 32
_SHARED_COUNTS: Final = 0.01
_COMMON: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Squared relative output error by rounding point and by unit of weights.

    ``shared`` is, for each entry of ``RoundingPoints.shared``, the error of its points
    together less the sum of their single errors: negative where they cancel. ``total`` is the
    error of all points at once. ``probes`` counts the runs of the model. ``is_even`` says that
    ``total`` alone was measured, and is shared out over the points.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    shared: NDArray[np.float64]
    total: float = 0.0
    probes: int = 0
    is_even: bool = False

    @classmethod
    def zero(cls, points: RoundingPoints) -> Sensitivity:
        """Zero errors, where none were measured."""
        return cls(
            values=np.zeros(len(points.points)),
            weights=np.zeros(len(points.weights)),
            shared=np.zeros(len(points.shared)),
        )

    @classmethod
    def even(cls, points: RoundingPoints, total: float) -> Sensitivity:
        """Errors that add up to ``total``, the same at each point, where that is enough."""
        zero = cls.zero(points)
        each = total / max(len(zero.values) + len(zero.weights), 1)
        return replace(
            zero,
            values=zero.values + each,
            weights=zero.weights + each,
            total=total,
            is_even=True,
        )

    def fits(self, points: RoundingPoints) -> bool:
        """Whether there is an error for each of ``points``."""
        mine = (self.values, self.weights, self.shared)
        theirs = (points.points, points.weights, points.shared)
        return [*map(len, mine)] == [*map(len, theirs)]

    @property
    def added(self) -> float:
        """The sum of all single errors, and of what values with several readers change."""
        return float(self.values.sum() + self.weights.sum() + self.shared.sum())

    @property
    def known(self) -> bool:
        """Whether errors were measured and no output was lost, so that they can be scaled."""
        return 0 < self.total < _WORST and 0 < self.added < _WORST

    @property
    def saturation(self) -> Saturation:
        """How the errors add up."""
        return Saturation.through(self.added, self.total) if self.known else Saturation()

    def scaled(self, factor: float) -> Sensitivity:
        """All single errors times ``factor``."""
        return replace(
            self,
            values=self.values * factor,
            weights=self.weights * factor,
            shared=self.shared * factor,
        )

    def toward(self, total: float | None) -> Sensitivity:
        """The errors scaled to ``total``, measured on more samples; as they are without it.

        ``total`` is the squared error of a model that rounds at all points. What exceeds the
        outputs themselves is not scaled to: a few points lose them there, and how much they
        are off says nothing of the other points.
        """
        if total is None or not (0 < self.total < _WORST and 0 < total < _WORST):
            return self
        factor = min(total, _LOST) / min(self.total, _LOST)
        return replace(self.scaled(factor), total=total)

    @property
    def shares(self) -> NDArray[np.float64]:
        """The errors of values, scaled so that those of all points add up to ``total``."""
        return self.values * (self.total / self.added if self.known else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """How squared errors that were measured one by one add up: ``x / (1 + rate * x)``.

    ``x`` is the sum of the single errors. Few small errors are independent and add up. Many
    cause less than their sum where outputs saturate. Correlated errors cause more: then
    ``rate`` is negative, and the divisor is never less than ``least``.
    """

    rate: float = 0.0
    least: float = 0.0

    @classmethod
    def through(cls, added: float, total: float) -> Saturation:
        """The saturation by which errors of sum ``added`` cause ``total`` together."""
        rate = 1 / total - 1 / added
        return cls(rate=rate, least=added / total if rate < 0 else 0.0)

    def together(self, added: float) -> float:
        """The squared error of roundings whose single errors have the sum ``added``.

        Round-off may leave the sum of errors that cancel a little below 0: that is none.
        """
        if not math.isfinite(added):
            return added
        added = max(added, 0.0)
        return added / max(1 + self.rate * added, self.least)

    def relative(self, added: float) -> float:
        """The root of ``together``: the error of such roundings."""
        return math.sqrt(self.together(added))

    def apart(self, error: float) -> float:
        """Inverse of ``together``: the sum of single errors; inf if none causes ``error``."""
        if not math.isfinite(error):
            return error
        divisor = 1 - self.rate * error
        return max(error / divisor, error * self.least) if divisor > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """Which outputs probes compare, and who is told of them.

    Attributes:
        counted: Numbers of the outputs that errors are of; None for all.
        axis: The axis of their slices; None to find them.
        on_probe: Called with the numbers of runs done and expected.
    """

    counted: Collection[int] | None = None
    axis: int | None = None
    on_probe: Callable[[int, int], None] | None = None


_OF_ALL: Final = ProbeOptions()


def measure(
    values: int,
    probe: Probe,
    *,
    weights: int = 0,
    shared: Sequence[Sequence[int]] = (),
    most: int | None = None,
    probing: ProbeOptions = _OF_ALL,
) -> Sensitivity:
    """Probe every rounding point, in groups where there are many.

    With ``most`` the group of the largest error is split until so many runs are used up; what
    the others cause is shared out evenly within each, and what points have in common is not
    looked for.

    Args:
        values: Points at which values are rounded.
        probe: Runs the model on some samples; its argument has a bool for each of these
            points, then for each unit of weights.
        weights: Number of units whose weights are rounded.
        shared: Points that one op may round together, by their numbers.
        most: The most runs, to find the points of the largest errors; None to find all errors.
        probing: Which outputs are compared, and who is told.
    """
    prober = _Prober(probe, values + weights, probing)
    errors = prober.errors(values) if most is None else prober.largest(most)
    return Sensitivity(
        values=errors[:values],
        weights=errors[values:],
        shared=np.zeros(len(shared)) if most else prober.differences(errors, shared),
        total=prober.together,
        probes=prober.done,
    )


# Points with the error that they cause together.
_Groups: TypeAlias = list[tuple[NDArray[np.int64], float]]


def _negligible(groups: _Groups) -> float:
    """The error of a group that is negligible beside that of all."""
    return _NEGLIGIBLE * sum(error for _, error in groups)


class _Prober:
    """Runs the probes and counts them; ``together`` is the error of all points at once."""

    def __init__(self, probe: Probe, count: int, probing: ProbeOptions) -> None:
        self.count = count
        self.probing = probing
        self.done = 0
        self.probe = probe
        self.reference = probe(np.zeros(count, dtype=bool))
        self.slices = output_slices(self.reference, probing.counted, probing.axis)
        self.together = self.error(np.arange(count))

    def error(self, members: NDArray[np.int64]) -> float:
        switch = np.zeros(self.count, dtype=bool)
        switch[members] = True
        counted = self.probing.counted
        squared = squared_error(self.probe(switch), self.reference, counted, self.slices)
        self.done += 1
        if self.probing.on_probe is not None:
            self.probing.on_probe(self.done, max(self.done, min(self.count, _PROBE_EACH)))
        return min(squared, _WORST)

    def errors(self, values: int) -> NDArray[np.float64]:
        """The error of each point; the first ``values`` of them are those of values."""
        size = max(1, -(-self.count // _PROBE_EACH))
        weights = self.count - values
        beside = values > 0 and weights >= _FEW
        # Groups come first: a probe may have loaded a session of all points by now.
        large = max(size, math.isqrt(weights)) if beside else size
        grouped = self._in_groups(np.arange(values, self.count), large)
        found = self._in_groups(np.arange(values), size)
        alone = self._split(found, _negligible(found), _MOST_OF_VALUES)
        least = _negligible(grouped)
        if beside:
            most = max(1, round((1 - _WORST_VALUES) * values))
            least = _MINOR * float(np.sort(alone[:values])[:most].sum())
        return alone + self._split(grouped, least, MOST_PROBES)

    def largest(self, most: int) -> NDArray[np.float64]:
        """The error of each point by at most ``most`` runs, those of large errors alone."""
        size = 1 if self.count < most else -(-2 * self.count // most)
        groups = self._in_groups(np.arange(self.count), size)
        while any(len(members) > 1 for members, _ in groups):
            groups.sort(key=lambda group: (len(group[0]) == 1, -group[1]))
            members = groups[0][0]
            parts = min(_PARTS, len(members))
            if self.done - 1 + parts > most:
                break
            groups[:1] = self._in_groups(members, -(-len(members) // parts))
        return self._shared_out(groups)

    def _in_groups(self, members: NDArray[np.int64], size: int) -> _Groups:
        """Groups of at most ``size`` members, each with its error."""
        groups = np.array_split(members, -(-len(members) // size)) if len(members) else []
        return [(group, self.error(group)) for group in groups]

    def _split(self, groups: _Groups, least: float, most: int) -> NDArray[np.float64]:
        """The error of each point; 0 of points that are in no group.

        Groups of more than ``least`` error are split again and again, with at most ``most``
        runs in all: those of the largest errors then. Each round takes them in their order,
        as neighbours are probed in one session.
        """
        while True:
            large = [g for g in groups if len(g[0]) > 1 and g[1] > least]
            large = sorted(large, key=lambda g: -g[1])[: max(most - self.done, 0) // _PARTS]
            if not large:
                return self._shared_out(groups)
            split = {int(members[0]) for members, _ in large}
            groups = [
                part
                for members, error in groups
                for part in (
                    self._in_groups(members, -(-len(members) // _PARTS))
                    if int(members[0]) in split
                    else [(members, error)]
                )
            ]

    def _shared_out(self, groups: _Groups) -> NDArray[np.float64]:
        """The error of each point: the members of a group share its error evenly."""
        errors = np.zeros(self.count)
        for members, error in groups:
            errors[members] = error / len(members)
        return errors

    def differences(
        self, errors: NDArray[np.float64], shared: Sequence[Sequence[int]]
    ) -> NDArray[np.float64]:
        """The error of the points of each of ``shared`` together, less their sum.

        Zero where it is not probed: where the sum is small, or lost an output by itself.
        """
        alone = np.array([errors[list(points)].sum() for points in shared])
        excess = np.zeros(len(shared))
        least = _SHARED_COUNTS * errors.sum()
        for number in np.argsort(-alone, kind="stable")[:_MOST_SHARED]:
            if not least < alone[number] < _WORST:
                continue
            more = self.error(np.array(shared[number])) - alone[number]
            if abs(more) >= _COMMON * alone[number]:
                excess[number] = more
        return excess
