"""Plans of a captured module: permissions, costs, sensitivities, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from finecast import rules
from finecast.assign import highest, lowest, make_plan, pick
from finecast.assignment import PINNED_HIGH, Problem
from finecast.cost import CostModel
from finecast.errors import UsageError
from finecast.flops import Shapes
from finecast.formats import Format
from finecast.frontends.torch import Captured
from finecast.frontends.torch.points import Point, find_points
from finecast.frontends.torch.probing import Errors, first_order, probe_all
from finecast.frontends.torch.raf import raf_rules
from finecast.frontends.torch.reader import Binding
from finecast.frontier import Step, frontier
from finecast.graph import Graph
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.problem import UnitTimes, build_problem
from finecast.rules import Context, Permission, UserRule
from finecast.sensitivity import Sensitivity
from finecast.torch.costs import CompiledCost
from finecast.torch.inside import TRAINING_RULES
from finecast.torch.kernels import KernelTimes
from finecast.torch.rates import rate_here
from finecast.units import RoundingPoints, Units, make_units

ENGINE: Final = "torch"
# A plan that is predicted to be slower than the fastest by less than this is as fast, as far
# as a model of costs can tell; among those the most accurate is taken.
SAME_TIME: Final = 1.01


class RuleSet(Enum):
    """Whose rules judge: finecast's, as inference or training needs them, or RAF's lists."""

    FINECAST = "finecast"
    TRAINING = "training"
    RAF = "raf"

    @classmethod
    def parse(cls, name: str) -> RuleSet:
        """Read a rule set's name.

        Raises:
            UsageError: If there is none of that name.
        """
        try:
            return cls(name.strip().lower())
        except ValueError:
            known = ", ".join(r.value for r in cls)
            raise UsageError(f"unknown rule set {name!r}", fix=f"use one of {known}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan, its predicted time and squared relative output error."""

    name: str
    plan: Plan
    time_s: float
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlanner:
    """Makes plans of one graph under one policy."""

    graph: Graph
    policy: Policy
    permissions: Mapping[int, Permission]
    cost: CostModel

    @property
    def low(self) -> Format:
        """The format that the policy lowers to."""
        return self.policy.format

    def plan(self, formats: Mapping[int, Format], because: str) -> Plan:
        """The plan that gives node i ``formats[i]``."""
        return make_plan(
            self.graph,
            formats,
            self.permissions,
            self.policy,
            opset=0,
            engine=ENGINE,
            because=because,
        )

    def lowest(self) -> Plan:
        """Everything that may be low is."""
        return self.plan(lowest(self.permissions, self.low), "every op that may be low is")

    def highest(self, because: str = "fp32 where permitted") -> Plan:
        """Everything that may stay fp32 does."""
        return self.plan(highest(self.permissions, self.low), because)

    def units(self) -> tuple[Units, tuple[Point, ...]]:
        """One unit an op: fused kernels compute in fp32 inside, whatever is stored."""
        units = make_units(self.graph, self.permissions, self.low)
        return units, find_points(self.graph, frozenset(units.of))

    def steps(
        self, units: Units, points: Sequence[Point], errors: Errors, *, most: int | None = None
    ) -> tuple[Step, ...]:
        """The frontier of predicted time and error, fastest last."""
        times = UnitTimes(
            high_s=self._times(units, Format.FP32), low_s=self._times(units, self.low)
        )
        problem = build_problem(
            self.graph,
            units,
            _NO_POINTS,
            self.permissions,
            times,
            lambda v: (
                self.cost.cast_time_s(v, Format.FP32, self.low),
                self.cost.cast_time_s(v, self.low, Format.FP32),
            ),
            Sensitivity.zero(_NO_POINTS),
            io={},
        )
        problem = _with_points(problem, units, points, errors)
        return frontier(problem, max_steps=most)

    def _times(self, units: Units, fmt: Format) -> NDArray[np.float64]:
        nodes = self.graph.nodes
        return np.array(
            [
                sum(self.cost.node_time_s(self.graph, nodes[i], fmt) for i in members)
                for members in units.members
            ]
        )

    def proposal(self, units: Units, step: Step) -> Proposal:
        """The plan of one step of the frontier."""
        side = {n: bool(step.low[u]) for n, u in units.of.items()}
        formats = {
            i: pick(p, self.low, lowered=side.get(i, False))
            for i, p in self.permissions.items()
        }
        because = (
            f"least cost at {step.lam_high:.3g} s per squared error: predicted"
            f" {1e3 * step.time_s:.4g} ms, relative output error {step.error**0.5:.3g}"
        )
        plan = self.plan(formats, because)
        return Proposal(
            name=f"step {step.index}", plan=plan, time_s=step.time_s, error=step.error
        )


