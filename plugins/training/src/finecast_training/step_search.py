"""The search for a training step: plans by rules and by the solver, compared, then timed.

A plan's gradients and updates are first compared op by op, which takes no compilation of
kernels. The solver gives the fastest plan within an error, which is that of
``torch.autocast`` at first, and is corrected by what was found. Of the plans that are no worse
than autocast the few that are predicted to be fastest are compiled, and measured beside fp32
and compiled autocast: their gradients again, the peak of memory, and the time, by turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import finecast.torch
from finecast import Plan, Policy, Scope
from finecast.errors import UsageError, first_line
from finecast.measure import ANCHOR, Effort, Race
from finecast.naming import percent
from finecast.planning import (
    Analysis,
    Planner,
    frontier_of,
    predicted_cost,
    predicted_error,
    proposal,
    within,
)
from finecast.progress import Progress
from finecast.rules import FINECAST, GUESTS
from finecast_training.backend import Backend, JointGraph, Memory, compiled
from finecast_training.faults import overflow, refusal, stalled
from finecast_training.measures import (
    Exactness,
    StepFigures,
    deviations,
    mean,
    with_digits,
)
from finecast_training.optimizer_states import GRADIENTS, trained_by, wide_states
from finecast_training.replay import Replay, Replayed
from finecast_training.sensitivities import analysed
from finecast_training.step_plan import StepPlan, Way
from finecast_training.target import Call, Gradients, Sample, StepTarget, backward
from finecast_training.training_rules import (
    as_autocast,
    autocast_formats,
    no_lower_than_autocast,
)

# A step that takes so many times as long as autocast's is not timed to the end.
_SLOW: Final = 1.5
_EFFORT: Final = Effort(min_time_s=2.0, settle_s=4.0, known_to=0.01, rounds=9, limit=_SLOW)
# Where these rounds would take more than a share of the time, there are fewer, of long calls.
_TIMED: Final = 0.15
_FEWEST_ROUNDS: Final = 5
# After this share of the time no further plan is compared op by op.
_COMPARING: Final = 0.5
# Plans within this of the fastest count as fast: of those the one of least memory is taken.
_ALIKE: Final = 1.02
# Turns in which the error that the solver may make is corrected, and the factor by which it
# changes at least while only one side of what is allowed is known.
_TURNS: Final = 6
_MORE: Final = 1.3
# The most plans that are compiled, and how many of them have to be as exact as autocast.
_COMPILED: Final = 4
_EXACT: Final = 2
_LARGEST_SCALE: Final = 2.0**16
# A compiled step whose gradients are off by more than so many times as much as those of the
# same step op by op, and by more than fp32's roundings, is computed wrongly: kernels that fuse
# ops round less.
_WRONG: Final = 2.0
_ROUNDED: Final = 1e-4

_BEGINS: Final = (
    ". It may have begun in the forward pass: finecast.blame of a"
    " finecast.torch.TrainingStep names the op"
)
"""Where an overflow begins, which gradients alone cannot tell."""

Steps: TypeAlias = dict[str, Callable[[], object]]
"""Compiled steps by their plans' digests."""


@dataclass(slots=True, kw_only=True)
class StepCandidate:
    """A plan of the step, and what was measured of it.

    Attributes:
        plan: The plan.
        exactness: Gradients and updates, op by op.
        predicted_s: Predicted seconds of forward and backward pass; NaN if not known.
        compiled: Gradients and updates of the compiled step; None if it was not compiled.
        seconds: Median seconds of a compiled step; NaN if it was not timed.
        speed: How many times as fast as compiled autocast, as an interval.
        memory_bytes: Peak of what a step allocates, gradients among it; 0 if not compiled.
        why: Why it was not taken; empty for the one that was.
    """

    plan: StepPlan
    exactness: Exactness
    predicted_s: float = math.nan
    compiled: Exactness | None = None
    seconds: float = math.nan
    speed: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    memory_bytes: int = 0
    why: str = ""

    @property
    def error(self) -> float:
        """The error of the gradients, of the compiled step if there is one."""
        return (self.compiled or self.exactness).error

    def to_dict(self) -> dict[str, Any]:
        """What is known of it, in JSON's types."""
        shown = self.compiled or self.exactness
        return {
            "name": self.plan.name,
            "way": self.plan.way.value,
            "memory": self.plan.memory.value,
            "counts": self.plan.counts,
            "compiled": self.compiled is not None,
            **shown.to_dict(),
            "predicted_s": self.predicted_s,
            "seconds": self.seconds,
            "speed": list(self.speed),
            "memory_bytes": self.memory_bytes,
            "why": self.why,
        }


