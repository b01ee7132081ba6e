"""What each rounding does to the output: squared relative errors that add up.

Roundings are independent to first order, so the squared errors of a plan's rounding points
add up to the plan's (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019), until they saturate. Many points are probed in groups first: a group whose
error is negligible is not probed point by point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format
from finecast.planning.points import RoundingPoints

# Outputs of the model with the given points switched on.
Probe = Callable[[NDArray[np.bool_]], Sequence[NDArray[np.generic]]]


# An infinite error must stay comparable: as bad as losing the output many times over.
_WORST: Final = 1e6
# A group that brings less than this share of the largest group's error is not split.
_NEGLIGIBLE: Final = 1e-3
# Up to this many points each is probed on its own; beyond, in groups first.
_PROBE_EACH: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Squared relative output error by rounding point and by unit of weights.

    ``total`` is the error of all points at once: on the samples of the probes, or on more that
    of the model that rounds at all of them, where it was run. On few samples errors are known
    to some ten percent, and all are scaled alike. ``probes`` counts the runs of the model.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    total: float = 0.0
    probes: int = 0

    @classmethod
    def zero(cls, points: RoundingPoints) -> Sensitivity:
        """No error anywhere, where none was measured."""
        return cls(values=np.zeros(len(points.points)), weights=np.zeros(len(points.weights)))

    @property
    def added(self) -> float:
        """The sum of all single errors."""
        return float(self.values.sum() + self.weights.sum())

    @property
    def known(self) -> bool:
        """Whether anything was measured, and no output broken by it."""
        return 0 < self.total < _WORST and 0 < self.added < _WORST

    @property
    def saturation(self) -> Saturation:
        """How the errors add up."""
        return Saturation.through(self.added, self.total) if self.known else Saturation()

    def scaled(self, factor: float) -> Sensitivity:
        """All single errors times ``factor``."""
        return replace(self, values=self.values * factor, weights=self.weights * factor)

    @property
    def shares(self) -> NDArray[np.float64]:
        """The errors of values, scaled so that those of all points add up to ``total``."""
        return self.values * (self.total / self.added if self.known else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """How squared errors that were measured one by one add up: ``x / (1 + rate * x)``.

    Few small errors have nothing to do with one another and add up. Where an output saturates,
    many bring less than their sum. Where they push it the same way they bring more: the rate
    is negative, and the divisor never less than ``least``.
    """

    rate: float = 0.0
    least: float = 0.0

    @classmethod
    def through(cls, added: float, total: float) -> Saturation:
        """By errors that add up to ``added``, and bring ``total`` together."""
        rate = 1 / total - 1 / added
        return cls(rate=rate, least=added / total if rate < 0 else 0.0)

    def together(self, added: float) -> float:
        """The squared error of roundings whose single ones add up to ``added``."""
        if not math.isfinite(added):
            return added
        return added / max(1 + self.rate * added, self.least)

    def apart(self, error: float) -> float:
        """What the single errors add up to that bring ``error``: infinite beyond all."""
        if not math.isfinite(error):
            return error
        divisor = 1 - self.rate * error
        return max(error / divisor, error * self.least) if divisor > 0 else math.inf


def joined(
    found: Mapping[Format, Sensitivity],
) -> tuple[Saturation, dict[Format, Sensitivity]]:
    """One saturation for plans of several formats, and single errors that fit it.

    It is that of the format whose roundings bring the most. The others' errors are scaled so
    that, by it, all of a format's roundings bring what was measured.
    """
    known = [s for s in found.values() if s.known]
    if not known:
        return Saturation(), dict(found)
    most = max(known, key=lambda s: s.total)
    saturation = most.saturation
    return saturation, {
        fmt: s.scaled(saturation.apart(s.total) / s.added) if s.known else s
        for fmt, s in found.items()
    }


def squared_error(
    outputs: Sequence[NDArray[np.generic]], reference: Sequence[NDArray[np.generic]]
) -> float:
    """Mean over float outputs of ||y - r||^2 / ||r||^2; inf where y is NaN or Inf.

    An output whose shape follows from the numbers is left out where it has another one; if
    all have, nothing is left of what was wanted: 1.
    """
    errors: list[float] = []
    lost = False
    for got, wanted in zip(outputs, reference, strict=True):
        if wanted.dtype.kind != "f" or not wanted.size:
            continue
        if got.shape != wanted.shape:
            lost = True
            continue
        y, r = got.astype(np.float64), wanted.astype(np.float64)
        ok = np.isfinite(r)
        norm = float(np.sum(r[ok] ** 2))
        difference = (
            float(np.sum((y[ok] - r[ok]) ** 2)) if np.isfinite(y[ok]).all() else np.inf
        )
        errors.append(difference / norm if norm else difference)
    return float(np.mean(errors)) if errors else float(lost)


def measure(
    values: int,
    probe: Probe,
    *,
    weights: int = 0,
    total: float = math.nan,
    on_probe: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Probe every rounding point, in groups where there are many.

    Args:
        values: Points at which values are rounded.
        probe: Runs the model on some samples with a switch: one element for each of those,
            then for each unit's weights.
        weights: Units whose weights are rounded.
        total: The squared error of a model that rounds at all of them, if one was run.
        on_probe: Told how many runs are done and how many are expected.
    """
    prober = _Prober(probe, values + weights, on_probe)
    errors, together = prober.errors(), prober.together
    if 0 < together < _WORST and 0 < total < _WORST:
        errors *= total / together
        together = total
    return Sensitivity(
        values=errors[:values], weights=errors[values:], total=together, probes=prober.done
    )


class _Prober:
    def __init__(
        self, probe: Probe, count: int, on_probe: Callable[[int, int], None] | None
    ) -> None:
        self.count = count
        self.on_probe = on_probe
        self.done = 0
        self.probe = probe
        self.reference = probe(np.zeros(count, dtype=bool))
        self.together = self.error(np.arange(count))

    def error(self, members: NDArray[np.int64]) -> float:
        switch = np.zeros(self.count, dtype=bool)
        switch[members] = True
        found = squared_error(self.probe(switch), self.reference)
        self.done += 1
        if self.on_probe is not None:
            self.on_probe(self.done, max(self.done, min(self.count, _PROBE_EACH)))
        return min(found, _WORST)

    def errors(self) -> NDArray[np.float64]:
        result = np.zeros(self.count)
        size = max(1, -(-self.count // _PROBE_EACH))
        groups = np.array_split(np.arange(self.count), -(-self.count // size) or 1)
        groups = [g for g in groups if len(g)]
        found = np.array([self.error(g) for g in groups])
        worst = float(found.max()) if len(found) else 0.0
        for group, error in zip(groups, found, strict=True):
            if len(group) == 1 or error <= _NEGLIGIBLE * worst:
                result[group] = error / len(group)
                continue
            for member in group:
                result[member] = self.error(np.array([member]))
        return result
