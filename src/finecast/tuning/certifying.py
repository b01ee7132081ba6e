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
    CAUTIOUS_BET,
    LEAST_UNBOUNDED,
    TYPICAL_DIFFERENCE,
    Certificate,
    certify,
    check_confidence,
    provable_loss,
    samples_needed,
)
from finecast.data.criterion import Criterion
from finecast.data.metrics import Score
from finecast.data.samples import Indices, Samples
from finecast.data.workload import Workload
from finecast.errors import UsageError
from finecast.naming import percent

_LEAST_SAMPLES: Final = 20
"""With fewer samples in either half a plan is chosen by chance, and no loss under .14 of the
range of scores is proven."""


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
        if math.isinf(self._reach) and self._count < LEAST_UNBOUNDED:
            means = all(one.scores() for one in self.baseline.samples.values())
            stated = "give it by --score-range, as 0:1; or " if means else ""
            raise UsageError(
                f"{self._count} {self._words} prove nothing of a metric without a known range:"
                " some that are seldom may lose any amount",
                where="--confidence",
                fix=f"{stated}give at least {LEAST_UNBOUNDED}",
            )

    @property
    def confidence(self) -> float:
        """That of the criterion; NaN if it has none."""
        confidence = self.criterion.confidence
        return math.nan if confidence is None else confidence

    @property
    def allowed_loss(self) -> float:
        """What may be lost."""
        return self.criterion.allowed_loss(self.baseline)

    @property
    def expectation(self) -> str:
        """What so many samples can prove, as it is told before the search."""
        held = len(self._halves[1])
        halves = f"{self._count - held} {self._words} choose a plan, {held} certify it"
        if math.isinf(self._reach):
            return halves
        if self._of_decisions:
            least = provable_loss(held, self.confidence, TYPICAL_DIFFERENCE)
            seen = f"{percent(TYPICAL_DIFFERENCE)} of predictions change"
        else:
            least = self._reach / CAUTIOUS_BET * provable_loss(held, self.confidence, 0.0)
            seen = "hardly any sample changes"
        can = f"these can guarantee a loss of at most {least:.2g} if {seen}"
        return f"{halves}: {can}{self._advice(TYPICAL_DIFFERENCE)}"

    def _advice(self, differing: float) -> str:
        """Text: how many samples are needed, of a plan that differs on such a share of them.

        Empty where that is not known, or as many are there.
        """
        if math.isinf(self._reach) or not self.allowed_loss:
            return ""
        if self._of_decisions:
            needed = 2 * samples_needed(self.allowed_loss, self.confidence, differing)
        else:
            share = self.allowed_loss / self._reach * CAUTIOUS_BET
            needed = 2 * samples_needed(share, self.confidence, 0.0)
        if needed <= self._count:
            return ""
        return f"; to guarantee {self.allowed_loss:.2g}, give about {needed:,} samples in all"

    def passes(self, score: Score) -> bool:
        """Whether every output meets the criterion on the half on which plans are chosen."""
        chosen = self._halves[0]
        return all(
            self.criterion.passes(
                self._drawn(low).part(chosen).value(),
                self._exact[name].part(chosen).value(),
            )
            for name, low in score.samples.items()
        )

    def chosen(self, score: Score) -> float:
        """The metric of the worst output on the half on which plans are chosen.

        A search may be led by this alone: the other half has to take no part in it.
        """
        if math.isinf(score) or not score.samples:
            return float(score)
        chosen = self._halves[0]
        values = [self._drawn(one).part(chosen).value() for one in score.samples.values()]
        return min(values) if self.criterion.higher_is_better else max(values)

    def certificate(self, score: Score) -> Certificate:
        """The bound on the loss of the output that may have lost most."""
        certificates = (
            certify(
                None if math.isinf(self.baseline) else self._exact[name],
                self._drawn(low),
                self._halves[1],
                higher_is_better=self.criterion.higher_is_better,
                confidence=self.confidence,
            )
            for name, low in score.samples.items()
        )
        return max(certificates, key=lambda one: one.bound)

    def certified(
        self, scores: Mapping[str, Score], order: Sequence[str]
    ) -> dict[str, Certificate]:
        """The certificates of plans, in this order, up to the first that allows too much.

        That one is the last of the dictionary; ``holds`` tells it.
        """
        certificates: dict[str, Certificate] = {}
        for name in order:
            certificates[name] = self.certificate(scores[name])
            if not self.holds(certificates[name]):
                break
        return certificates

    def holds(self, certificate: Certificate) -> bool:
        """Whether the loss is proven to be no more than the criterion allows."""
        return certificate.bound <= self.allowed_loss

    def why_not(self, certificate: Certificate, score: Score) -> str:
        """Text: what is not proven, and how many samples may prove it.

        The number is that of ``expectation``, unless the plan differs on more samples than
        was expected; the text then tells on how many.
        """
        text = f"could not be certified: {certificate}, but {self.allowed_loss:.3g} is allowed"
        differing = self._differing(score)
        advice = self._advice(max(differing, TYPICAL_DIFFERENCE))
        if advice and differing > TYPICAL_DIFFERENCE and self._of_decisions:
            return f"{text}{advice}, as {percent(differing)} of predictions change"
        return f"{text}{advice}"

    def _differing(self, score: Score) -> float:
        """The largest share of decisions in which an output differs; 0 without decisions."""
        pairs = (
            (self._exact[name].decisions(), self._drawn(low).decisions())
            for name, low in score.samples.items()
        )
        return max(
            (float((a != b).mean()) for a, b in pairs if a is not None and b is not None),
            default=0.0,
        )

    def _drawn(self, samples: Samples) -> Samples:
        """Samples, or clusters where there are some, in the range that the user states."""
        stated = self.criterion.score_range
        samples = samples if stated is None else samples.with_range(*stated)
        return samples if self.groups is None else samples.grouped(self.groups)

    @cached_property
    def _exact(self) -> Mapping[str, Samples]:
        """What is drawn of the fp32 model, by output."""
        return {name: self._drawn(one) for name, one in self.baseline.samples.items()}

    @property
    def _of_decisions(self) -> bool:
        return all(one.decisions() is not None for one in self._exact.values())

    @cached_property
    def _reach(self) -> float:
        """The range of scores, times the largest weight of a sample over the mean weight.

        It is what the metric loses by one sample at most, times the number of samples;
        infinite where the range of scores is not known.
        """
        exact_scores = [one.scores() for one in self._exact.values()]
        return max(
            (
                math.inf
                if one is None
                else (one.range[1] - one.range[0])
                * float(one.weights.max() / (one.weights.mean() or math.nan))
                for one in exact_scores
            ),
        )

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
        """What chooses, and what certifies: drawn, as data are often sorted."""
        mixed = np.random.default_rng(0).permutation(self._count)
        halves = mixed[: self._count // 2], mixed[self._count // 2 :]
        return np.sort(halves[0]), np.sort(halves[1])


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


def copies_told(workload: Workload) -> tuple[str, ...]:
    """What is said of samples that no cluster names and whose inputs are equal, if any are."""
    copies = 0 if workload.groups is not None else workload.copies
    if not copies:
        return ()
    told = (
        f"{copies} of {workload.samples} samples have the inputs of one before them, and the"
        " certificate takes each for drawn by itself: if they are copies, it promises too"
        " much: give each once, or name what belongs together by --groups"
    )
    return (told,)
