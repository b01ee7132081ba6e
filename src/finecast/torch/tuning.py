"""``tune``: the fastest plan of a module that keeps the accuracy asked for.

Laws: the result never misses the criterion and is never slower than fp32 here, run in the
same way; where nothing helps, the module comes back as it was, and ``why`` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from finecast.edits import cast_count
from finecast.errors import ModelError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import Captured
from finecast.frontends.torch.reader import hinted_shapes
from finecast.measure.criterion import Criterion
from finecast.measure.timing import Latency, latency, ratio
from finecast.plan import Plan
from finecast.policy import Policy
from finecast.rules import UserRule
from finecast.rules.override import active
from finecast.torch.convert import finish, flat_inputs, missing_kernels
from finecast.torch.planning import (
    Proposal,
    TorchPlanner,
    device_of,
    look_before_leaping,
    make_torch_planner,
    sensitivities,
)
from finecast.tuner.search import Candidate, chain, fastest_passing

# Makes of a module what is deployed: ``torch.compile``, or nothing.
Prepare = Callable[[torch.nn.Module], Callable[..., Any]]
Evaluate = Callable[[torch.nn.Module], float]

# Candidates that are built and timed: each costs a compilation.
_STEPS: Final = 5
_RANK_TIME_S: Final = 3.0
_MIN_SPEEDUP: Final = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrial:
    """A plan with its measured accuracy and speed."""

    name: str
    plan: Plan
    metric: float
    passed: bool
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOutcome:
    """What tuning found; ``model`` is the module itself where nothing helped."""

    model: torch.nn.Module
    plan: Plan
    improved: bool
    why: str
    baseline: float
    metric: float
    speedup: float
    casts: int
    trials: tuple[TorchTrial, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """How plans are tried.

    Attributes:
        prepare: What is timed is ``prepare(module)``.
        probing: Probe every rounding alone instead of one backward pass for all.
        steps: Plans of the frontier that are built and timed.
        user_rules: Rules by name.
        dynamic_shapes: As ``torch.export.export`` takes them.
    """

    prepare: Prepare = torch.compile
    probing: bool = False
    steps: int = _STEPS
    user_rules: tuple[tuple[str, UserRule], ...] = ()
    dynamic_shapes: Any = None


def tune(
    module: torch.nn.Module,
    example_inputs: Sequence[Any],
    *,
    evaluate: Evaluate,
    criterion: Criterion | None = None,
    policy: str | Policy = "auto:bf16",
    options: TuneOptions | None = None,
) -> TorchOutcome:
    """Find the fastest plan for which ``evaluate(module)`` keeps ``criterion``.

    Raises:
        ModelError: If the module cannot be captured, or its own metric is NaN.
    """
    wanted = Policy.parse(policy) if isinstance(policy, str) else policy
    tuning = _Tuning(
        module=module,
        args=tuple(example_inputs),
        evaluate=evaluate,
        criterion=criterion or Criterion(),
        policy=wanted,
        options=options or TuneOptions(),
    )
    return tuning.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuning:
    module: torch.nn.Module
    args: tuple[Any, ...]
    evaluate: Evaluate
    criterion: Criterion
    policy: Policy
    options: TuneOptions

    def run(self) -> TorchOutcome:
        with torch.no_grad():
            baseline = float(self.evaluate(self.module))
        if math.isnan(baseline):
            raise ModelError("the fp32 module's metric is NaN", fix="check data and metric")
        captured = frontend.capture(
            self.module, self.args, dynamic_shapes=self.options.dynamic_shapes
        )
        device = device_of(self.module, self.args)
        obstacle = look_before_leaping(self.policy, device)
        planner, proposals = self._proposals(captured, device)
        if obstacle or not proposals:
            why = obstacle or "the rules leave no op a lower format"
            return self._unchanged(planner, baseline, why, ())
        return self._search(planner, captured, proposals, baseline)

    def _proposals(
        self, captured: Captured, device: str
    ) -> tuple[TorchPlanner, list[Proposal]]:
        unsupported: frozenset[str] = frozenset()
        while True:
            planner = make_torch_planner(
                captured.graph,
                self.policy,
                device,
                user_rules=(*self.options.user_rules, *active()),
                unsupported=unsupported,
                measured=True,
                shapes=hinted_shapes(captured.binding),
            )
            lowest = finish(captured, planner.lowest())
            missing = missing_kernels(captured, lowest, self.args, None) - unsupported
            if not missing:
                break
            unsupported |= missing
        units, points = planner.units()
        if not units.members:
            return planner, []
        flat = flat_inputs(captured, self.args, None)
        errors = sensitivities(
            captured, points, planner.low, flat, probing=self.options.probing
        )
        steps = planner.steps(units, points, errors)
        kept = (s for s in spread(steps, self.options.steps) if s.low.any())
        return planner, [planner.proposal(units, s) for s in kept]

    def _search(
        self,
        planner: TorchPlanner,
        captured: Captured,
        proposals: Sequence[Proposal],
        baseline: float,
    ) -> TorchOutcome:
        modules: dict[str, torch.nn.Module] = {
            p.plan.digest: finish(captured, p.plan) for p in proposals
        }
        times = self._times({"": self.module, **modules})
        candidates = [
            Candidate(
                name=p.name,
                plan=p.plan,
                error=p.error,
                latency_s=times[p.plan.digest].median_s,
                casts=cast_count(captured.graph, frontend.planned_edits(captured, p.plan)),
            )
            for p in proposals
        ]
        trials: list[TorchTrial] = []

        def passes(candidate: Candidate) -> bool:
            with torch.no_grad():
                metric = float(self.evaluate(modules[candidate.plan.digest]))
            trial = TorchTrial(
                name=candidate.name,
                plan=candidate.plan,
                metric=metric,
                passed=self.criterion.passes(metric, baseline),
                latency_s=candidate.latency_s,
            )
            trials.append(trial)
            return trial.passed

        chained = chain(candidates, times[""].median_s)
        found = fastest_passing(chained, passes)
        if found is None:
            why = "every faster plan misses the criterion" if chained else "no plan is faster"
            return self._unchanged(planner, baseline, why, tuple(trials))
        won = ratio(times[""], times[found.plan.digest]).median
        if won < _MIN_SPEEDUP:
            why = f"{found.name} is not faster: {won:.3g}x fp32's speed"
            return self._unchanged(planner, baseline, why, tuple(trials))
        return TorchOutcome(
            model=modules[found.plan.digest],
            plan=found.plan,
            improved=True,
            why=f"{found.name} keeps the criterion",
            baseline=baseline,
            metric=next(t.metric for t in trials if t.plan is found.plan),
            speedup=won,
            casts=found.casts,
            trials=tuple(trials),
        )

    def _times(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, Latency]:
        prepared = {name: self.options.prepare(m) for name, m in modules.items()}

        def call(run: Callable[..., Any]) -> object:
            with torch.no_grad():
                return run(*self.args)

        was = self.module.training
        self.module.eval()
        try:
            calls = {n: (lambda r=run: call(r)) for n, run in prepared.items()}
            return latency(calls, min_time_s=_RANK_TIME_S, repeats=7)
        finally:
            self.module.train(was)

    def _unchanged(
        self,
        planner: TorchPlanner,
        baseline: float,
        why: str,
        trials: tuple[TorchTrial, ...],
    ) -> TorchOutcome:
        return TorchOutcome(
            model=self.module,
            plan=planner.highest(why),
            improved=False,
            why=why,
            baseline=baseline,
            metric=baseline,
            speedup=1.0,
            casts=0,
            trials=trials,
        )


def spread(steps: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` steps, the fastest among them, evenly over the logarithm of error."""
    lowered = [s for s in steps if s.error > 0]
    if len(lowered) <= most:
        return list(steps)
    logs = [math.log(s.error) for s in lowered]
    wanted = [logs[0] + (logs[-1] - logs[0]) * k / (most - 1) for k in range(most)]
    picks = {min(range(len(logs)), key=lambda i, w=w: abs(logs[i] - w)) for w in wanted}
    return [lowered[i] for i in sorted(picks | {len(lowered) - 1})]
