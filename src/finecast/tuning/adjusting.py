"""Adjustments of operands in a search, tried where a faster plan misses the criterion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from finecast.errors import EngineError
from finecast.native.gains import (
    Gain,
    gaining_kinds,
    measure_gains,
    no_adjustments,
    range_gain,
    share_left,
)
from finecast.native.subject import Examined
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.rules.policy import Adjust, Policy
from finecast.tuning.measuring import Measuring


@dataclass(slots=True, kw_only=True)
class Adjustments:
    """The adjusted plans of one search.

    ``made`` has for the digest of each adjusted plan the plan before and the adjustments,
    ``errors`` the measured errors of plans by digest.
    """

    measuring: Measuring
    examined: Examined
    kinds: Sequence[Adjust]
    made: dict[str, tuple[Plan, Sequence[Adjust]]] = field(
        default_factory=dict[str, tuple[Plan, Sequence[Adjust]]]
    )
    errors: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, measuring: Measuring, examined: Examined, policy: Policy) -> Adjustments:
        """With the kinds of adjustments that ``policy`` names, else all.

        Raises:
            UsageError: If the policy names some, and the model's operands cannot be adjusted.
        """
        asked = tuple(Adjust) if policy.adjust is None else policy.adjust
        kinds = tuple(kind for kind in asked if kind is not Adjust.RANGE)
        for kind in kinds if policy.adjust else ():
            if kind not in examined.adjusts:
                raise no_adjustments(kind, f"to run in {measuring.subject.runner}")
        return cls(measuring=measuring, examined=examined, kinds=kinds)

    def measure(self, plan: Plan) -> tuple[Gain, ...]:
        """What each kind does to ``plan``, measured."""
        if not self.examined.adjusts:
            return ()
        return measure_gains(plan, self.kinds, self.examined.adjusted, self.error)

    def proposals(self, wanted: Sequence[Proposal], found: Sequence[Gain]) -> list[Proposal]:
        """``wanted`` with the adjustments that gain, their errors scaled by the same gain."""
        done, share = gaining_kinds(found), share_left(found)
        proposals: list[Proposal] = []
        for one in wanted:
            plan = self.examined.adjusted(one.plan, done)
            self.made[plan.digest] = (one.plan, done)
            name = f"{one.name}, adjusted by {', '.join(k.value for k in done)}"
            proposals.append(replace(one, name=name, plan=plan, error=share * one.error))
        return proposals

    def gained(self, plan: Plan) -> tuple[Gain, ...]:
        """What each adjustment of ``plan`` gained, measured; nothing if none was made here."""
        ranged = range_gain(plan, self.examined.rounded_error)
        return (*filter(None, [ranged]), *self._gained(plan))

    def _gained(self, plan: Plan) -> tuple[Gain, ...]:
        if plan.digest not in self.made:
            return ()
        before, kinds = self.made[plan.digest]
        steps = (self.examined.adjusted(before, kinds[:i]) for i in range(1, len(kinds) + 1))
        plans = [before, *steps]
        errors = map(self.error, plans)
        pairs = zip(kinds, pairwise(plans), pairwise(errors), strict=True)
        return tuple(Gain.of(kind, both, off) for kind, both, off in pairs)

    def error(self, plan: Plan) -> float:
        """The relative output error of ``plan``; infinite if its model does not run.

        The model runs where a dry run loads it: it is compiled once, and never timed.
        """
        if plan.digest not in self.errors:
            subject = self.measuring.subject
            try:
                session = subject.tried(subject.model.build(plan))
                self.errors[plan.digest] = self.measuring.exact().error(session)
            except EngineError:
                self.errors[plan.digest] = math.inf
        return self.errors[plan.digest]
