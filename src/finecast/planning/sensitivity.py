"""What each rounding does to the output: squared relative errors that add up.

Roundings are independent to first order, so the squared errors of a plan's rounding points
add up to the plan's (Higham and Mary, "A new approach to probabilistic rounding error
analysis", 2019). Many points are probed in groups first: a group whose error is
negligible is not probed point by point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.planning.points import RoundingPoints

# Outputs of the model with the given points switched on.
Probe = Callable[[NDArray[np.bool_]], Sequence[NDArray[np.generic]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """Runs of a model on few samples, for points one by one, and on more, for all at once."""

    few: Probe
    more: Probe


# An infinite error must stay comparable: as bad as losing the output many times over.
_WORST: Final = 1e6
# A group that brings less than this share of the largest group's error is not split.
_NEGLIGIBLE: Final = 1e-3
# Up to this many points each is probed on its own; beyond, in groups first.
_PROBE_EACH: Final = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Squared relative output error by rounding point and by unit of weights.

    Measured ones add up to ``total``, the error of all points at once, on more samples where
    there are such: where an output saturates, single errors add up to more than that, and on
    few samples they are known to some ten percent. They are scaled alike. ``probes`` counts
    the runs of the model.
    """

    values: NDArray[np.float64]
    weights: NDArray[np.float64]
    total: float = 0.0
    probes: int = 0

    @classmethod
    def zero(cls, points: RoundingPoints) -> Sensitivity:
        """No error anywhere, where none was measured."""
        return cls(values=np.zeros(len(points.points)), weights=np.zeros(len(points.weights)))


def squared_error(
    outputs: Sequence[NDArray[np.generic]], reference: Sequence[NDArray[np.generic]]
) -> float:
    """Mean over float outputs of ||y - r||^2 / ||r||^2; inf where y is NaN or Inf."""
    errors: list[float] = []
    for got, wanted in zip(outputs, reference, strict=True):
        if wanted.dtype.kind != "f" or not wanted.size:
            continue
        y, r = got.astype(np.float64), wanted.astype(np.float64)
        ok = np.isfinite(r)
        norm = float(np.sum(r[ok] ** 2))
        difference = (
            float(np.sum((y[ok] - r[ok]) ** 2)) if np.isfinite(y[ok]).all() else np.inf
        )
        errors.append(difference / norm if norm else difference)
    return float(np.mean(errors)) if errors else 0.0


def measure(
    values: int,
    probe: Probe | Probes,
    *,
    weights: int = 0,
    on_probe: Callable[[int, int], None] | None = None,
) -> Sensitivity:
    """Probe every rounding point, in groups where there are many.

    Args:
        values: Points at which values are rounded.
        probe: Runs the model on the calibration batch with a switch: one element for each
            of those, then for each unit's weights.
        weights: Units whose weights are rounded.
        on_probe: Told how many runs are done and how many are expected.
    """
    prober = _Prober(probe, values + weights, on_probe)
    errors = prober.errors()
    if errors.sum() > 0 and 0 < prober.total < _WORST:
        errors *= prober.total / errors.sum()
    return Sensitivity(
        values=errors[:values], weights=errors[values:], total=prober.total, probes=prober.done
    )


class _Prober:
    def __init__(
        self,
        probe: Probe | Probes,
        count: int,
        on_probe: Callable[[int, int], None] | None,
    ) -> None:
        self.count = count
        self.on_probe = on_probe
        self.done = 0
        if isinstance(probe, Probes):
            self.use(probe.more)
            self.total = self.error(np.arange(count))
            self.use(probe.few)
        else:
            self.use(probe)
            self.total = self.error(np.arange(count))

    def use(self, probe: Probe) -> None:
        """Run ``probe`` from now on."""
        self.probe = probe
        self.reference = probe(np.zeros(self.count, dtype=bool))

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