_NO_POINTS: Final = RoundingPoints(classes=(), class_of={}, weights=(), weight_units=())


def _with_points(
    problem: Problem, units: Units, points: Sequence[Point], errors: Errors
) -> Problem:
    """One more value a point: its error is paid once any op on its path is low."""
    paths = [sorted({units.of[n] for n in p.path}) for p in points]
    pointer = problem.consumer_ptr[-1] + np.cumsum([len(p) for p in paths], dtype=np.int64)
    free = np.zeros(len(points))
    return replace(
        problem,
        producer=np.append(problem.producer, np.full(len(points), PINNED_HIGH)),
        consumer_ptr=np.append(problem.consumer_ptr, pointer),
        consumer_unit=np.append(
            problem.consumer_unit, np.array([u for p in paths for u in p], dtype=np.int64)
        ),
        down_cost=np.append(problem.down_cost, free),
        up_cost=np.append(problem.up_cost, free),
        value_error=np.append(problem.value_error, errors),
    )


def make_torch_planner(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    unsupported: frozenset[str] = frozenset(),
    measured: bool,
    rule_set: RuleSet = RuleSet.FINECAST,
    shapes: Shapes | None = None,
    binding: Binding | None = None,
) -> TorchPlanner:
    """Let the rules judge every op; ``unsupported`` are native ops without a low kernel.

    With ``binding``, the FX nodes of the graph, single kernels are measured.
    """
    context = Context(
        graph=graph,
        policy=policy,
        kernels=lambda native, fmt: False if native in unsupported else None,
        engine=ENGINE,
        user_rules=user_rules,
        measured=measured,
    )
    judges = (
        raf_rules(graph, policy.format)
        if rule_set is RuleSet.RAF
        else TRAINING_RULES
        if rule_set is RuleSet.TRAINING
        else rules.RULES
    )
    formats = (Format.FP32, policy.format)
    rates = {f: rate_here(device, f) for f in formats}
    kernels = (
        KernelTimes(
            graph=graph,
            binding=binding,
            device=device,
            formats=formats,
            threads=torch.get_num_threads() if device == "cpu" else 1,
        )
        if binding is not None
        else None
    )
    return TorchPlanner(
        graph=graph,
        policy=policy,
        permissions=rules.permit(context, judges),
        cost=CompiledCost(graph=graph, rates=rates, shapes=shapes or {}, kernels=kernels),
    )


def sensitivities(
    captured: Captured,
    points: Sequence[Point],
    low: Format,
    args: Sequence[Any],
    *,
    probing: bool = False,
) -> Errors:
    """By one backward pass; by probing if asked for, or where an op has no gradient."""
    if probing:
        return probe_all(captured, points, low, args)
    try:
        return first_order(captured, points, low, args)
    except (RuntimeError, NotImplementedError):
        return probe_all(captured, points, low, args)


def choose(proposals: Sequence[Step]) -> Step:
    """The most accurate of those that are as fast as the fastest."""
    fastest = min(p.time_s for p in proposals)
    return min(
        (p for p in proposals if p.time_s <= SAME_TIME * fastest), key=lambda p: p.error
    )


def look_before_leaping(policy: Policy, device: str) -> str:
    """Why ``policy`` should not be followed here; empty if it should.

    A format that is slower than fp32 is never chosen for speed. Asked for by name
    (``all:fp16``), it is given, with a warning of the measured ratio.

    Raises:
        UsageError: If PyTorch's ops do not compute in the format at all.
    """
    if policy.scope is Scope.NONE:
        return "scope none changes nothing"
    if policy.format.operands_only:
        raise UsageError(
            f"PyTorch's ops do not compute in {policy.format.label}",
            fix="use bf16 or fp16 (tf32 is a switch: torch.set_float32_matmul_precision)",
        )
    speed = rate_here(device, policy.format).speed
    if speed >= 1:
        return ""
    label = policy.format.label
    text = f"{label} is {1 / speed:.1f} times slower than fp32 on this {device} (measured)"
    if policy.scope is Scope.AUTO:
        return text
    warnings.warn(f"{text}; converting all the same, as asked by name", stacklevel=3)
    return ""


def device_of(module: torch.nn.Module, args: Sequence[Any]) -> str:
    """The device that the module runs on: ``cpu``, ``cuda``."""
    tensors = (*module.parameters(), *(a for a in args if isinstance(a, torch.Tensor)))
    return next((t.device.type for t in tensors), "cpu")
