"""What a count of changed decisions will be on other data, by the margins of decisions.

A decision changes where its margin is smaller than what a plan moves it by. Few samples
have small margins, so a count of the decisions that did change is known half as well as what
all margins and all moves tell: of 120 samples with a true share of 3% the count is off by 1.65
points, the margins by .85 (ResNet-20 with rounded weights). What a changed decision loses is
not known better by the labels of the few samples next to their border, either: a logistic
regression of being right on the margin of all samples tells it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.data.samples import Floats

# The share of the samples, those of the smallest margins, by which the density is estimated.
_NEAR: Final = 0.75
# By how much the log density may fall from the border to the farthest of these margins.
_SLOPES: Final = np.linspace(-8.0, 8.0, 160)  # none of them is 0
# So many moves, those of the smallest margins, are looked at at least.
_LEAST_MOVES: Final = 30
# A slope that is as good as none, by which one may divide.
_EVEN: Final = 1e-9
# What a model of margins leaves out: of 27 models of five nets, whose moves lean to one side,
# the expected loss is off by so much in the mean over many draws of samples.
_BIAS: Final = 0.15
# The weakest belief in a slope, so that the regression of few samples has an answer.
_WEAK: Final = (0.5, 0.05)
# Newton's steps of the regression, which needs some six.
_STEPS: Final = 25
# The least that a changed decision is taken to lose: nothing would say that any change may be.
_LEAST_WORTH: Final = 0.02
# The least share of the loss by the margins that a count may correct it to.
_LEAST_LEFT: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Density:
    """How densely margins lie next to the border of a decision: an exponential function.

    Attributes:
        reach: Up to which margin it holds; 0 if it is not known.
        at_border: Samples for each unit of the margin, at a margin of 0.
        slope: By how much its logarithm falls for each unit of the margin; not 0.
        deviation: The deviation of ``at_border``, relative to it.
    """

    reach: float
    at_border: float
    slope: float
    deviation: float

    @classmethod
    def of(cls, sizes: Floats) -> Density:
        """That of margins which rise, by the mean over slopes.

        Before any margin is seen, to rise is as likely as to fall, and a factor of e between
        the border and the reach is one deviation.
        """
        near = int(_NEAR * len(sizes))
        reach = float(sizes[near])
        if not near or not reach:
            return cls(reach=0.0, at_border=0.0, slope=1.0, deviation=1.0)
        likelihood = np.log(_at_border(_SLOPES)) - _SLOPES * float(sizes[:near].mean()) / reach
        log_belief = near * likelihood - _SLOPES**2 / 2
        belief = np.exp(log_belief - log_belief.max())
        belief /= belief.sum()
        slope = float(belief @ _SLOPES) or _EVEN
        at_border = float(_at_border(slope))
        variance = float(belief @ (_at_border(_SLOPES) / at_border - 1) ** 2)
        return cls(
            reach=reach,
            at_border=at_border * near / reach,
            slope=slope / reach,
            deviation=float(np.sqrt(variance + 1 / near)),
        )

    def within(self, moves: Floats) -> Floats:
        """How many samples have a margin below each of the moves, of those within reach."""
        below = -np.expm1(-self.slope * np.minimum(moves, self.reach))
        return self.at_border / self.slope * below


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How far decisions are from changing, what it costs if they change, and how they move.

    Attributes:
        sizes: float64[n], by how much fp32's decision is apart from another one; rising.
        density: That of the smallest of them.
        rightness: The coefficients of the logistic regression of being right on the size.
        moves: float64[m], by how much a model moves margins, to both sides; rising.
        samples: All samples, those whose decisions cannot change among them.
        worth_off: The deviation of what a decision loses that changes at its border.
    """

    sizes: Floats
    density: Density
    rightness: tuple[float, float]
    moves: Floats
    samples: int
    worth_off: float

    @classmethod
    def of(cls, exact: Floats, low: Floats) -> Margins | None:
        """From margins by sample: the right class' score less the largest other one.

        Args:
            exact: Those of fp32; negative where it is wrong.
            low: Those of the model.

        Returns:
            None if no decision has a finite margin.
        """
        known = np.isfinite(exact) & np.isfinite(low)
        if np.count_nonzero(known) < 2:
            return None
        order = np.argsort(np.abs(exact[known]))
        signed = exact[known][order]
        moved = (low[known] - exact[known])[order][: max(len(signed) // 2, _LEAST_MOVES)]
        sizes, rightness, worth_off = np.abs(signed), (np.inf, 0.0), 0.0
        if (signed < 0).any():
            rightness, worth_off = _rightness(sizes, signed > 0)
        return cls(
            sizes=sizes,
            density=Density.of(sizes),
            rightness=rightness,
            moves=np.sort(np.concatenate([moved, -moved])),
            samples=len(exact),
            worth_off=worth_off,
        )

    def scaled(self, scale: float) -> Margins:
        """Those of a model that moves each margin so many times as far; more than 0."""
        return replace(self, moves=scale * self.moves)

    def expected(self) -> tuple[float, float]:
        """How many decisions are expected to change, and how many right ones that loses."""
        reach = self.density.reach
        towards = np.maximum(-self.moves, 0.0)
        near = self.density.within(towards) / len(towards)
        far = self.sizes[self.sizes >= reach]
        beyond = np.searchsorted(self.moves, -far, side="left") / len(self.moves)
        lost = near @ self._worth(np.minimum(towards, reach) / 2) + beyond @ self._worth(far)
        return float(near.sum() + beyond.sum()), float(lost)

    def _worth(self, sizes: Floats) -> Floats:
        """What is expected to be lost if decisions of such margins change, from -1 to 1.

        A decision with the right class at its border is right, and wrong afterwards, or the
        other way round.
        """
        border, slope = self.rightness
        return np.maximum(2 * _logistic(border + slope * sizes) - 1, _LEAST_WORTH)

    def loss(self, counted: float) -> tuple[float, float]:
        """The expected loss on other data, and its deviation, where ``counted`` was lost here.

        Margins and count are weighed by how well either is known.
        """
        changed, lost = self.expected()
        soft = lost / self.samples
        noise = float(np.sqrt(changed)) / self.samples  # of a count on these samples
        relative = float(np.hypot(self.density.deviation, _BIAS))
        own = float(np.hypot(soft * relative, changed / self.samples * self.worth_off))
        if not own or not noise:
            return soft, noise
        weight = own**2 / (own**2 + noise**2)
        both = max(soft + weight * (counted - soft), _LEAST_LEFT * soft)
        return both, own * float(np.sqrt(1 - weight))


def _rightness(sizes: Floats, right: NDArray[np.bool_]) -> tuple[tuple[float, float], float]:
    """The logistic regression of being right on the margin's size, and how far it may be off.

    Returns the coefficients, and the deviation of what the smallest margins lose if they
    change.
    """
    mean = float(sizes.mean()) or 1.0
    terms = np.stack([np.ones(len(sizes)), sizes / mean], axis=1)
    weak, slope, curvature = np.array(_WEAK), np.zeros(2), np.eye(2)
    for _ in range(_STEPS):
        chance = _logistic(terms @ slope)
        curvature = (terms.T * (chance * (1 - chance))) @ terms + np.diag(weak)
        step = np.linalg.solve(curvature, terms.T @ (right - chance) - weak * slope)
        slope = slope + step
        if np.abs(step).max() < 1e-8:
            break
    nearest = terms[: max(len(sizes) // 20, 1)].mean(axis=0)
    chance = float(_logistic(nearest @ slope))
    off = 2 * chance * (1 - chance) * np.sqrt(nearest @ np.linalg.solve(curvature, nearest))
    return (float(slope[0]), float(slope[1]) / mean), float(off)


def _at_border(slope: Any) -> Any:
    """An exponential density on [0, 1] at 0, by how much its logarithm falls to 1; not 0."""
    return slope / -np.expm1(-slope)


def _logistic(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))
