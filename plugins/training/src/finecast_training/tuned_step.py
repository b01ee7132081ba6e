"""A training step that follows a plan, and chooses among known plans anew as it trains."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from finecast import Plan
from finecast.calls import checks
from finecast.engines.torch import check_no_autocast
from finecast.errors import UsageError
from finecast.terminal import one_line
from finecast_training.backend import CALL_OUTSIDE
from finecast_training.faults import overflow, refusal
from finecast_training.measures import FEWEST
from finecast_training.optimizer_states import HeldStates
from finecast_training.step import Loss, LossOf
from finecast_training.step_plan import StepPlan, Way
from finecast_training.target import (
    Batch,
    Call,
    Sampling,
    StepTarget,
    check_callable,
    optimizers_of,
    same_form,
)

_KEPT: Final = FEWEST
"""Batches that are kept to compare plans on: as many as chance can be told from."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Replanned:
    """What became of a step's plan at some point of its training.

    Attributes:
        calls: Calls of the step before.
        before: The plan until then.
        after: The plan from then on, which may be the same.
        why: Why it was kept or changed.
    """

    calls: int
    before: StepPlan
    after: StepPlan
    why: str

    def __repr__(self) -> str:
        """When, which plan is followed from then on, and why."""
        kept = "" if self.changed else " is kept"
        plan, why = one_line(self.after.name), one_line(self.why)
        return f"<Replanned before call {self.calls}: {plan}{kept}, as {why}>"

    @property
    def changed(self) -> bool:
        """Whether there is another plan now."""
        return self.before.digest != self.after.digest


