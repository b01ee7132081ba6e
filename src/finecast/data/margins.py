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
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.data.samples import Floats

# Samples next to the border among which margins are taken to lie evenly.
_EVEN: Final = 30
# What a model of margins leaves out: shifts of samples differ in size.
_BIAS: Final = 0.1
# The weakest belief in a slope, so that the regression of few samples has an answer.
_WEAK: Final = (0.5, 0.05)
# Newton's steps of the regression, which needs some six.
_STEPS: Final = 25
# The least that a changed decision is taken to lose: nothing would say that any change may be.
_LEAST_WORTH: Final = 0.02
# The least share of the loss by the margins that a count may correct it to.
_LEAST_LEFT: Final = 0.2
# The largest deviation of what a changed decision loses, relative to that.
_MOST_OFF: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """How far decisions are from changing, what it costs if they change, and how they move.

    Attributes:
        sizes: float64[n], by how much fp32's decision is apart from another one; rising.
        even: So many of the smallest sizes are taken to lie evenly between 0 and the next one.
        worth: float64[n], what is expected to be lost if it changes, from -1 to 1.
        moves: float64[m], by how much a model moves margins, to both sides; rising.
        samples: All samples, those whose decisions cannot change among them.
        deviation: The deviation of the expected loss, relative to it.
    """

    sizes: Floats
    even: int
    worth: Floats
    moves: Floats
    samples: int
    deviation: float

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
        moved = (low[known] - exact[known])[order][: max(len(signed) // 2, _EVEN)]
        sizes, worth, spread = np.abs(signed), np.ones(len(signed)), 0.0
        if (signed < 0).any():
            worth, spread = _worth(sizes, signed > 0)
        return cls(
            sizes=sizes,
            even=min(_EVEN, len(sizes) // 3),
            worth=worth,
            moves=np.sort(np.concatenate([moved, -moved])),
            samples=len(exact),
            deviation=float(np.sqrt(1 / _EVEN + _BIAS**2 + spread**2)),
        )

    def scaled(self, scale: float) -> Margins:
        """Those of a model that moves each margin so many times as far; more than 0."""
        return replace(self, moves=scale * self.moves)

    def changed(self) -> Floats:
        """The chance that each decision changes."""
        chances: Floats = np.searchsorted(self.moves, -self.sizes, side="left") / len(
            self.moves
        )
        reach = float(self.sizes[self.even])
        if self.even and reach > 0:
            chances[: self.even] = float(np.clip(-self.moves, 0.0, reach).mean()) / reach
        return chances

    def loss(self, counted: float) -> tuple[float, float]:
        """The expected loss on other data, and its deviation, where ``counted`` was lost here.

        Margins and count are weighed by how well either is known.
        """
        changed = self.changed()
        soft = float(changed @ self.worth) / self.samples
        noise = float(np.sqrt(changed.sum())) / self.samples  # of a count on these samples
        own = soft * self.deviation
        if not own or not noise:
            return soft, noise
        weight = own**2 / (own**2 + noise**2)
        both = max(soft + weight * (counted - soft), _LEAST_LEFT * soft)
        return both, own * float(np.sqrt(1 - weight))


def _worth(sizes: Floats, right: NDArray[np.bool_]) -> tuple[Floats, float]:
    """What is lost if a decision of each margin changes, and how far that may be off.

    A decision with the right class at its border is right, and wrong afterwards, or the other
    way round. Returns float64[n], and a deviation relative to what the smallest margins lose.
    """
    terms = np.stack([np.ones(len(sizes)), sizes / (float(sizes.mean()) or 1.0)], axis=1)
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
    worth = np.maximum(2 * _logistic(terms @ slope) - 1, _LEAST_WORTH)
    return worth, min(float(off) / max(2 * chance - 1, 0.1), _MOST_OFF)


def _logistic(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -30, 30)))
