"""Plans are chosen on one half of the samples, and certified on the other half.

Law: with probability ``confidence`` over data sets drawn anew, no plan that ``certified``
returns loses more accuracy on the population than the criterion allows, however many plans
were tried. For that the plans are tested in an order that the second half had no part in, the
most accurate first, and testing ends with the first plan that fails (A. Angelopoulos et al.,
"Learn then test", arXiv 2110.01052, section 3.2: fixed sequence testing).

The samples have to be drawn from the population independently, or in clusters that are: then
whole clusters go to either half and are drawn anew. The loss that a relative
tolerance allows is that share of the fp32 model's metric on these data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from finecast.data.certificates import (
    Certificate,
    certify,
    check_confidence,
    provable_loss,
    samples_needed,
)
from finecast.data.criterion import Criterion
from finecast.data.metrics import Score
from finecast.data.samples import Indices, Samples
from finecast.errors import UsageError

_LEAST_SAMPLES: Final = 20
"""With fewer samples in either half the bounds hold too rarely to be called certificates."""


@dataclass(frozen=True, kw_only=True)
class Certifier:
    """Judges plans by the criterion on one half of the samples, certifies on the other.

    Attributes:
        criterion: What may be lost, with a confidence.
        baseline: The fp32 model's score.
        groups: The number of each sample's cluster; None where each is drawn by itself.

    Raises:
        UsageError: If the score has no samples, or too few, or clusters of others.
    """

    criterion: Criterion
    baseline: Score
    groups: Indices | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be certified."""
        check_confidence(self.confidence)
        if not self.baseline.samples:
            raise UsageError(
                "the metric cannot be certified: it is one number, of no sample by itself",
                where="--confidence",
                fix="return an array with a value for each sample from the --eval function;"
                " or use a built-in metric (max_abs has no bound)",
            )
        count = next(iter(self.baseline.samples.values())).count
        if self.groups is not None and len(self.groups) != count:
            raise UsageError(
                f"{len(self.groups)} samples have a cluster, and the metric is of {count}",
                where="--groups",
                fix="give an array with an entry for each sample of the metric",
            )
        if self._count < 2 * _LEAST_SAMPLES:
            raise UsageError(
                f"{self._count} {self._words} are too few to choose a plan on one half and to"
                " certify it on the other",
                where="--confidence",
                fix=f"give at least {2 * _LEAST_SAMPLES}",
            )

    @property
    def confidence(self) -> float:
        """That of the criterion; NaN if it has none."""
        found = self.criterion.confidence
        return math.nan if found is None else found

    @property
    def allowed_loss(self) -> float:
        """What may be lost; of a metric without a finite best value its negated target."""
        target = self.criterion.target(self.baseline)
        if math.isinf(self.baseline):
            return -target
        return abs(self.baseline - target)

    @property
    def expectation(self) -> str:
        """What so many samples can prove, as it is told before the search."""
        held = self._count - self._count // 2
        least = provable_loss(held, self.confidence)
        text = f"{held} {self._words} certify, {self._count // 2} choose"
        if self.groups is not None or any(
            one.decisions() is None for one in self.baseline.samples.values()
        ):
            return text
        text += f": they prove a loss of {least:.2g} or more, if 2% of decisions differ"
        if self.allowed_loss >= least or not self.allowed_loss:
            return text
        needed = samples_needed(self.allowed_loss, self.confidence)
        return (
            f"{text}; for the {self.allowed_loss:.2g} allowed give about {2 * needed} in all"
        )

    def passes(self, score: Score) -> bool:
        """Whether every output meets the criterion on the half on which plans are chosen."""
        chosen = self._halves[0]
        pairs = ((one, self.baseline.samples[name]) for name, one in score.samples.items())
        return all(
            self.criterion.passes(low.part(chosen).value(), exact.part(chosen).value())
            for low, exact in pairs
        )

    def certificate(self, score: Score) -> Certificate:
        """The bound on the loss of the output that may have lost most."""
        held = self._halves[1]
        groups = None
        if self.groups is not None:
            groups = np.unique(self.groups[held], return_inverse=True)[1]

        def drawn(samples: Samples) -> Samples:
            """What is drawn by itself of the half that certifies."""
            part = samples.part(held)
            return part if groups is None else part.grouped(groups)

        found = (
            certify(
                None if math.isinf(self.baseline) else drawn(self.baseline.samples[name]),
                drawn(low),
                higher_is_better=self.criterion.higher_is_better,
                confidence=self.confidence,
            )
            for name, low in score.samples.items()
        )
        return max(found, key=lambda one: one.bound)

    def certified(
        self, scores: Mapping[str, Score], order: Sequence[str]
    ) -> dict[str, Certificate]:
        """The certificates of plans, in this order, up to the first that allows too much.

        That one is the last of the dictionary; ``holds`` tells it.
        """
        found: dict[str, Certificate] = {}
        for name in order:
            found[name] = self.certificate(scores[name])
            if not self.holds(found[name]):
                break
        return found

    def holds(self, certificate: Certificate) -> bool:
        """Whether the loss is proven to be no more than the criterion allows."""
        return certificate.bound <= self.allowed_loss

    def why_not(self, certificate: Certificate) -> str:
        """Text: what is not proven, and how many samples may prove it."""
        text = f"{certificate}, where {self.allowed_loss:.3g} may be: it is not proven"
        spread = certificate.bound - certificate.loss
        room = self.allowed_loss - certificate.loss
        if not (0 < room < spread < math.inf):
            return text
        # The distance of bound and loss shrinks with the root of the number of samples.
        needed = math.ceil(self._count * (spread / room) ** 2)
        return f"{text}; about {needed} {self._words} in all may prove it"

    @property
    def _words(self) -> str:
        return "samples" if self.groups is None else "clusters of samples"

    @property
    def _count(self) -> int:
        """What is drawn by itself: the samples, or the clusters."""
        if self.groups is not None:
            return int(self.groups.max()) + 1
        return next(iter(self.baseline.samples.values())).count

    @cached_property
    def _halves(self) -> tuple[Indices, Indices]:
        """The samples that choose, and those that certify: drawn, as data are often sorted."""
        mixed = np.random.default_rng(0).permutation(self._count)
        halves = mixed[: self._count // 2], mixed[self._count // 2 :]
        first, second = map(np.sort, halves)
        if self.groups is None:
            return first, second
        chooses = np.isin(self.groups, first)
        return np.flatnonzero(chooses), np.flatnonzero(~chooses)


def certifier_of(
    criterion: Criterion, baseline: float, groups: Indices | None = None
) -> Certifier | None:
    """What certifies by the criterion; None if it has no confidence.

    Args:
        criterion: What may be lost.
        baseline: The fp32 model's score.
        groups: The number of each sample's cluster, if samples were drawn in clusters.

    Raises:
        UsageError: If the baseline's metric cannot be certified, or clusters have no use.
    """
    if criterion.confidence is None:
        if groups is not None:
            raise UsageError(
                "clusters count for a certificate alone, and none is asked for",
                where="--groups",
                fix="give --confidence too, or leave it out",
            )
        return None
    score = baseline if isinstance(baseline, Score) else Score(baseline)
    return Certifier(criterion=criterion, baseline=score, groups=groups)