class TunedStep:
    """The loss of a batch, computed by a plan; ``loss.backward()`` is computed by it, too.

    Laws: parameters and gradients keep their types; the module is the user's own, so that
    optimizers, clipping, frozen and tied parameters work as before. No low copies of
    parameters are kept from call to call: whatever writes to them is seen by the next call.

    Args:
        plan: How the step is computed.
        model: The module.
        loss: The loss of a batch.

    Attributes:
        known: The plans to choose from, the fastest first.
        optimizers: The optimizers of the module's parameters. Those states are held in a low
            format of which the plan says so.
        history: What became of the plan so far.
    """

    _AS_EXACT: Final = {
        Way.PLANNED: ", and now no worse than torch.autocast",
        Way.AUTOCAST: "",
        Way.FP32: ", and exact",
    }

    def __init__(self, plan: StepPlan, model: nn.Module, loss: Loss) -> None:
        self.module = LossOf(model, loss)
        self.known: Sequence[StepPlan] = (plan,)
        self._optimizers: Sequence[Optimizer] = ()
        self._held: HeldStates | None = None
        self._compiled: dict[str, Call] = {}
        self.history: list[Replanned] = []
        self.follow(plan)
        self._calls = 0
        self._every = 0
        self._schedule: dict[int, StepPlan] = {}
        self._scheduled = False
        self._recent: deque[Batch] = deque(maxlen=_KEPT)

    def __repr__(self) -> str:
        """The plan that is followed."""
        return f"<TunedStep by {one_line(self.plan.name)}: {one_line(self.plan.words)}>"

    def __call__(self, *batch: Any) -> torch.Tensor:
        """The loss of a batch; a call without gradients, as for validation, is no step.

        Raises:
            UsageError: Inside of ``torch.autocast``, which would cast what the plan does not.
        """
        check_no_autocast(fix=CALL_OUTSIDE)
        if torch.is_grad_enabled():
            self._advance(batch)
        return self._call(*batch)

    def _advance(self, batch: Batch) -> None:
        """Change the plan where that is due, and count the call."""
        due = [number for number in self._schedule if number <= self._calls]
        if due:
            self._scheduled = True
            self._change(self._schedule[max(due)], "the schedule says so")
            self._schedule = {n: p for n, p in self._schedule.items() if n not in due}
        elif self._is_due():
            self.replan()
        self._calls += 1
        self._recent.append(batch)

    def _is_due(self) -> bool:
        """Whether plans are to be compared before this call."""
        counted = self._every and self._calls and self._calls % self._every == 0
        return bool(counted) and not self._scheduled

    def follow(self, plan: StepPlan) -> None:
        """Compute the step by another plan from the next call on.

        What a plan was compiled to is kept for when it is followed again.
        """
        self.plan = plan
        if plan.digest not in self._compiled:
            self._compiled[plan.digest] = plan.compile(self.module)
        self._call = self._compiled[plan.digest]
        self._hold()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the module's parameters."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._hold()

    def _hold(self, *, none: bool = False) -> None:
        """Have the optimizers hold the plan's states low, and no others."""
        if self._held is not None:
            self._held.release()
        self._held = None
        if self.plan.states and self.optimizers and not none:
            self._held = HeldStates(self.optimizers, self.plan.states, self.plan.dtype)

    def schedule(self, plans: Mapping[int, Any]) -> None:
        """Follow each of ``plans`` from the call of that number on, or from the next call.

        From the first of them on ``replan_every`` changes nothing any more: what the schedule
        says holds until its next plan, or until another schedule is given.
        """
        for number, plan in plans.items():
            if number < 0 or not isinstance(plan, StepPlan):
                raise UsageError(
                    f"{number!r}: {plan!r} is no call and plan",
                    where="plans",
                    fix="give plans by the number of the call, as {1000: tuned.plan}",
                )
        self._schedule, self._scheduled = dict(plans), False

    def replan_every(self, calls: int) -> None:
        """Choose anew among the known plans before every so many calls; 0 for never again."""
        if calls < 0:
            raise UsageError(f"calls is {calls}", where="calls", fix="give 0 or more")
        self._every = calls

    def replan(self) -> Replanned:
        """Choose the fastest known plan that is no worse than autocast now.

        Plans are compared op by op on a copy, with the parameters and the optimizers' state of
        this moment, on the last batches.

        Raises:
            UsageError: If the step was not called before.
        """
        if not self._recent:
            raise UsageError(
                "the step was not called: there is no batch to compare plans on",
                fix="call it first",
            )
        self._hold(none=True)  # the copy's reference is in fp32
        target = StepTarget.of(
            self.module.module, self.module.loss, same_form(self._recent), self.optimizers,
            Sampling(moments=1, between=0, batches=_KEPT),
        )  # fmt: skip
        self._hold()
        with target.compared():
            plan, failed = self._holding(target)
        own = failed.get(self.plan.digest)
        why = "it is no worse than torch.autocast, as before"
        if plan.digest != self.plan.digest:
            why = (
                f"{self.plan.name} is now worse than torch.autocast: {own}"
                if own
                else f"{plan.name} is faster{self._AS_EXACT[plan.way]}"
            )
        return self._change(plan, why)

    def _holding(self, target: StepTarget) -> tuple[StepPlan, dict[str, str]]:
        """The first known plan no worse than autocast, and what others are worse in."""
        own, failed = self.plan, dict[str, str]()
        autocast = replace(own, name="torch.autocast", way=Way.AUTOCAST, plans=())
        fp32 = replace(own, name="fp32", way=Way.FP32, plans=(), scale=1.0)
        most = target.exactness(autocast.compile(target.module, kernels=False), own.scale)
        for plan in self.known:
            if plan.way is Way.FP32:
                return plan, failed
            call = plan.compile(target.module, kernels=False)
            try:
                exact = (
                    most if plan.way is Way.AUTOCAST else target.exactness(call, plan.scale)
                )
            except RuntimeError as error:
                failed[plan.digest] = refusal(error)
                continue
            broken = overflow(exact.gradients)
            beyond = [broken] if broken else exact.beyond(most)
            if not beyond:
                return plan, failed
            failed[plan.digest] = ", ".join(beyond)
        return fp32, failed

    def _change(self, plan: StepPlan, why: str) -> Replanned:
        done = Replanned(calls=self._calls, before=self.plan, after=plan, why=why)
        self.history.append(done)
        if done.changed:
            self.follow(plan)
        return done

    @property
    def plans(self) -> Sequence[Plan]:
        """The plans of the graphs that were compiled so far; none under autocast."""
        compiled: Sequence[Plan] = getattr(self._call, "finecast_plans", ())
        return compiled

    def scaler(self) -> torch.amp.GradScaler:
        """A scaler of losses, to start with the plan's scale; it does nothing without fp16."""
        device = next(self.module.parameters()).device.type
        scale = self.plan.scale
        return torch.amp.GradScaler(device, init_scale=scale, enabled=scale != 1.0)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the plan to a file, from which ``load_step`` makes the step again."""
        self.plan.save(path, force=force)


@checks
def load_step(
    path: str | Path,
    model: nn.Module,
    loss: Loss,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
) -> TunedStep:
    """The step of a plan that was saved, of another model of the same code or the same one.

    Args:
        path: The file.
        model: The module.
        loss: The loss of a batch.
        optimizer: The optimizers of the module's parameters. ``replan`` compares updates by
            them, and a plan may have states of them held in a low format.

    Raises:
        UsageError: If the file is missing or no plan of a training step, or an argument does
            not fit.
    """
    check_callable(model, loss)
    step = TunedStep(StepPlan.load(path), model, loss)
    step.optimizers = optimizers_of(optimizer)
    return step
