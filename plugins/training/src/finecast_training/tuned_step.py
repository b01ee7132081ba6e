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
from finecast_training.backend import CALL_OUTSIDE
from finecast_training.faults import overflow, refusal
from finecast_training.step import Loss, LossOf
from finecast_training.step_plan import StepPlan, Way
from finecast_training.target import Batch, Call, StepTarget, check_callable

_KEPT: Final = 2
"""Batches that are kept to compare plans on."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        optimizers: The optimizers of the module's parameters.
        history: What became of the plan so far.
    """

    def __init__(self, plan: StepPlan, model: nn.Module, loss: Loss) -> None:
        self.module = LossOf(model, loss)
        self.known: Sequence[StepPlan] = (plan,)
        self.optimizers: Sequence[Optimizer] = ()
        self.history: list[Replanned] = []
        self.follow(plan)
        self._calls = 0
        self._every = 0
        self._schedule: Mapping[int, StepPlan] = {}
        self._recent: deque[Batch] = deque(maxlen=_KEPT)

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
        if self._calls in self._schedule:
            self._change(self._schedule[self._calls], "the schedule says so")
        elif self._every and self._calls and self._calls % self._every == 0:
            self.replan()
        self._calls += 1
        self._recent.append(batch)

    def follow(self, plan: StepPlan) -> None:
        """Compute the step by another plan from the next call on."""
        self.plan = plan
        self._call: Call = plan.compile(self.module)

    def schedule(self, plans: Mapping[int, Any]) -> None:
        """Follow each of ``plans`` from the call of that number on."""
        for number, plan in plans.items():
            if number < 0 or not isinstance(plan, StepPlan):
                raise UsageError(
                    f"{number!r}: {plan!r} is no call and plan",
                    where="plans",
                    fix="give plans by the number of the call, as {1000: tuned.plan}",
                )
        self._schedule = dict(plans)

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
        target = StepTarget.of(
            self.module.module, self.module.loss, self._recent, self.optimizers,
            moments=1, between=0,
        )  # fmt: skip
        with target.compared():
            plan, failed = self._holding(target)
        own = failed.get(self.plan.digest)
        why = "it is no worse than torch.autocast, as before"
        if plan.digest != self.plan.digest:
            why = (
                f"{self.plan.name} is now worse than torch.autocast: {own}"
                if own
                else f"{plan.name} is faster, and now no worse than torch.autocast"
            )
        return self._change(plan, why)

    def _holding(self, target: StepTarget) -> tuple[StepPlan, dict[str, str]]:
        """The first known plan no worse than autocast, and what others are worse in."""
        own, failed = self.plan, dict[str, str]()
        autocast = replace(own, name="torch.autocast", way=Way.AUTOCAST, plans=())
        fp32 = replace(own, name="fp32", way=Way.FP32, plans=(), scale=1.0)
        most = target.exactness(autocast.compile(target.module, kernels=False), own.scale)
        for plan in self.known:
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
def load_step(path: str | Path, model: nn.Module, loss: Loss) -> TunedStep:
    """The step of a plan that was saved, of another model of the same code or the same one.

    Raises:
        UsageError: If the file is missing or no plan of a training step.
    """
    check_callable(model, loss)
    return TunedStep(StepPlan.load(path), model, loss)
