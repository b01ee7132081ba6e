"""``tune_step``: the fastest training step whose gradients and updates are good enough."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from torch import distributed, nn
from torch.optim import Optimizer

from finecast import Format, Policy
from finecast.calls import checks
from finecast.errors import UsageError
from finecast.naming import (
    bytes_of,
    listed,
    look_up,
    percent,
)
from finecast.progress import Progress, reporting
from finecast.reports import Report, TextTable
from finecast.rules import DEFAULT_POLICY
from finecast_training.backend import Backend
from finecast_training.measures import mean
from finecast_training.optimizer_states import GRADIENTS
from finecast_training.paired_trial import PairedTrial, paired_trial
from finecast_training.products import formats_of
from finecast_training.step import Loss
from finecast_training.step_plan import StepPlan, Way
from finecast_training.step_search import StepCandidate, StepSearch
from finecast_training.target import Call, Sampling, StepTarget, check_callable, optimizers_of
from finecast_training.tuned_step import TunedStep

OBJECTIVES: Final = {"time": "time", "memory": "memory"}
_MB: Final = 1e6
_SEEDS: Final = 5
"""Seeds of a trial for which no number is stated."""
# The shares of the time that may be spent on samples, with compiled steps that are compared on
# them, and on plans op by op: on so many, each of which takes as long as 1.6 steps of fp32.
_SAMPLED: Final = 0.4
_COMPARED: Final = 0.25
_PLANS: Final = 12
_COMPARISON: Final = 1.6
_UNPLANNED: Final = {
    Way.PLANNED: (),
    Way.AUTOCAST: ("no op has a plan: torch.autocast chooses formats as the step runs",),
    Way.FP32: ("no op has a plan: all are in fp32",),
}
"""Why there are no rows of ops."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepResult(Report):
    """What ``tune_step`` gives: the step, and all that was measured.

    Attributes:
        step: The step of the user's module.
        candidates: All plans that were compared.
        best: The one that the step follows.
        sampling: On what plans were compared.
        held_bytes: What states of the optimizers and gradients save that are held low.
        trial: Losses of training beside fp32; None if none was asked for.
        objective: What was minimised.
        warnings: What makes the result weak.
    """

    step: TunedStep
    candidates: Sequence[StepCandidate]
    best: StepCandidate
    sampling: Sampling
    held_bytes: int = 0
    trial: PairedTrial | None = None
    objective: str = "time"
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> StepPlan:
        """The plan that was found."""
        return self.best.plan

    @property
    def improved(self) -> bool:
        """Whether ops have lower formats than fp32, by plan or by autocast."""
        return self.plan.way is not Way.FP32

    def save(self, output: str | Path, *, force: bool = False) -> None:
        """Write the plan to a file, from which ``load_step`` makes the step again."""
        self.plan.save(output, force=force)

    def to_json(self) -> str:
        """The plan's file as text."""
        return self.plan.to_json()

    @property
    def lines(self) -> list[str]:
        """The choice, and what it is beside fp32 and autocast."""
        low, median, high = self.best.speed
        against = self._of(Way.FP32).seconds / self.best.seconds
        peak, autocasts = (
            candidate.memory_bytes / _MB for candidate in (self.best, self._of(Way.AUTOCAST))
        )
        beside = (
            f"x{against:.3g} as fast as compiled fp32, x{median:.3g} as compiled autocast"
            f" ({low:.3g} to {high:.3g}); {peak:.3g} MB at the peak,"
            f" autocast {autocasts:.3g} MB"
        )
        lines = [
            f"training step by {self.plan.name}: {self.plan.words}",
            beside,
            f"compared {self.sampling.words}",
        ]
        if self.plan.states:
            names, label = listed(self.plan.states, 5), self.plan.format.label
            lines.append(
                f"{names} of the optimizer in {label} between its steps:"
                f" {self.held_bytes / _MB:.3g} MB less"
            )
        if self.plan.scale != 1.0:
            lines.append(f"the loss is multiplied by {self.plan.scale:g} before backward()")
        if self.trial is not None:
            lines.append(self.trial.text("tuned"))
        return [*lines, *(f"warning: {text}" for text in self.warnings)]

    def _of(self, way: Way) -> StepCandidate:
        return next(c for c in self.candidates if c.plan.way is way)

    @property
    def tables(self) -> Sequence[TextTable]:
        """The plans beside one another, and the ops of the one that was chosen."""
        rows = [_row(c) for c in self.candidates if c.compiled is not None]
        right = ("ms", "MB", "gradients", "worst", "updates", "zero", "Inf or NaN")
        beside = TextTable(title="compiled", left=("step",), right=right, rows=rows)
        others = [(c.plan.name, c.plan.words, c.why) for c in self.candidates if c.why]
        left = TextTable(title="not taken", left=("plan", "ops", "why"), rows=others)
        return [beside, left, self.explain()]

    def explain(self) -> TextTable:
        """The format of each op of forward and backward pass, and why it has that."""
        rows = [
            (d.node, d.op, d.format.label, d.why)
            for plan in self.plan.plans
            for d in plan.counted
        ]
        return TextTable(
            title="ops",
            left=("node", "op", "type", "reason"),
            rows=rows,
            notes=_UNPLANNED[self.plan.way],
        )

    def _content(self) -> dict[str, Any]:
        return {
            "objective": self.objective,
            "plan": self.plan.to_dict(),
            "best": self.best.to_dict(),
            "sampling": asdict(self.sampling),
            "held_bytes": self.held_bytes,
            "candidates": [c.to_dict() for c in self.candidates],
            "trial": None if self.trial is None else self.trial.to_dict(),
            "warnings": list(self.warnings),
        }


