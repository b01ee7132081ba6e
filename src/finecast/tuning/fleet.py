"""Chooses the plans of a fleet: by prices which are tried, by evaluations which are kept.

Laws: a plan is kept only if it keeps the criterion on every kind of machine that a process
here can run as. Of those that were evaluated the one is chosen that loses least on the kind
where it loses most. A plan with a certificate has one on each of these kinds, and was tested
after the more accurate ones of them. A plan is false only if it is false on some kind, so that
no test is corrected for the number of kinds (an intersection-union test).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from finecast.data.certificates import Certificate
from finecast.data.criterion import Criterion
from finecast.data.metrics import Score
from finecast.errors import EngineError, UsageError
from finecast.native.subject import Built
from finecast.planning.fleet import Fleet, Serving
from finecast.planning.plan import Plan
from finecast.progress import Progress
from finecast.tuning.certifying import Certifier
from finecast.tuning.executor import Executor
from finecast.tuning.goal import Budget

_MOST_KINDS: Final = 6
"""Kinds for which the fewest plans are looked for: more have too many ways to group them."""
_TESTED: Final = 3
"""Plans that keep the criterion, of which the more accurate ones are certified first."""


@dataclass(slots=True, kw_only=True)
class KindJudge:
    """Evaluates plans as on one kind of machine.

    Attributes:
        executor: Evaluates in a process that runs as that machine.
        criterion: What of the accuracy is kept.
        baseline: The metric of fp32 there.
        certifier: Judges on one half of the samples and certifies on the other; None if no
            confidence is asked for.
        metrics: Metrics of plans by digest; NaN of one that does not run there.
        failed: Why such plans do not run.
    """

    executor: Executor
    criterion: Criterion
    baseline: float
    certifier: Certifier | None = None
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    failed: list[str] = field(default_factory=list[str])

    def passes(self, plan: Plan) -> bool:
        """Whether a plan runs there and keeps the criterion."""
        if plan.digest not in self.metrics:
            built = Built(model=None, plan=plan, size_bytes=0)
            try:
                self.metrics[plan.digest] = self.executor.evaluate(built).metric
            except EngineError as error:  # no kernel there for a mix of formats, or it died
                self.metrics[plan.digest] = math.nan
                self.failed.append(error.what)
        metric = self.metrics[plan.digest]
        if self.certifier is not None and isinstance(metric, Score):
            return self.certifier.passes(metric)
        return self.criterion.passes(metric, self.baseline)

    def certificate(self, plan: Plan) -> Certificate | None:
        """That of a plan that was judged; None if none is asked for."""
        metric = self.metrics.get(plan.digest)
        if self.certifier is None or not isinstance(metric, Score):
            return None
        return self.certifier.certificate(metric)


@dataclass(slots=True, kw_only=True)
class Choosing:
    """Chooses the plans of a fleet.

    Attributes:
        fleet: The kinds with their prices.
        judges: Those of the kinds that a process here can run as, by name.
        budget: What the search may cost.
        progress: Told of each plan that is judged.
    """

    fleet: Fleet
    judges: Mapping[str, KindJudge]
    budget: Budget
    progress: Progress
    _judged: set[str] = field(init=False, default_factory=set[str])
    _found: dict[frozenset[str], Serving] = field(
        init=False, default_factory=dict[frozenset[str], Serving]
    )

    def chosen(self, within: float | None) -> list[Serving]:
        """One plan for all kinds, or as few as let no kind lose more than ``within``."""
        names = frozenset(self.fleet.kinds)
        if within is None:
            return [self.serving(names)]
        if len(names) > _MOST_KINDS:
            raise UsageError(
                f"{len(names)} kinds of machines can be grouped in too many ways",
                where="--within",
                fix=f"give at most {_MOST_KINDS} at once, or leave it out for one plan",
            )
        while True:
            groups = self._fewest(names, within)
            fresh = [group for group in groups if group not in self._found]
            if not fresh:
                return [self._found[group] for group in groups]
            for group in fresh:
                self.serving(group)

    def serving(self, names: frozenset[str]) -> Serving:
        """The plan for these kinds that loses least of those that keep the criterion."""
        if names not in self._found:
            passed = list(self._passing(names))
            held = self._certified(passed, names)
            self._found[names] = min(held, key=lambda one: one.worst)
        return self._found[names]

    def why_fp32(self, names: frozenset[str]) -> str:
        """Why no plan was chosen for these kinds that lowers an op."""
        if not any(self.fleet.kinds[name].best for name in names):
            return "fp32 is the own best plan of each kind"
        ranked = [one.proposal.plan for one in self.fleet.servings(names)]
        faster = [*takewhile(lambda plan: plan.lowers, ranked)]
        if not faster:
            return "any lower plan known loses at least as much on some kind"
        tried, judges = [p for p in faster if p.digest in self._judged], self._judging(names)
        if any(all(judge.passes(plan) for judge in judges) for plan in tried):
            return "no lower plan is proven to keep the accuracy asked for on each kind"
        limit = self.budget.spent(len(self._judged)) if len(tried) < len(faster) else ""
        kept = "no lower plan that was tried keeps the accuracy asked for on each kind"
        return f"{kept}, and {limit}" if limit else kept

    @property
    def evaluations(self) -> int:
        """Evaluations on all data."""
        return sum(1 + len(judge.metrics) for judge in self.judges.values())

    def _judging(self, names: frozenset[str]) -> list[KindJudge]:
        """The judges of these kinds; where none of them can be run here, all others."""
        own = [judge for name, judge in self.judges.items() if name in names]
        return own or [*self.judges.values()]

    def _passing(self, names: frozenset[str]) -> Iterator[Serving]:
        """Plans that keep the criterion, the least worst loss first; fp32 is the last.

        The first is enough, unless it has to be certified.
        """
        judges, passed = self._judging(names), 0
        wanted = _TESTED if any(j.certifier for j in judges) else 1
        for one in self.fleet.servings(names):
            plan = one.proposal.plan
            if not plan.lowers:
                yield one
                return
            if passed >= wanted or self.budget.spent(len(self._judged | {plan.digest}) - 1):
                continue
            self._judged.add(plan.digest)
            self.progress(f"evaluation of {one.proposal.name}", passed, wanted)
            if all(judge.passes(plan) for judge in judges):
                passed += 1
                yield one

    def _certified(
        self, passed: Sequence[Serving], names: frozenset[str]
    ) -> Sequence[Serving]:
        """Those that are proven on each kind, tested from the most accurate one on."""
        judges = [j for j in self._judging(names) if j.certifier is not None]
        held: list[Serving] = []
        for one in sorted(passed, key=lambda one: one.proposal.error):
            plan = one.proposal.plan
            found = [(j.certifier, j.certificate(plan)) for j in judges] if plan.lowers else []
            if not all(by and bound and by.holds(bound) for by, bound in found):
                break
            held.append(one)
        return held or [one for one in passed if not one.proposal.plan.lowers]

    def _fewest(self, names: frozenset[str], within: float) -> Sequence[frozenset[str]]:
        """The fewest groups of which each loses at most ``within``, by what is known."""

        def worst(group: frozenset[str]) -> float:
            found = self._found.get(group) or self.fleet.servings(group)[0]
            return found.worst if len(group) > 1 else -math.inf  # alone it has its own best

        def fits(group: frozenset[str]) -> bool:
            pairs = (frozenset((a, b)) for a in group for b in group if a < b)
            return all(worst(pair) <= within for pair in pairs) and worst(group) <= within

        return min(
            groupings(sorted(names), fits),
            key=lambda groups: (len(groups), max(map(worst, groups))),
        )


def groupings(
    names: Sequence[str], fits: Callable[[frozenset[str]], bool]
) -> Iterator[list[frozenset[str]]]:
    """All ways to put names into groups that fit, but single names, which always do."""
    if not names:
        yield []
        return
    first, *rest = names
    for groups in groupings(rest, fits):
        yield [frozenset((first,)), *groups]
        for at, group in enumerate(groups):
            joined = group | {first}
            if fits(joined):
                yield [joined, *groups[:at], *groups[at + 1 :]]
