"""The search: the measurement that is worth most, until none is worth its time.

Plans are known by what is predicted of them. What is measured of some tells of the others
(``tuning/belief.py``). The expected gain of a plan is what it saves over the best one so far,
times the probability that it keeps the criterion. The plan of the largest expected gain is
raced beside fp32, and then evaluated on all data. After each evaluation plans are
proposed of the error that is now expected to be allowed. Where no plan's gain is worth a
measurement, other proposers are asked (``tuning/proposers.py``). Any of these can be left
out, and the result is still right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from finecast.data.metrics import Score
from finecast.measure.racing import INTERVAL
from finecast.measure.timing import now_s
from finecast.naming import listed, number_of
from finecast.numbers.thresholds import MODELLED_GAIN
from finecast.planning.problem import Analysis, Proposal
from finecast.planning.proposing import near, near_alone, sharpened, stated
from finecast.progress import Detail
from finecast.tuning.belief import Belief, Estimate
from finecast.tuning.findings import SearchStep
from finecast.tuning.models import PlanModels
from finecast.tuning.search import Candidate, undecided

# The expected logarithm of a ratio of costs for which a plan is measured: a gain that counts.
_WORTH: Final = math.log(MODELLED_GAIN)
TRIALS: Final = 3
"""Evaluations that are enough where one plan passed. After these a plan has to be worth 5%;
after as many more as are made where none passed, the search ends."""
_TRIALS_WITHOUT: Final = 5
_MUCH_WORTH: Final = 0.05
# Chances to pass of the plans that are proposed after each evaluation.
_CHANCES: Final = (0.9, 0.75, 0.5, 0.25)
_DOES_NOT_RUN: Final = "the engine does not run it as planned"


@dataclass(slots=True, kw_only=True)
class Loop:
    """One search among the plans of an analysis.

    Attributes:
        models: Builds, races and evaluates plans.
        belief: What is believed of plans.
        least_gain: The ratio by which a plan has to be faster than the best one. Of two plans
            within it the more accurate one is measured.
        probe: Proposes plans by runs that measure errors, after each evaluation; None where
            such a run takes as much as an evaluation.
        proposers: What else may propose plans, in the order in which they are asked.
        start: A plan that is tried first; None for none.
        sharpen: Measures the errors of single ops, and gives what is predicted by these, and
            plans, or None if the engine does not run such probes; None where they are known.
        guesses: Plans as they might be then, of which the cost counts alone.
        more_trials: So many more are worth it, as on devices on which plans can be probed.
        pool: All proposals by the plan's digest.
        journal: What was done, and why.
    """

    models: PlanModels
    belief: Belief
    least_gain: float
    probe: Proposer | None = None
    proposers: Sequence[Proposer] = ()
    start: Proposal | None = None
    sharpen: Callable[[], tuple[Analysis, Sequence[Proposal]] | None] | None = None
    guesses: Sequence[Proposal] = ()
    more_trials: int = 0
    pool: dict[str, Proposal] = field(default_factory=dict[str, Proposal])
    journal: list[SearchStep] = field(default_factory=list[SearchStep])
    _timed: set[str] = field(init=False, default_factory=set[str])
    _asked: int = field(init=False, default=0)
    # Why the plan to measure next is the next one.
    _why: SearchStep = field(init=False, default_factory=lambda: SearchStep(what=""))

    def add(self, proposals: Iterable[Proposal]) -> None:
        """Let plans be chosen."""
        for one in proposals:
            if one.plan.lowers:
                self.pool.setdefault(one.plan.digest, one)

    def run(self) -> Candidate | None:
        """The fastest plan known that keeps the criterion; None if there is none.

        Law: it was evaluated in this run, and gains what was asked for.
        """
        trials, models = self.models.trials, self.models
        self._note(SearchStep(what="fp32", result=trials.asked))
        self._take_costs()
        self._propose_near()
        while True:
            missed = any(not trial.passed for trial in trials.tried.values())
            if missed and self._is_worth_sharpening():
                self._sharpen("as a plan missed")
            elif (plan := self._next()) is not None:
                self._measure(plan)
            elif self._is_worth_sharpening():
                self._sharpen("as no plan is worth a measurement by what is known")
            elif self._may_go_on() and self._asked < len(self.proposers):
                self._ask_next()
            else:
                best = self.best
                if best is None or trials.confirms(best, models.evaluate):
                    plan = "" if best is None else best.name
                    self._note(SearchStep(what="end", plan=plan, result=self._why_no_more))
                    return best

    def _ask_next(self) -> None:
        """Let the next proposer propose plans."""
        self._asked += 1
        self._ask(self.proposers[self._asked - 1], "more plans")

    def _ask(self, proposer: Proposer, what: str) -> None:
        """Let a proposer propose plans; ``what`` is the step in the journal."""
        start, known = now_s(), {*self.pool}
        self.add(proposer(self))
        if names := [p.name for digest, p in self.pool.items() if digest not in known]:
            result = listed(names, 3, "; ")
            self._note(SearchStep(what=what, seconds=now_s() - start, result=result))

    @property
    def _why_no_more(self) -> str:
        """Why nothing more is measured."""
        trials = self.models.trials
        if not trials.may_go_on():
            return trials.spent
        if not self._may_go_on():
            passed = self.best is not None
            if trials.budget.goal.first_is_enough and passed:
                return "the first plan that passes is enough"
            count = len(trials.tried)
            return (
                f"{count} plans were evaluated, of which {'some' if passed else 'none'} pass"
            )
        plans = self._unmeasured
        if not plans:
            return "all plans that are known were measured"
        estimate = self.belief.of(plans)
        best = int(estimate.gain(self._log_limit).argmax())
        next_best, timed = self._reason(plans, estimate, best), self._is_timed(plans[best])
        return (
            f"no other plan is worth more than {self._worth:.2g}. The best of them,"
            f" {next_best.plan}, {'timed' if timed else 'not timed'}, is {next_best.reason}"
        )

    def _reason(
        self, plans: Sequence[Proposal], estimate: Estimate, number: int
    ) -> SearchStep:
        """What is expected of a plan, as a step of the journal that is yet to be made."""
        share = math.exp(float(estimate.cost[number]) - self._log_best)
        return SearchStep(
            what="",
            plan=plans[number].name,
            worth=float(estimate.gain(self._log_limit)[number]),
            gain=1 - share,
            gain_off=share * float(estimate.cost_off[number]),
            chance=float(estimate.passes[number]),
        )

    @property
    def _unmeasured(self) -> list[Proposal]:
        """The plans that were not evaluated, and can be."""
        tried, dropped = self.models.trials.tried, self.models.dropped
        return [p for d, p in self.pool.items() if d not in tried and d not in dropped]

    def _is_worth_sharpening(self) -> bool:
        """Whether a plan may be faster than the best one by more than a trial is worth."""
        if self.sharpen is None or not self._may_go_on():
            return False
        fastest = self.belief.of([*self.pool.values(), *self.guesses]).cost.min()
        return self._log_limit - float(fastest) >= self._worth

    def _sharpen(self, why: str) -> None:
        """Measure the errors of single ops, and propose plans by them."""
        assert self.sharpen is not None
        start, before = now_s(), self.belief.analysis
        measured, self.sharpen = self.sharpen(), None
        if measured is None:
            return
        analysis, proposals = measured
        sharper = partial(sharpened, self.belief.planner, before, analysis)
        self.models.sharpen(analysis)
        self.belief = self.belief.sharpened(analysis, sharper)
        self.pool = {digest: sharper(one) for digest, one in self.pool.items()}
        self.add(proposals)
        self._propose_near()
        self._note(SearchStep(what="errors of ops", seconds=now_s() - start, result=why))

    @property
    def best(self) -> Candidate | None:
        """The fastest plan that passed and gains what was asked for."""
        passed = [
            c
            for c in self.models.candidates
            if self.models.trials.has_passed(c) and c.cost < self._most_cost
        ]
        return min(passed, key=lambda c: c.cost, default=None)

    @property
    def limit(self) -> float:
        """The predicted cost below which a plan may be faster than the best one."""
        best = self.best
        if best is None:
            return math.inf
        return self.belief.predicted(best.proposal) / self.least_gain

    @property
    def _most_cost(self) -> float:
        """The cost below which a plan gains enough over fp32."""
        fp32 = self.models.fp32
        return math.inf if fp32 is None else fp32 / self.models.min_speedup

    def _may_go_on(self) -> bool:
        """Whether the budget lasts, and the search has not tried as much as is worth it."""
        trials = self.models.trials
        goal = trials.budget.goal
        if not trials.may_go_on():
            return False
        if goal.first_is_enough and self.best is not None:
            return False
        return goal.goes_on or self._trials_left > TRIALS - _TRIALS_WITHOUT

    @property
    def _trials_left(self) -> int:
        """How many evaluations are left until enough plans were tried; below 0: too many."""
        most = _TRIALS_WITHOUT if self.best is None else TRIALS
        return most + self.more_trials - len(self.models.trials.tried)

    def _next(self) -> Proposal | None:
        """The plan to measure next; None if none is worth it."""
        if not self._may_go_on():
            return None
        plans, tried = self._unmeasured, self.models.trials.tried
        if not plans:
            return None
        estimate, limit = self.belief.of(plans), self._log_limit
        gains, hopes = (estimate.gain(limit, least) for least in (0.0, 1.0))
        if self.start is not None:
            start, self.start = self.start, None
            number = plans.index(start) if start in plans else None
            if number is not None and estimate.cost[number] < limit:
                self.start = None if self._is_timed(start) else start
                self._why = self._reason(plans, estimate, number)
                return start
        if gains.max() >= self._worth:
            best = int(gains.argmax())
        elif self.sharpen is None and self._hopes and hopes.max() >= self._worth:
            best = int(np.where(hopes >= self._worth, estimate.passes, -1.0).argmax())
        elif tried or self.models.candidates:
            return None
        else:  # so that it is known that nothing gains
            best = int(hopes.argmax())
        finest = self._finest(plans, estimate, best)
        instead_of = "" if finest == best else plans[best].name
        self._why = replace(self._reason(plans, estimate, finest), instead_of=instead_of)
        return plans[finest]

    def _finest(self, plans: Sequence[Proposal], estimate: Estimate, best: int) -> int:
        """The most accurate of the plans that are known as well as ``best``, and as fast.

        It gains, too, if ``best`` does.
        """
        timed, cost = self._is_timed(plans[best]), float(estimate.cost[best])
        most = cost + math.log(self.least_gain)
        if cost < self._log_limit:
            most = min(most, self._log_limit)
        alike = [
            i
            for i, one in enumerate(plans)
            if estimate.cost[i] <= most and self._is_timed(one) == timed
        ]
        return min(alike, key=lambda i: (plans[i].error, i != best))

    @property
    def _hopes(self) -> bool:
        """Whether too little was tried to be sure that nothing passes."""
        return self.best is None and len(self.models.trials.tried) < TRIALS

    @property
    def _worth(self) -> float:
        """The expected gain for which a plan is measured; within a budget, any."""
        if self.models.trials.budget.goal.goes_on:
            return 1e-6
        return _WORTH if self._trials_left > 0 else _MUCH_WORTH

    @property
    def _log_limit(self) -> float:
        """The logarithm of the cost over fp32's below which a plan is better than the best."""
        if self.best is None:
            return -math.log(self.models.trials.budget.goal.min_speedup)
        return self._log_best - math.log(self.least_gain)

    @property
    def _log_best(self) -> float:
        """The logarithm of the best plan's cost over fp32's; of fp32's if none passed."""
        best, fp32 = self.best, self.models.fp32
        return 0.0 if best is None or fp32 is None else math.log(best.cost / fp32)

    def _is_timed(self, proposal: Proposal) -> bool:
        return proposal.plan.digest in self._timed

    def _measure(self, plan: Proposal) -> None:
        """Race a plan that has no time yet; evaluate one that has."""
        start = now_s()
        if self.models.predicting or self._is_timed(plan):
            what, result = "evaluation", self._evaluate(plan)
        else:
            what, result = "race", self.race([plan])
        self._note(replace(self._why, what=what, seconds=now_s() - start, result=result))
        if what == "evaluation" and self.probe is not None and self._may_go_on():
            self._ask(self.probe, "probes")

    def _note(self, step: SearchStep) -> None:
        """Keep a step in the journal, and report it."""
        self.journal.append(step)
        self.models.progress(Detail(step.text), len(self.journal), len(self.journal))

    def race(self, plans: Sequence[Proposal]) -> str:
        """Race plans beside fp32; gives what that told."""
        candidates = self.models.rank(plans)
        self.pool |= {c.plan.digest: c.proposal for c in candidates}
        # The engine may lack kernels for a mix of formats, or for it with many requests.
        timed = {c.plan.digest for c in candidates}
        refused = [p for p in plans if p.plan.digest not in timed]
        self.models.dropped |= {p.plan.digest for p in refused}
        self.add(one for p in refused for one in self._without_unfit(p))
        if not timed:
            return _DOES_NOT_RUN
        self._take_costs()
        if self.models.errors_are_cheap:
            for one in candidates:
                self.belief.erred(one.proposal, self.models.error(one) ** 2)
        fp32, names = self.models.fp32 or math.nan, {p.name for p in plans}
        hinted = any(c.plan.by_hint for c in candidates)
        forms = [
            _form(c.name, names) or (" by casts" if hinted and not c.plan.by_hint else "")
            for c in candidates
        ]
        speeds = [f"x{fp32 / c.cost:.3g}" for c in candidates]
        return ", ".join(map(str.__add__, speeds, forms))

    def _without_unfit(self, refused: Proposal) -> Sequence[Proposal]:
        """The plan with its ops in fp32 that the engine did not run as planned, if it told."""
        built = self.models.built.get(refused.plan.digest)
        if built is None or not built.unfit:
            return ()
        planner, analysis = self.belief.planner, self.belief.analysis
        plan = refused.plan
        formats = {
            node.id: plan.formats[node.name]
            for node in planner.graph.nodes
            if node.name in plan.formats and node.name not in built.unfit
        }
        name = f"{refused.name}, {number_of(len(built.unfit), 'op')} in fp32"
        return (stated(planner, analysis, formats, name),)

    def _evaluate(self, proposal: Proposal) -> str:
        models, digest = self.models, proposal.plan.digest
        known = {c.plan.digest: c for c in models.candidates}
        if models.predicting and digest not in known:
            known |= {c.plan.digest: c for c in models.rank([proposal])}
            self.pool |= {d: c.proposal for d, c in known.items()}
        candidate = known.get(digest)
        if candidate is None:  # it does not run
            models.dropped.add(digest)
            return _DOES_NOT_RUN
        trials = models.trials
        passed = trials.passes(candidate, models.evaluate)
        metric = trials.metric(candidate.plan)
        margins = (
            next(iter(metric.margins.values()), None) if isinstance(metric, Score) else None
        )
        self.belief.tried(
            candidate.proposal, *trials.log_loss(trials.deciding(digest)), margins
        )
        kept = [c for c in models.candidates if trials.has_passed(c)]
        models.keep(*undecided(models.candidates), *kept)
        self._asked = 0
        self._propose_near()
        return f"{metric:.6g}, {'passes' if passed else 'misses'}"

    def _take_costs(self) -> None:
        """Let the belief know the costs of plans that were raced."""
        fp32 = self.models.fp32
        for one in self.models.candidates:
            digest = one.plan.digest
            if one.timed and digest not in self._timed and fp32 is not None:
                self._timed.add(digest)
                self.pool[digest] = one.proposal
                self.belief.measured(
                    one.proposal, one.cost / fp32, one.spread / INTERVAL + 1e-4
                )

    def _propose_near(self) -> None:
        """Propose the fastest plans that are expected to pass with several chances."""
        if self.sharpen is not None:
            return
        errors = self.belief.allowed(_CHANCES)
        shares = [math.sqrt(error / errors[-1]) for error in errors]
        planner, analysis = self.belief.planner, self.belief.analysis
        for proposing in (near, near_alone):
            self.add(proposing(planner, analysis, errors[-1], shares[::-1]))


def _form(name: str, plans: Collection[str]) -> str:
    """In which of a plan's forms a model is stated, as its name says it behind the plan's."""
    forms = (name.removeprefix(plan) for plan in plans if name.startswith(plan))
    return min(forms, key=len, default="").replace(",", "", 1)


Proposer: TypeAlias = Callable[[Loop], Iterable[Proposal]]
"""Proposes plans where none of those known is worth a measurement."""
