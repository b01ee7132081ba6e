"""Candidates: plans with what is known of their costs and errors, and which of them count.

Candidates that another one beats in both cost and predicted error are not chosen. The others
form a chain in which a faster plan is less accurate. "Faster" means of less cost, whatever the
objective counts: latency, time under load, or bytes. Of plans that count as equally fast the
most accurate is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from finecast.native.gains import Gain, bias_gain, no_adjustments, range_gain
from finecast.native.subject import Examined
from finecast.numbers.thresholds import SAME_TIME
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.plugin import title_of
from finecast.rules.policy import Adjust, Policy
from finecast.tuning.goal import MIN_SPEEDUP
from finecast.tuning.measuring import Measuring


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that may be chosen.

    Attributes:
        name: Its name in reports.
        plan: The plan.
        error: Its predicted squared output error.
        cost: What the search minimises: by default the latency.
        latency_s: The time of a call.
        casts: Casts in its model.
        spread: Relative uncertainty of ``cost``.
        predicted_cost: The cost by the analysis; infinite if none was predicted.
        timed: Whether ``cost`` and ``latency_s`` were measured; else they are predicted.
    """

    name: str
    plan: Plan
    error: float
    cost: float
    latency_s: float
    casts: int
    spread: float = 0.0
    predicted_cost: float = math.inf
    timed: bool = True

    @property
    def least(self) -> float:
        """Lower bound of the cost, given its spread."""
        return self.cost * (1 - self.spread)

    @property
    def most(self) -> float:
        """Upper bound of the cost, given its spread."""
        return self.cost * (1 + self.spread)

    @property
    def proposal(self) -> Proposal:
        """The plan as it was proposed, with its predicted cost and error."""
        return Proposal(
            name=self.name, plan=self.plan, time_s=self.predicted_cost, error=self.error
        )


# Whether a candidate counts as equally fast as one of less cost, which comes first.
SameTime = Callable[[Candidate, Candidate], bool]


def same_time(fast: Candidate, other: Candidate) -> bool:
    """Whether the costs are within ``SAME_TIME`` of one another."""
    return other.cost <= fast.cost * SAME_TIME


def worth_timing(
    proposals: Sequence[Proposal], min_speedup: float = MIN_SPEEDUP
) -> list[Proposal]:
    """Proposals that are predicted to gain at least half of the speedup asked for.

    To time any other one would take a conversion, a load and part of every round, and
    predictions are rarely that far off.

    Args:
        proposals: Those of a frontier; the slowest one changes least.
        min_speedup: The speedup asked for.
    """
    exact_s = max((p.time_s for p in proposals), default=0.0)
    least = (1 + min_speedup) / 2
    return [p for p in proposals if p.time_s * least <= exact_s]


def chain(
    candidates: Sequence[Candidate],
    baseline: float,
    min_speedup: float = MIN_SPEEDUP,
    same: SameTime = same_time,
    finer: float = 1.0,
) -> list[Candidate]:
    """Candidates that gain enough over the baseline and that no other beats, fastest first.

    A slower one counts as more accurate if its squared error is below ``finer`` times the
    other's.
    """
    kept: list[Candidate] = []
    fastest: Candidate | None = None  # of those that count as equally fast as kept[-1]
    for candidate in sorted(candidates, key=lambda c: (c.cost, c.error)):
        if candidate.cost * min_speedup >= baseline:
            continue
        if kept and candidate.error >= finer * kept[-1].error:
            continue
        # Equally fast as the one before and more accurate: it takes that one's place.
        if fastest is not None and same(fastest, candidate):
            kept[-1] = candidate
            continue
        fastest = candidate
        kept.append(candidate)
    return kept


