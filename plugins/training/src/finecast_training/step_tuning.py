"""``tune_step``: the fastest training step whose gradients and updates are good enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypedDict, Unpack

from torch import distributed, nn
from torch.optim import Optimizer

from finecast import Policy
from finecast.calls import checks
from finecast.errors import UsageError
from finecast.naming import look_up, percent
from finecast.progress import Progress, reporting
from finecast.reports import Report, TextTable
from finecast.rules import DEFAULT_POLICY
from finecast_training.backend import Backend
from finecast_training.measures import mean
from finecast_training.paired_trial import PairedTrial, paired_trial
from finecast_training.step import Loss
from finecast_training.step_plan import StepPlan, Way
from finecast_training.step_search import StepCandidate, StepSearch
from finecast_training.target import StepTarget, check_callable, optimizers_of
from finecast_training.tuned_step import TunedStep

OBJECTIVES: Final = {"time": "time", "memory": "memory"}
_MB: Final = 1e6
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
        trial: Losses of training beside fp32; None if none was asked for.
        objective: What was minimised.
        warnings: What makes the result weak.
    """

    step: TunedStep
    candidates: Sequence[StepCandidate]
    best: StepCandidate
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
        lines = [f"training step by {self.plan.name}: {self.plan.words}", beside]
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
    max_memory: int | None
    moments: int
    between: int
    trial_steps: int
    seeds: int


@checks
@dataclass(frozen=True, slots=True, kw_only=True)
class StepGoal:
    """What a step is tuned for, and how long it is compared.

    Attributes:
        objective: ``time`` or ``memory``.
        max_memory: The most bytes that forward and backward pass may allocate, gradients
            among them. By default those of compiled autocast, or of fp32 where that is faster.
        moments: At how many moments of training gradients are compared.
        between: Steps of fp32 before each of them.
        trial_steps: Steps of a paired trial: from one checkpoint in fp32, under autocast and
            as planned, on the same data. A plan that loses there is not taken.
        seeds: Seeds of the trial.

    Raises:
        UsageError: If one of them does not fit.
    """

    objective: str = "time"
    max_memory: int | None = None
    moments: int = 3
    between: int = 4
    trial_steps: int = 0
    seeds: int = 5

    def __post_init__(self) -> None:
        """Refuse what does not fit."""
        look_up(self.objective, OBJECTIVES, what="objective", where="objective")
        for name, number, least in (
            ("moments", self.moments, 1),
            ("between", self.between, 0),
            ("trial_steps", self.trial_steps, 0),
            ("seeds", self.seeds, 1),
            ("max_memory", 1 if self.max_memory is None else self.max_memory, 1),
        ):
            if number < least:
                raise UsageError(
                    f"{name} is {number}", where=name, fix=f"give {least} or more"
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
    left out, and named.

    Args:
        model: The module, in the mode in which it is trained.
        loss: The loss of a batch: ``lambda net, x, y: cross_entropy(net(x), y)``.
        batches: Batches of one size, each a tuple of what ``loss`` gets after the module.
        optimizer: The optimizers of the module's parameters, by which updates are compared.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy: the formats that plans may have.
        progress: A callback; True to show a bar.
        keywords: ``objective``, ``max_memory``, ``moments``, ``between``, ``trial_steps`` and
            ``seeds``, as of a ``StepGoal``.

    Raises:
        UsageError: If the step cannot be run, or an argument does not fit.
    """
    goal = StepGoal(**keywords)
    check_callable(model, loss)
    how = Backend(policy).policy  # refuses formats that training graphs cannot state
    optimizers = optimizers_of(optimizer)
    target = StepTarget.of(
        model, loss, batches, optimizers, moments=goal.moments, between=goal.between
    )
    with reporting(progress, "training step") as report, target.compared():
        search = StepSearch(
            target=target,
            policy=how,
            objective=goal.objective,
            max_memory=goal.max_memory,
            progress=report,
        )
        best, trial = search.run(), None
        if goal.trial_steps:
            best, trial = _tried(search, best, goal, report)
        plan = _same_everywhere(search, best)
    step = TunedStep(plan, model, loss)
    step.known, step.optimizers = search.measured_plans(), optimizers
    return StepResult(
        step=step,
        candidates=tuple(search.candidates),
        best=replace(best, plan=plan),
        trial=trial,
        objective=goal.objective,
        warnings=tuple(dict.fromkeys(search.notes)),
    )


def _tried(
    search: StepSearch, best: StepCandidate, goal: StepGoal, progress: Progress
) -> tuple[StepCandidate, PairedTrial]:
    """The best plan that does not lose in training, with its trial."""
    target = search.target
    order = [best, *(c for c in search.allowed() if c is not best)]
    fixed = {
        name: (candidate.plan.compile(target.module), candidate.plan.scale)
        for name, candidate in (("fp32", search.fp32), ("autocast", search.autocast))
    }
    trial: PairedTrial | None = None
    for candidate in order:
        own = candidate.plan.compile(target.module), candidate.plan.scale
        calls = {**fixed, "tuned": own}
        trial = paired_trial(
            target, calls, steps=goal.trial_steps, seeds=goal.seeds, progress=progress
        )
        if not trial.is_worse("tuned") or candidate is search.fp32:
            candidate.why = ""
            return candidate, trial
        candidate.why = f"it loses in training: {trial.text('tuned')}"
        search.notes.append(f"{candidate.plan.name} was not taken: {candidate.why}")
    assert trial is not None
    return search.fp32, trial


def _same_everywhere(search: StepSearch, best: StepCandidate) -> StepPlan:
    """The plan that all processes follow that train together.

    Each measured other times on other batches, and may have found another plan. It is the
    best of the first process that is worse than autocast on no process's batches.

    Raises:
        UsageError: If the processes' graphs differ, so that no plan fits all.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
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
