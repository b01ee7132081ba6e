"""``tune``: the fastest plan of a module that keeps the accuracy asked for.

Laws: the result never misses the criterion and is never slower than fp32 here, run in the
same way; where nothing helps, the module comes back as it was, and ``why`` says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map_only

from finecast.edits import cast_count
from finecast.errors import ModelError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import Captured
from finecast.frontends.torch.capture import evaluating
from finecast.frontends.torch.reader import hinted_shapes
from finecast.measure.criterion import Criterion
from finecast.measure.timing import Latency, latency, ratio
from finecast.plan import Plan
from finecast.policy import Policy
from finecast.rules import UserRule
from finecast.rules.matching import check_names
from finecast.rules.override import check_overrides
from finecast.torch.convert import finish, warn_kept
from finecast.torch.kernel_check import flat_inputs, missing_kernels
from finecast.torch.planning import (
    Proposal,
    TorchPlanner,
    device_of,
    look_before_leaping,
    make_torch_planner,
    sensitivities,
)
from finecast.torch.session import runnable
from finecast.tuner.search import Candidate, chain, fastest_passing, none_passes

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
    """What tuning found; ``model`` is the module itself where nothing helped.

    ``baseline`` and ``metric`` are the evaluation of fp32 and of the result, ``baseline_s``
    and ``latency_s`` the medians of their times, ``speedup`` the median of the rounds' ratios
    and ``speedup_spread`` the distance of their quartiles. ``predicted_error`` is the relative
    output error that the sensitivities add up to.
    """

    model: torch.nn.Module
    plan: Plan
    improved: bool
    why: str
    baseline: float
    metric: float
    baseline_s: float
    latency_s: float
    speedup: float
    speedup_spread: float
    casts: int
    trials: tuple[TorchTrial, ...]
    predicted_error: float


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
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any],
    *,
    evaluate: Evaluate,
    example_kwargs: Mapping[str, Any] | None = None,
    baseline: float | None = None,
    criterion: Criterion | None = None,
    policy: str | Policy = "auto:bf16",
    options: TuneOptions | None = None,
) -> TorchOutcome:
    """Find the fastest plan for which ``evaluate(module)`` keeps ``criterion``.

    Args:
        module: The module, or an exported program.
        example_inputs: Positional inputs: plans are timed and their errors estimated on them.
        evaluate: The accuracy of a module.
        example_kwargs: Keyword inputs.
        baseline: What ``evaluate`` gives for ``module``, where that is known already.
        criterion: The accuracy to keep; by default at most 1% less.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        options: How plans are tried.

    Raises:
        ModelError: If the module cannot be captured, or its own metric is NaN.
    """
    wanted = Policy.parse(policy) if isinstance(policy, str) else policy
    tuning = _Tuning(
        source=module,
        module=runnable(module) if isinstance(module, ExportedProgram) else module,
        args=tuple(example_inputs),
        kwargs=dict(example_kwargs or {}),
        known=baseline,
        evaluate=evaluate,
        criterion=criterion or Criterion(),
        policy=wanted,
        options=options or TuneOptions(),
    )
    return tuning.run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuning:
    source: torch.nn.Module | ExportedProgram
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    known: float | None
    evaluate: Evaluate
    criterion: Criterion
    policy: Policy
    options: TuneOptions

    def run(self) -> TorchOutcome:
        captured = frontend.capture(
            self.source, self.args, self.kwargs, dynamic_shapes=self.options.dynamic_shapes
        )
        check_names(self.policy, captured.graph)
        warn_kept(captured.graph, self.policy)
        check_overrides(captured.graph)
        baseline = self.known
        if baseline is None:
            with torch.no_grad():
                baseline = float(self.evaluate(self.module))
        if math.isnan(baseline):
            raise ModelError("the fp32 module's metric is NaN", fix="check data and metric")
        self.criterion.check(baseline)
        device = device_of(self.module, self.args)
        policy, obstacle = look_before_leaping(self.policy, device)
        planner = self._planner(captured, policy, device, frozenset())
        if obstacle:
            return self._unchanged(planner, baseline, obstacle)
        planner = self._planner_that_runs(captured, device, planner)
        proposals = self._proposals(captured, planner)
        if not proposals:
            why = "the rules leave no op a lower format"
            return self._unchanged(planner, baseline, why)
        return self._search(planner, captured, proposals, baseline)

    def _planner(
        self, captured: Captured, policy: Policy, device: str, unsupported: frozenset[str]
    ) -> TorchPlanner:
        return make_torch_planner(
            captured.graph,
            policy,
            device,
            user_rules=self.options.user_rules,
            unsupported=unsupported,
            measured=True,
            shapes=hinted_shapes(captured.binding),
            binding=captured.binding,
        )

    def _planner_that_runs(
        self, captured: Captured, device: str, planner: TorchPlanner
    ) -> TorchPlanner:
        """The planner once every op whose low kernel is missing is known to it."""
        unsupported: frozenset[str] = frozenset()
        while True:
            lowest = finish(captured, planner.lowest())
            missing = missing_kernels(lowest, self.args, self.kwargs) - unsupported
            if not missing:
                return planner
            unsupported |= missing
            planner = self._planner(captured, planner.policy, device, unsupported)

    def _proposals(self, captured: Captured, planner: TorchPlanner) -> list[Proposal]:
        units, points = planner.units()
        if not units.members:
            return []
        flat = flat_inputs(self.args, self.kwargs)
        errors = sensitivities(
            captured, points, planner.policy.formats, flat, probing=self.options.probing
        )
        found = planner.choices(units, points, errors)
        kept = (s for s in spread(found, self.options.steps) if s.lowers)
        return [planner.proposal(units, s) for s in kept]

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
            target = self.criterion.target(baseline)
            missed = none_passes(len(trials), len(candidates), target)
            why = missed if chained else "no plan is faster"
            return self._unchanged(planner, baseline, why, times[""], tuple(trials))
        won = ratio(times[""], times[found.plan.digest])
        if won.median < _MIN_SPEEDUP:
            why = f"{found.name} is not faster: {won.median:.3g}x fp32's speed"
            return self._unchanged(planner, baseline, why, times[""], tuple(trials))
        return TorchOutcome(
            model=modules[found.plan.digest],
            plan=found.plan,
            improved=True,
            why=f"{found.name} keeps the criterion",
            baseline=baseline,
            metric=next(t.metric for t in trials if t.plan is found.plan),
            baseline_s=times[""].median_s,
            latency_s=found.latency_s,
            speedup=won.median,
            speedup_spread=won.spread,
            casts=found.casts,
            trials=tuple(trials),
            predicted_error=found.error**0.5,
        )

    def _times(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, Latency]:
        prepared = {name: self.options.prepare(m) for name, m in modules.items()}
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (self.args, self.kwargs))

        def call(run: Callable[..., Any]) -> object:
            with torch.no_grad():
                return run(*args, **kwargs)

        with evaluating(self.module), unchanged(modules.values()):
            calls = {n: (lambda r=run: call(r)) for n, run in prepared.items()}
            return latency(calls, min_time_s=_RANK_TIME_S, repeats=7)

    def _unchanged(
        self,
        planner: TorchPlanner,
        baseline: float,
        why: str,
        timed: Latency | None = None,
        trials: tuple[TorchTrial, ...] = (),
    ) -> TorchOutcome:
        latency_s = timed.median_s if timed is not None else math.nan
        return TorchOutcome(
            model=self.module,
            plan=planner.highest(why),
            improved=False,
            why=why,
            baseline=baseline,
            metric=baseline,
            baseline_s=latency_s,
            latency_s=latency_s,
            speedup=1.0,
            speedup_spread=0.0,
            casts=0,
            trials=trials,
            predicted_error=0.0,
        )


@contextmanager
def unchanged(modules: Iterable[torch.nn.Module]) -> Generator[None]:
    """Buffers that are written to inside have their numbers again after."""
    buffers = {id(b): b for module in modules for b in module.buffers()}
    before = [(b, b._version, b.detach().clone()) for b in buffers.values()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, was in before:
                if buffer._version != version:
                    buffer.copy_(was)


def deployed() -> Prepare:
    """``torch.compile`` where there is a C++ compiler for it, else the module as it is."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return lambda module: module
    return torch.compile


def spread(steps: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` steps, the fastest among them, evenly over the logarithm of error."""
    lowered = [s for s in steps if s.error > 0]
    if len(lowered) <= most:
        return list(steps)
    logs = [math.log(s.error) for s in lowered]
    wanted = [logs[0] + (logs[-1] - logs[0]) * k / (most - 1) for k in range(most)]
    picks = {min(range(len(logs)), key=lambda i, w=w: abs(logs[i] - w)) for w in wanted}
    return [lowered[i] for i in sorted(picks | {len(lowered) - 1})]