def undecided(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Candidates that no other one beats in both cost and error beyond the costs' spread."""
    return [
        candidate
        for candidate in candidates
        if not any(c.most < candidate.least and c.error <= candidate.error for c in candidates)
    ]


def rivals(candidates: Sequence[Candidate], fastest: Candidate) -> list[Candidate]:
    """Candidates that may turn out better than ``fastest`` when costs are known better.

    Within the spread of the costs they may be faster by more than ``SAME_TIME``, or equally
    fast and more accurate. Where costs have no spread there are none.

    Args:
        candidates: All that may be chosen.
        fastest: The one of the least cost so far.
    """
    contenders: list[Candidate] = []
    for candidate in candidates:
        if candidate is fastest:
            continue
        if candidate.error < fastest.error:
            is_open = candidate.least <= fastest.most * SAME_TIME
        else:
            is_open = candidate.least * SAME_TIME < fastest.most
        if is_open and (candidate.spread or fastest.spread):
            contenders.append(candidate)
    return contenders


def none_passes(
    tried: int,
    proposed: int,
    target: float,
    *,
    reused: int = 0,
    spent: str = "",
    resumable: bool = False,
    by_half: bool = False,
) -> str:
    """Text for the user where no plan passed.

    Args:
        tried: Number of plans that were evaluated.
        proposed: Number of all plans: most are not evaluated, as they are not fast or, by
            their predicted errors, not accurate enough.
        target: The metric to reach.
        reused: How many of the trials an earlier run made.
        spent: The limit that ended the search; empty if none did.
        resumable: Whether a study keeps the trials, so that a later run goes on from here.
        by_half: Whether plans are judged on the samples that choose alone.
    """
    if not tried:
        return f"no plan was tried (your limit is {target:.6g})"
    plans = "the one plan" if tried == 1 else f"none of the {tried} plans"
    missed = "is not" if tried == 1 else "is"
    note = f" ({reused} remembered by the study)" if reused else ""
    where = ", on the samples that choose" if by_half else ""
    why = f"{plans} tried{note} {missed} within your limit ({target:.6g}{where})"
    rest = proposed - tried
    if rest > 0:
        why += f"; {rest} more were not tried: "
        why += spent or "by time and predicted error they promised less"
        if spent and resumable:
            why += "; --resume goes on from here, with a larger limit"
    elif spent:
        why += f"; {spent}"
    return why


# ---------------------------- corrected biases, tried where a faster plan misses the criterion


@dataclass(slots=True, kw_only=True)
class Corrections:
    """The plans of one search whose biases were corrected.

    ``before`` has the plan before by the digest of each; ``wanted`` says whether the policy
    lets biases be corrected.
    """

    measuring: Measuring
    examined: Examined
    wanted: bool = True
    before: dict[str, Plan] = field(default_factory=dict[str, Plan])

    @classmethod
    def of(cls, measuring: Measuring, examined: Examined, policy: Policy) -> Corrections:
        """As ``policy`` asks for; where it does not say, they are wanted.

        Raises:
            UsageError: If the policy asks for them, and the model's operands cannot be
                adjusted.
        """
        asked = policy.adjust
        if asked and Adjust.BIAS in asked and Adjust.BIAS not in examined.adjusts:
            raise no_adjustments(
                Adjust.BIAS, f"to run in {title_of(measuring.subject.runner)}"
            )
        wanted = asked is None or Adjust.BIAS in asked
        return cls(measuring=measuring, examined=examined, wanted=wanted)

    def gain(self, plan: Plan) -> Gain | None:
        """What they do to ``plan``, measured; None if nothing can be corrected."""
        if not self.wanted or Adjust.BIAS not in self.examined.adjusts:
            return None
        return bias_gain(plan, self.examined.corrected, self.measuring.plan_error)

    def proposals(self, wanted: Sequence[Proposal], gain: Gain) -> list[Proposal]:
        """``wanted`` with corrected biases, their errors scaled by the same ``gain``."""
        proposals: list[Proposal] = []
        for proposal in wanted:
            plan = self.examined.corrected(proposal.plan)
            self.before[plan.digest] = proposal.plan
            name, error = f"{proposal.name}, biases corrected", gain.share * proposal.error
            proposals.append(replace(proposal, name=name, plan=plan, error=error))
        return proposals

    def restated(self, plan: Plan, others: Iterable[Plan]) -> None:
        """Say that ``others`` are ``plan`` stated in another way, with its corrections."""
        if plan.digest in self.before:
            self.before |= {other.digest: self.before[plan.digest] for other in others}

    def gained(self, plan: Plan) -> tuple[Gain, ...]:
        """What scaled ranges and corrected biases of ``plan`` do, measured, if it has some."""
        gains = [range_gain(plan, self.examined.rounded_error)]
        if (before := self.before.get(plan.digest)) is not None:
            error = self.measuring.plan_error
            gains.append(bias_gain(before, self.examined.corrected, error))
        return tuple(filter(None, gains))