@dataclass(slots=True, kw_only=True)
class StepSearch:
    """One search.

    Attributes:
        target: The step.
        policy: The formats that plans may have.
        objective: ``time`` or ``memory``.
        max_memory: The most bytes that forward and backward pass may allocate; None for
            those of compiled autocast, or of fp32 where that is faster.
        progress: Told of each plan.
        begin_s: When the search began, by the monotonic clock.
        timeout_s: About how many seconds it may take.
        screened: The most samples on which plans are compared op by op, before those that
            are compiled are compared on all.
        candidates: All plans that were compared, in order.
        notes: What the user should know.
        scale: What losses are multiplied with in low formats.
        graphs: Digests of the step's graphs.
    """

    target: StepTarget
    policy: Policy
    objective: str
    max_memory: int | None
    progress: Progress
    begin_s: float = field(default_factory=time.monotonic)
    timeout_s: float = math.inf
    screened: int = 1 << 30
    candidates: list[StepCandidate] = field(default_factory=list[StepCandidate])
    notes: list[str] = field(default_factory=list[str])
    scale: float = 1.0
    graphs: list[str] = field(default_factory=list[str])
    autocast: StepCandidate = field(init=False)
    fp32: StepCandidate = field(init=False)
    _graphs: dict[str, tuple[Planner, Analysis]] = field(
        default_factory=dict[str, tuple[Planner, Analysis]]
    )
    _no_lower: list[Plan] = field(default_factory=list[Plan])
    _built_s: list[float] = field(default_factory=list[float])
    _called_s: list[float] = field(default_factory=list[float])

    def run(self) -> StepCandidate:
        """The best plan, which may be autocast, or fp32.

        Raises:
            UsageError: If the step fails under autocast or in ``torch.compile``, with which
                plans are compared.
        """
        try:
            self.scale = self._largest_scale()
            self.autocast = self._compare(
                self._plan("torch.autocast", Way.AUTOCAST), samples=self.target.samples
            )
        except RuntimeError as error:
            raise UsageError(
                f"under torch.autocast, with which plans are compared, the step fails:"
                f" {refusal(error)}",
                where="loss",
                fix="make the step work there first: torch.autocast(..., enabled=False) within"
                " it keeps what autocast cannot compute",
            ) from error
        self.fp32 = StepCandidate(
            plan=self._plan("fp32", Way.FP32), exactness=self.target.exact()
        )
        self.candidates.append(self.fp32)
        self.notes += stalled(self.target)
        autocasts = overflow(self.autocast.exactness.gradients)
        if autocasts:
            self.notes.append(f"torch.autocast: {autocasts}{_BEGINS}")
        planned = [c for c in self._planned() if c is not None]
        passing = [c for c in planned if not self._judge(c, self.autocast.exactness)]
        self._measure(passing)
        return self.best()

    def _planned(self) -> Iterator[StepCandidate | None]:
        """Plans compared op by op: first those that are likely to be the fastest."""
        first, *rules = self._rules()
        yield self._by_rules(*first)
        if self._no_lower:
            name = "torch.autocast's, fp32 where faster"
            yield self._attempted(self._plan(name, Way.PLANNED, *self._no_lower))
        yield from self._by_solver()
        for rule in rules:
            if self._is_late():
                return
            yield self._by_rules(*rule)

    @property
    def _left_s(self) -> float:
        return self.begin_s + self.timeout_s - time.monotonic()

    def _is_late(self) -> bool:
        """Whether no further plan is compared op by op; the first time a note says so."""
        late = self._left_s < (1 - _COMPARING) * self.timeout_s
        text = f"some plans were not compared: timeout_s is {self.timeout_s:g}"
        if late and text not in self.notes:
            self.notes.append(text)
        return late

    def _plan(self, name: str, way: Way = Way.PLANNED, *plans: Plan) -> StepPlan:
        scale = self.scale if way is not Way.FP32 else 1.0
        label = self.policy.label
        return StepPlan(name=name, policy=label, way=way, plans=plans, scale=scale)

    def _largest_scale(self) -> float:
        """The largest power of two that keeps autocast's gradients finite; 1 without fp16."""
        if all(f.label != "fp16" for f in self.policy.formats):
            return 1.0
        call = self._plan("", Way.AUTOCAST).compile(self.target.module, kernels=False)
        scale = _LARGEST_SCALE
        while scale > 1.0 and self.target.exactness(call, scale).gradients.broken:
            scale /= 2.0
        return scale

    # -------------------------------------------------------------------- plans op by op

    def _rules(self) -> list[tuple[str, Policy, str]]:
        """Names, policies and sets of rules of plans that no solver makes."""
        rules = [("rules of torch.autocast's", self.policy, FINECAST)]
        stored = tuple(f for f in self.policy.formats if f.encodes_results)
        further = tuple(f for f in self.policy.formats if f not in stored)
        policy = replace(self.policy, formats=stored or further)
        for scope, name in ((Scope.MATMULT, "products"), (Scope.ALL, "all ops")):
            scoped = replace(policy, scope=scope)
            rules.append((f"{name} in reduced precision", scoped, FINECAST))
        if "raf" in GUESTS and len(stored) == 1:
            rules.append(("RAF's rules", policy, "raf"))
        for fmt in further if stored else ():
            scoped = replace(policy, formats=(fmt, *stored), scope=Scope.ALL)
            rules.append((f"products in {fmt.label}", scoped, FINECAST))
        return rules

    def _by_rules(self, name: str, policy: Policy, rule_set: str) -> StepCandidate | None:
        """The plan by a policy; None if rules cannot plan this step, or it fails."""
        record = None if self.graphs else self._recorded
        backend = Backend(policy, rule_set=rule_set, chooser=record, kernels=False)
        call = compiled(self.target.module.forward, backend)
        try:
            self._run(call)
        except RuntimeError as error:
            self.notes.append(f"{name} do not apply: {refusal(error)}")
            return None
        return self._attempted(self._plan(name, Way.PLANNED, *backend.plans), call)

    def _recorded(self, joint: JointGraph) -> Plan:
        """The policy's plan of a graph, whose roundings are analysed, too."""
        self.graphs.append(joint.graph.digest)
        analysis, why = analysed(joint, joint.planner)
        if why:
            self.notes.append(f"errors of single roundings are not known: {why}")
        else:
            self._graphs[joint.graph.digest] = joint.planner, analysis
        restricted = no_lower_than_autocast(joint.planner)
        self._no_lower.append(joint.fastest(restricted, single_kernels=True))
        return joint.fastest(as_autocast(joint.planner))

    def _run(self, call: Call) -> None:
        """Compile ``call`` by running it, forwards and backwards."""
        sample = self.target.samples[0]
        self.target.restore(sample.checkpoint)
        self.target.gradients(call, sample.batch, scale=self.scale)
        self.target.restore(sample.checkpoint)

    def _by_solver(self) -> list[StepCandidate]:
        """The fastest plans within errors around autocast's, each compared before the next."""
        candidates: list[StepCandidate] = []
        if len(self._graphs) != 1:
            return candidates
        ((planner, analysis),) = self._graphs.values()
        graph = planner.graph
        formats = autocast_formats(graph, planner.permissions, self.policy.formats)
        # Of formats that autocast does not have it predicts nothing.
        allowed = predicted_error(analysis, formats) or self.autocast.exactness.error**2
        steps = frontier_of(planner, analysis)
        seen = set[str]()
        kept, missed = 0.0, math.inf  # squared errors of plans that were exact enough, or not
        for _ in range(_TURNS):
            if self._is_late():
                break
            choice = within(planner, analysis, steps, allowed) or max(
                (s for s in steps if s.error <= allowed), key=lambda s: s.error
            )
            own = proposal(planner, analysis, choice)
            name = f"solver, gradients' error {math.sqrt(choice.error):.2g}"
            if own.plan.digest in seen or not own.plan.lowers:
                break
            seen.add(own.plan.digest)
            candidate = self._attempted(self._plan(name, Way.PLANNED, own.plan))
            if candidate is None:
                allowed = choice.error / _MORE**2
                continue
            candidates.append(candidate)
            if not candidate.exactness.beyond(self.autocast.exactness):
                kept = max(kept, allowed, choice.error)
                allowed = _MORE**2 * kept
            else:
                missed = min(missed, choice.error)
                ratio = self.autocast.exactness.error / candidate.exactness.error
                allowed = choice.error * min(ratio**2, 1 / _MORE**2)
            if kept and missed < math.inf:
                allowed = math.sqrt(kept * missed)
        return candidates

    def _compare(
        self,
        plan: StepPlan,
        call: Call | None = None,
        samples: Sequence[Sample] | None = None,
    ) -> StepCandidate:
        """Compare a plan with fp32, op by op, by a call if there is one that computes it."""
        self.progress("compare", len(self.candidates), len(self.candidates) + 1)
        known = {c.plan.digest: c for c in self.candidates}
        if plan.digest in known:
            return known[plan.digest]
        call = call or plan.compile(self.target.module, kernels=False)
        some = self.target.samples[: self.screened] if samples is None else samples
        exactness = self.target.exactness(call, plan.scale, some)
        candidate = StepCandidate(
            plan=plan, exactness=exactness, predicted_s=self._predicted(plan)
        )
        self.candidates.append(candidate)
        return candidate

    def _attempted(self, plan: StepPlan, call: Call | None = None) -> StepCandidate | None:
        """As ``_compare``; None, and a note, for a plan that no kernels compute here."""
        try:
            return self._compare(plan, call)
        except RuntimeError as error:
            self.notes.append(f"{plan.name}: left out, {refusal(error)}")
            return None

    def objection(self, plan: StepPlan) -> str:
        """Why another process's plan does not hold on this one's batches; empty if it does.

        It is compared with autocast op by op.
        """
        candidate = self._attempted(plan)
        if candidate is None:
            return self.notes[-1]
        return ", ".join(candidate.exactness.beyond(self.autocast.exactness))

    def _predicted(self, plan: StepPlan) -> float:
        total = 0.0
        for own in plan.plans:
            if own.model not in self._graphs:
                return math.nan
            planner, analysis = self._graphs[own.model]
            total += predicted_cost(planner, analysis, own)
        return total if plan.plans else math.nan

    def _judge(self, candidate: StepCandidate, most: Exactness) -> bool:
        """Whether a plan is not exact enough, and why.

        It may be worse than autocast in no figure. Nor may it have Inf or NaN where fp32 has
        none: autocast itself is not taken then.
        """
        exactness = candidate.compiled or candidate.exactness
        beyond, broken = exactness.beyond(most), overflow(exactness.gradients)
        if beyond:
            candidate.why = f"worse than torch.autocast: {broken or ', '.join(beyond)}"
        elif broken:
            candidate.why = broken
        return bool(beyond or broken)

    def held_states(self, plan: StepPlan) -> dict[str, int]:
        """States of the optimizers that may be held low by a plan, and the bytes that saves.

        A state is held low if it takes its own changes, and if updates through it stay no
        worse than autocast's.
        """
        target, saved = self.target, dict[str, int]()
        target.restore(target.samples[-1].checkpoint)
        own = next(c for c in self.candidates if c.plan.digest == plan.digest)
        most = self.autocast.exactness.updates
        sizes = wide_states(target.optimizers)
        try:
            exact = Replayed(target) if sizes else None
        except Exception as error:  # an optimizer may refuse parts of parameters
            self.notes.append(f"the optimizer cannot be replayed: {first_line(error)}")
            return saved
        for name, size in sizes.items():
            assert exact is not None
            replay = Replay.of(exact, (*saved, name), plan.dtype)
            said = replay.objection(own.exactness.updates, most)
            if said:
                self.notes.append(f"{name} of the optimizer stays in fp32: {said}")
            else:
                saved[name] = size - size * plan.format.bits // 32
        target.restore(target.samples[0].checkpoint)
        return saved

    def held_gradients(self, plan: StepPlan, states: Sequence[str], micro_batches: int) -> int:
        """Bytes that gradients save which are added up low; 0 if they stay in fp32.

        So many micro-batches make an update, which may not be worse than autocast's, whose
        gradients are added up in fp32. ``states`` are held low, too.
        """
        target = self.target
        here = target.samples[-1].checkpoint
        batches = [target.batch(number) for number in range(micro_batches)]

        def update(own: StepPlan, held: Sequence[str] = ()) -> tuple[list[str], Gradients]:
            call = own.compile(target.module, kernels=False)
            target.restore(here)
            with target.holding(held, own.dtype):
                gradients = target.gradients(call, *batches, scale=own.scale)
                return with_digits(gradients), target.updates(gradients)

        names, exact = update(self.fp32.plan)
        updates = update(self.autocast.plan)[1], update(plan, (*states, GRADIENTS))[1]
        most, own = (StepFigures.of([deviations(got, exact, names)]) for got in updates)
        target.restore(target.samples[0].checkpoint)
        if own.beyond(most):
            self.notes.append(
                f"gradients are added up in fp32: in {plan.format.label} updates of"
                f" {micro_batches} micro-batches would be off by {percent(mean(own.error))}"
                f" ({own.worst} most), those of torch.autocast by {percent(mean(most.error))}"
            )
            return 0
        wide = sum(p.nbytes for o in target.optimizers for p in trained_by(o))
        return wide - wide * plan.format.bits // 32

    # ------------------------------------------------------------------- compiled steps

    def _measure(self, passing: Sequence[StepCandidate]) -> None:
        """Compile fp32, autocast and the plans that are predicted to be fastest; time them.

        A plan that is as exact as compiled autocast is compiled with less memory, too.
        """
        try:
            steps: Steps = {
                c.plan.digest: self._compiled(c) for c in (self.fp32, self.autocast)
            }
        except RuntimeError as error:
            raise UsageError(
                f"torch.compile fails on the step, without any plan: {refusal(error)}",
                where="model",
                fix="make torch.compile(model) work first",
            ) from error
        most = self._most
        if most is self.autocast.exactness:
            self.notes.append(
                f"compiled torch.autocast computes this step wrongly: its gradients are off by"
                f" {percent(self.autocast.error)}, those of the same step op by op by"
                f" {percent(most.error)}. It is not taken"
            )
        ranked = sorted(
            {c.plan.digest: c for c in passing}.values(),
            key=lambda c: (math.isnan(c.predicted_s), c.predicted_s),
        )
        exact: list[StepCandidate] = []
        for number, candidate in enumerate(ranked):
            if len(exact) == _EXACT or number == _COMPILED:
                candidate.why = "predicted to be slower"
                continue
            if number and not self._has_time():
                candidate.why = f"no time to compile it: timeout_s is {self.timeout_s:g}"
                continue
            step = self._built(candidate)
            if step is None or self._judge(candidate, most):
                continue
            exact.append(candidate)
            steps[candidate.plan.digest] = step
            if self._has_time():
                steps |= self._leaner(candidate)
        self._time(steps)
        self.target.restore(self.target.samples[0].checkpoint)

    def _leaner(self, candidate: StepCandidate) -> Steps:
        """The step of a plan that keeps as little as possible, if that takes less memory."""
        lean = replace(
            candidate, plan=replace(candidate.plan, memory=Memory.LEAST), compiled=None
        )
        self.candidates.append(lean)
        step = self._built(lean)
        if step is None:
            return {}
        if lean.memory_bytes >= candidate.memory_bytes:
            lean.compiled, lean.why = None, "takes no less memory"
            return {}
        return {lean.plan.digest: step}

    def _time(self, steps: Steps) -> None:
        """Time steps by turns, autocast's in each round."""
        self.progress("benchmark", 0, 1)
        race = timed(steps, anchor=self.autocast.plan.digest, effort=self._effort)
        for candidate in self.candidates:
            name = candidate.plan.digest
            if name in steps:
                own = ANCHOR if candidate is self.autocast else name
                candidate.seconds = race.latency(own).median_s
                ratio = race.between(ANCHOR, own)
                candidate.speed = ratio.low, ratio.median, ratio.high

    def _has_time(self) -> bool:
        """Whether a plan may be compiled, and all of them timed, before the time is over."""
        return self._left_s > max(self._built_s) + _FEWEST_ROUNDS * sum(self._called_s)

    @property
    def _effort(self) -> Effort:
        """How long to time: by fewer rounds where calls are long, or little time is left."""
        most_s = max(_TIMED * self.timeout_s, self._left_s)
        rounds = most_s / sum(self._called_s)
        if rounds >= 2 * _EFFORT.rounds:
            return _EFFORT
        return replace(
            _EFFORT, rounds=max(int(min(rounds, _EFFORT.rounds)), _FEWEST_ROUNDS), settle_s=0.0
        )

    def _built(self, candidate: StepCandidate) -> Callable[[], object] | None:
        """As ``_compiled``; None for a plan whose kernels fail, which is then why."""
        try:
            return self._compiled(candidate)
        except RuntimeError as error:
            candidate.why = f"its kernels fail: {refusal(error)}"
            return None

    def _compiled(self, candidate: StepCandidate) -> Callable[[], object]:
        """A candidate's step, compiled; its gradients and its memory are measured."""
        self.progress("compile", len(self.candidates), len(self.candidates) + 1)
        begin_s = time.monotonic()
        target, scale = self.target, candidate.plan.scale
        call, batch = candidate.plan.compile(target.module), self.target.samples[0].batch
        exactness = target.exactness(call, scale)
        begin_call_s = time.monotonic()
        target.step(call, batch, scale)
        self._called_s.append(time.monotonic() - begin_call_s)
        target.module.zero_grad(set_to_none=True)
        candidate.memory_bytes = finecast.torch.peak_bytes(
            lambda: backward(call(*batch), scale)
        )
        target.module.zero_grad(set_to_none=True)
        candidate.compiled = exactness
        self._built_s.append(time.monotonic() - begin_s)
        return lambda: target.step(call, batch, scale)

    @property
    def _most(self) -> Exactness:
        """The figures that no plan may exceed: autocast's, compiled if that is right."""
        compiled, eager = self.autocast.compiled, self.autocast.exactness
        assert compiled is not None
        return compiled if compiled.error <= max(_WRONG * eager.error, _ROUNDED) else eager

    # ------------------------------------------------------------------------ the choice

    @property
    def most_bytes(self) -> int:
        """The most memory that a plan may take: that of the faster of autocast and fp32.

        An autocast with Inf or NaN in gradients is no measure.
        """
        if self.max_memory is not None:
            return self.max_memory
        if self.autocast.exactness.gradients.broken:
            return self.fp32.memory_bytes
        return min((self.autocast, self.fp32), key=lambda c: c.seconds).memory_bytes

    def allowed(self) -> list[StepCandidate]:
        """Those measured that are exact enough and within the memory, the best first."""
        measured = [c for c in self.candidates if c.compiled is not None]
        allowed: list[StepCandidate] = []
        for candidate in measured:
            if self._judge(candidate, self._most):
                continue
            if candidate.memory_bytes > self.most_bytes:
                megabytes, most = candidate.memory_bytes / 1e6, self.most_bytes / 1e6
                candidate.why = f"{megabytes:.3g} MB, {most:.3g} allowed"
                continue
            allowed.append(candidate)
        if self.objective == "memory":
            return sorted(allowed, key=lambda c: (c.memory_bytes, c.seconds))
        fastest = min((c.seconds for c in allowed), default=math.inf)
        return sorted(
            allowed,
            key=lambda c: (
                max(c.seconds, _ALIKE * fastest),
                c.memory_bytes,
            ),
        )

    def measured_plans(self) -> list[StepPlan]:
        """The plans that were timed and keep to the memory, the fastest first."""
        known = [c for c in self.candidates if math.isfinite(c.seconds)]
        return [c.plan for c in sorted(known, key=lambda c: c.seconds)
                if c.memory_bytes <= self.most_bytes]  # fmt: skip

    def best(self) -> StepCandidate:
        """The best plan; fp32 where nothing is allowed, as under a bound of memory."""
        order = self.allowed()
        best = order[0] if order else self.fp32
        for late in order[1:]:
            late.why = (
                "takes more memory"
                if self.objective == "memory"
                else (f"{late.seconds / best.seconds:.3f} times the time")
            )
        if not order:
            self.notes.append(f"no plan takes at most {self.most_bytes / 1e6:.3g} MB")
        best.why = ""
        return best


def timed(steps: Steps, *, anchor: str, effort: Effort) -> Race:
    """The steps timed by turns, one of them as the race's anchor."""
    others = {name: step for name, step in steps.items() if name != anchor}
    return Race.of(steps[anchor], others, effort)