def _row(candidate: StepCandidate) -> tuple[str, ...]:
    assert candidate.compiled is not None
    gradients, updates = candidate.compiled.gradients, candidate.compiled.updates
    timed = f"{1e3 * candidate.seconds:.3f}" if math.isfinite(candidate.seconds) else ""
    lean = ", least memory" if candidate.plan.memory.value == "least" else ""
    return (
        f"{candidate.plan.name}{lean}",
        timed,
        f"{candidate.memory_bytes / _MB:.3f}",
        percent(mean(gradients.error)),
        percent(mean(gradients.worst_error)),
        percent(mean(updates.error)),
        percent(mean(gradients.vanished)),
        percent(mean(gradients.nonfinite)),
    )


class StepKeywords(TypedDict, total=False):
    """Keywords of ``tune_step``, which ``StepGoal`` explains."""

    objective: str
    max_memory: str | int | None
    micro_batches: int
    moments: int | None
    between: int | None
    timeout_s: float
    trial_steps: int
    seeds: int | None


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class StepGoal:
    """What a step is tuned for, and how long it is compared.

    Attributes:
        objective: ``time``, or ``memory``: the least peak of forward and backward pass. Then
            those states of the optimizers are held in the low format from one of their steps
            to the next through which updates stay no worse than autocast's.
        max_memory: The most that forward and backward pass may allocate, gradients among them:
            a size, as 800MB, or a number of bytes. By default the peak of compiled autocast,
            or of fp32 where that is faster.
        micro_batches: Batches whose gradients you add up for one step of the optimizer. With
            ``memory`` as objective they are added up in bf16 if updates then stay no worse
            than autocast's; a trial adds up so many, too. This needs an optimizer.
        moments: At how many moments of training gradients are compared. By default 3, with two
            batches at each; one batch, then fewer moments where ``timeout_s`` is too short for
            that, or samples would take more than a quarter of the memory that is free.
        between: Steps of fp32 before each of them; by default 4, or 2 as above.
        timeout_s: The seconds of the search, without a trial, after which nothing is begun
            that can be left out: after half of them no further plan is compared op by op, and
            none is compiled for which no time is left. What runs is not cut short, and
            fp32, autocast and one plan are compiled and timed in any case, so that a short
            time is exceeded: by three compilations, of seconds to minutes each. Give more
            where a step takes seconds: more plans are then compared, on more samples.
        trial_steps: Steps of a paired trial: from one checkpoint in fp32, under autocast and
            as planned, on the same data. A plan that loses there is not taken. This needs an
            optimizer.
        seeds: Seeds of the trial; by default 5.

    Raises:
        UsageError: If one of them does not fit.
    """

    objective: str = "time"
    max_memory: str | int | None = None
    micro_batches: int = 1
    moments: int | None = None
    between: int | None = None
    timeout_s: float = 240.0
    trial_steps: int = 0
    seeds: int | None = None

    def __post_init__(self) -> None:
        """Refuse what does not fit."""
        bytes_of(self.max_memory, where="max_memory")
        look_up(self.objective, OBJECTIVES, what="objective", where="objective")
        for name, number, least in (
            ("moments", 1 if self.moments is None else self.moments, 1),
            ("between", 0 if self.between is None else self.between, 0),
            ("micro_batches", self.micro_batches, 1),
            ("trial_steps", self.trial_steps, 0),
            ("seeds", 1 if self.seeds is None else self.seeds, 1),
        ):
            if number < least:
                raise UsageError(
                    f"{name} is {number}", where=name, fix=f"give {least} or more"
                )
        if not self.timeout_s > 0:
            raise UsageError(
                f"{self.timeout_s:g} seconds are no time",
                where="timeout_s",
                fix="give a number above 0",
            )
        if self.seeds is not None and not self.trial_steps:
            raise _without_effect("seeds", "a trial", "trial_steps, as 50")

    def check_used(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise UsageError for what changes nothing with these optimizers."""
        adds_up = self.micro_batches > 1
        for name, stated in (("trial_steps", self.trial_steps), ("micro_batches", adds_up)):
            if stated and not optimizers:
                raise _without_effect(
                    name, "an optimizer", "optimizer, which updates the model"
                )
        if adds_up and self.objective != "memory" and not self.trial_steps:
            raise _without_effect(
                "micro_batches",
                "memory as objective, or a trial",
                'objective="memory", with which they are added up in bf16, or trial_steps',
            )


def _without_effect(name: str, needed: str, fix: str) -> UsageError:
    """The error for an argument that changes nothing without another one."""
    return UsageError(
        f"{name} changes nothing without {needed}",
        where=name,
        fix=f"give {fix}, or leave {name} out",
    )


@checks
def tune_step(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    progress: Progress | bool = False,
    **keywords: Unpack[StepKeywords],
) -> StepResult:
    """The fastest training step whose gradients and updates are as exact as autocast's.

    Laws: the module, its optimizers, their state and random numbers stay as they are. The
    peak of memory is at most that of compiled ``torch.autocast``, of fp32 where that is
    faster, or ``max_memory``. In no figure is the step worse than autocast, by more than 1%
    and by more than chance: the relative error and the angle of the parameters' gradients and
    of the optimizer's updates, the shares of elements that became zero or are no finite
    numbers; on several batches, at several moments of training. It is the fastest, or takes
    the least memory, of what was compiled, fp32 and autocast among it. Processes that train
    together follow one plan, which is worse on none's batches. Plans whose kernels fail are
    left out, and named. After 240 seconds, or ``timeout_s``, nothing more is begun but what
    the choice needs, as three compilations: where steps are slow, fewer plans are compared, on
    fewer samples.

    Args:
        model: The module, in the mode in which it is trained.
        loss: The loss of a batch: ``lambda net, x, y: cross_entropy(net(x), y)``.
        batches: Batches of one size, each a tuple of what ``loss`` gets after the module.
        optimizer: The optimizers of the module's parameters, by which updates are compared.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy: the formats that plans may have. By
            default bf16, and fp8 and tf32 for products where a GPU has them.
        progress: A callback; True to show a bar.
        keywords: ``objective``, ``max_memory``, ``micro_batches``, ``moments``, ``between``,
            ``timeout_s``, ``trial_steps`` and ``seeds``, as of a ``StepGoal``.

    Raises:
        UsageError: If the step cannot be run, or an argument does not fit.
    """
    goal = StepGoal(**keywords)
    check_callable(model, loss)
    how = Backend(policy).policy  # refuses formats that training graphs cannot state
    optimizers = optimizers_of(optimizer)
    goal.check_used(optimizers)
    begin_s = time.monotonic()
    target = StepTarget.of(model, loss, batches, optimizers)
    if how.open_formats:
        how = replace(how, formats=(*how.formats, *formats_of(target.device)))
    with reporting(progress, "training step") as report, target.compared(), _told_once():
        report("sample", 0, 1)
        cost = target.cost()
        sampling = cost.sampling(_SAMPLED * goal.timeout_s, goal.moments, goal.between)
        target.sample(sampling)
        search = StepSearch(
            target=target,
            policy=how,
            objective=goal.objective,
            max_memory=bytes_of(goal.max_memory, where="max_memory"),
            progress=report,
            begin_s=begin_s,
            timeout_s=goal.timeout_s,
            screened=max(
                int(_COMPARED * goal.timeout_s / (_PLANS * _COMPARISON * cost.seconds)), 1
            ),
        )
        best, trial = search.run(), None
        if goal.trial_steps:
            best, trial = _tried(search, best, goal, report)
        plan, held_bytes = _same_everywhere(search, best), 0
        if goal.objective == "memory":
            plan, held_bytes = _with_low_states(search, plan, goal, report)
    step = TunedStep(plan, model, loss)
    step.known, step.optimizers = search.measured_plans(), optimizers
    return StepResult(
        step=step,
        candidates=tuple(search.candidates),
        best=replace(best, plan=plan),
        sampling=replace(sampling, batches=len(target.samples) // sampling.moments),
        held_bytes=held_bytes,
        trial=trial,
        objective=goal.objective,
        warnings=tuple(dict.fromkeys(search.notes)),
    )


@contextmanager
def _told_once() -> Generator[None]:
    """A block in which a warning is shown once: each plan that is compiled gives the same."""
    with warnings.catch_warnings():
        show, texts = warnings.showwarning, set[str]()

        def show_first(message: Warning | str, *where: Any, **more: Any) -> None:
            if str(message) not in texts:
                texts.add(str(message))
                show(message, *where, **more)

        warnings.showwarning = show_first
        yield


def _tried(
    search: StepSearch, best: StepCandidate, goal: StepGoal, progress: Progress
) -> tuple[StepCandidate, PairedTrial]:
    """The best plan that does not lose in training, with its trial."""
    target = search.target
    order = [best, *(c for c in search.allowed() if c is not best)]
    fixed = {
        name: (candidate.plan.compile(target.module), candidate.plan)
        for name, candidate in (("fp32", search.fp32), ("autocast", search.autocast))
    }
    trial: PairedTrial | None = None
    for candidate in order:
        own = candidate.plan.compile(target.module), candidate.plan
        calls = {**fixed, "tuned": own}
        trial = _trial(search, calls, goal, progress)
        if not trial.is_worse("tuned") or candidate is search.fp32:
            candidate.why = ""
            return candidate, trial
        candidate.why = f"it loses in training: {trial.text('tuned')}"
        search.notes.append(f"{candidate.plan.name} was not taken: {candidate.why}")
    assert trial is not None
    return search.fp32, trial


def _trial(
    search: StepSearch,
    calls: Mapping[str, tuple[Call, StepPlan]],
    goal: StepGoal,
    progress: Progress,
) -> PairedTrial:
    """Training by ``calls`` beside fp32, for as long as the goal says."""
    return paired_trial(
        search.target,
        calls,
        steps=goal.trial_steps,
        seeds=goal.seeds or _SEEDS,
        micro_batches=goal.micro_batches,
        progress=progress,
    )


def _with_low_states(
    search: StepSearch, plan: StepPlan, goal: StepGoal, progress: Progress
) -> tuple[StepPlan, int]:
    """A plan that holds states of the optimizers low, if it may, and the bytes that saves.

    Processes that train together hold the same states so. With a trial the plan is trained
    once more: states that lose there stay in fp32.
    """
    saved = search.held_states(plan)
    if goal.micro_batches > 1:
        saved |= _with_low_gradients(search, plan, [*saved], goal.micro_batches)
    everywhere = _gathered(list(saved)) if _is_distributed() else [[*saved]]
    states = tuple(name for name in saved if all(name in of for of in everywhere))
    own = replace(plan, states=states)
    if states and goal.trial_steps:
        calls = {
            name: (one.compile(search.target.module), one)
            for name, one in (("fp32", search.fp32.plan), ("tuned", own))
        }
        trial = _trial(search, calls, goal, progress)
        lost = trial.is_worse("tuned")
        if any(_gathered(lost)) if _is_distributed() else lost:
            search.notes.append(
                f"{listed(states, 5)} of the optimizer in fp32: {trial.text('tuned')} in"
                f" {own.format.label}"
            )
            return plan, 0
    return own, sum(saved[name] for name in states)


def _with_low_gradients(
    search: StepSearch, plan: StepPlan, states: Sequence[str], micro_batches: int
) -> dict[str, int]:
    """Gradients, with the bytes that they save, if they may be added up in the low format."""
    if not search.target.optimizers or plan.format is not Format.BF16 or _is_distributed():
        search.notes.append(
            "gradients are added up in fp32: in bf16 only where a plan has bf16, one process"
            " trains, and there is an optimizer, which widens them for its step"
        )
        return {}
    saved = search.held_gradients(plan, states, micro_batches)
    return {GRADIENTS: saved} if saved else {}


def _is_distributed() -> bool:
    """Whether several processes train together."""
    return distributed.is_available() and distributed.is_initialized()


def _same_everywhere(search: StepSearch, best: StepCandidate) -> StepPlan:
    """The plan that all processes follow that train together.

    Each measured other times on other batches, and may have found another plan. It is the
    best of the first process that is worse than autocast on no process's batches.

    Raises:
        UsageError: If the processes' graphs differ, so that no plan fits all.
    """
    if not _is_distributed():
        return best.plan
    order = [c.plan for c in search.allowed()]
    later = order[order.index(best.plan) + 1 :] if best.plan in order else []
    plans = [plan.to_json() for plan in (best.plan, *later)]
    everywhere = _gathered((plans, list(search.graphs)))
    for rank, (_, graphs) in enumerate(everywhere):
        if graphs != everywhere[0][1]:
            raise UsageError(
                f"process {rank} trains another graph than process 0",
                where="model",
                fix="give each process the same module, and batches of one size",
            )
    for text in everywhere[0][0]:
        plan = StepPlan.from_json(text)
        objections = _gathered(search.objection(plan))
        rank = next((rank for rank, why in enumerate(objections) if why), None)
        if rank is None:
            return plan
        search.notes.append(
            f"{plan.name} was not taken: in process {rank} it is worse than torch.autocast:"
            f" {objections[rank]}"
        )
    return search.fp32.plan


def _gathered(own: Any) -> list[Any]:
    """What each of the processes that train together has, in their order."""
    everywhere: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everywhere, own)
    return everywhere
