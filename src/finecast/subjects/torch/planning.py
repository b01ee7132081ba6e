"""What is particular to plans of PyTorch: missing kernels, costs, the error of autocast."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch

from finecast import rules
from finecast.engines.base import Engine
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.autocast import autocast_formats, saved_ops
from finecast.engines.torch.costs import CompiledCost
from finecast.engines.torch.kernel_check import missing_kernels
from finecast.engines.torch.kernels import KernelTimes
from finecast.engines.torch.rates import rate_here
from finecast.errors import ModelError, UsageError
from finecast.frontends.torch import Captured, TorchPrepared, applied
from finecast.frontends.torch.probing import Errors, first_order, own_outputs, probe_all
from finecast.frontends.torch.reader import FxBinding
from finecast.frontends.torch.runnable import Isolated
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.flops import Shapes
from finecast.pipeline.search import SAME_TIME
from finecast.planning.choices import Choice
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner, lowest
from finecast.planning.points import Point, RoundingPoints, find_points
from finecast.planning.problem import Analysis, Roundings, roundings
from finecast.planning.sensitivity import Sensitivity, joined
from finecast.planning.units import make_units
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.base import Reason
from finecast.rules.facts import ValueFacts
from finecast.rules.guests import FINECAST, GUESTS, TRAINING, Overrides, guest_of
from finecast.rules.override import active, check_overrides, current
from finecast.rules.policy import Policy
from finecast.rules.training import TRAINING_RULES
from finecast.subjects.engine.planning import context_of, planner_in

# By format whose ops read codes: where plans round to it, and the errors of that.
Sensitivities = Mapping[Format, tuple[RoundingPoints, Sensitivity]]
_PROMOTED: Final = (
    "it reads fp32: rounded, it would add errors that torch.autocast does not make"
)
_SAVED: Final = "the backward pass reads its result, which torch.autocast saves in this format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judging:
    """How ops are judged.

    Attributes:
        facts: Facts of values.
        user_rules: The user's rule functions by name.
        measured: Whether errors will be measured.
        broken: Reasons why ops, by name, stay in fp32.
        rule_set: Which rules judge ops: a name that ``rule_set_of`` gives.
        overrides: Overrides, some of which may be for other graphs; None for those that are
            active around the caller, which have to be for ops of this graph.
    """

    facts: Mapping[int, ValueFacts] = field(default_factory=dict[int, ValueFacts])
    user_rules: Sequence[tuple[str, UserRule]] = ()
    measured: bool = False
    broken: Mapping[str, str] = field(default_factory=dict[str, str])
    rule_set: str = FINECAST
    overrides: Overrides | None = None


_USUAL: Final = Judging()


def planner_of(
    prepared: TorchPrepared, policy: Policy, engine: Engine, how: Judging = _USUAL
) -> Planner:
    """Let the rules of a set judge every op.

    Raises:
        RuleConflictError: If they leave an op no format.
        UsageError: If the graph cannot state a format, or an override names no op of it.
        ModelError: If a guest's rules lack an op.
    """
    graph = prepared.graph
    if how.overrides is None:
        check_overrides(graph)
    held = current() if how.overrides is None else how.overrides
    # A guest's rules are of another kind: they apply overrides themselves.
    guest = guest_of(how.rule_set) if how.rule_set in GUESTS else None
    context = context_of(
        prepared,
        policy,
        engine,
        facts=how.facts,
        user_rules=(*how.user_rules, *(() if guest else active(held))),
        measured=how.measured,
        broken=how.broken,
    )
    if guest is not None:
        low = _only_format(policy, how.rule_set)
        return planner_in(context, prepared, engine, guest.rules(graph, low, held))
    training = how.rule_set == TRAINING
    return planner_in(context, prepared, engine, TRAINING_RULES if training else rules.RULES)


def judged(
    prepared: TorchPrepared,
    policy: Policy,
    engine: TorchEngine,
    leaves: Sequence[Any],
    how: Judging,
) -> Planner:
    """The planner, once no op has a low format in which its kernel is missing or wrong here.

    Ops are judged again until the lowest plan, run on ``leaves``, needs no such kernel.

    Raises:
        ModelError: If the module does not run on ``leaves``, or not with the formats that the
            user gave to ops.
    """
    captured = prepared.captured
    assert captured is not None
    while True:
        planner = planner_of(prepared, policy, engine, how)
        lowest = applied(captured, planner.lowest()).model
        try:
            missing = missing_kernels(lowest, leaves)
        except (RuntimeError, NotImplementedError):
            _check_runs(captured, leaves)
            raise
        if not missing:
            return planner
        if not engine.lacking:
            _check_runs(captured, leaves)
        if missing <= engine.lacking:
            raise ModelError(
                f"the converted module does not run: {', '.join(sorted(missing))}",
                fix="exclude these ops by a rule, and report the module",
            )
        engine = engine.without(missing)


def _check_runs(captured: Captured, leaves: Sequence[Any]) -> None:
    """Raise ModelError if the module fails as it came, on its own example inputs."""
    try:
        with torch.no_grad():
            Isolated(captured.module).leaves(leaves)
    except (RuntimeError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"the module does not run on its example inputs: {first}",
            fix="give inputs on which the module itself runs",
        ) from error


def _only_format(policy: Policy, rule_set: str) -> Format:
    """The policy's one low format; raises UsageError if there are several."""
    if len(policy.formats) > 1:
        raise UsageError(
            f"the rule set {rule_set} takes one format, not {policy.label}",
            fix="name one of them",
        )
    return policy.format


def products_low(planner: Planner) -> Planner:
    """``planner`` with every product in the first low format that it may have."""
    asked = lowest(planner.graph, planner.permissions, *planner.policy.formats)
    nodes = planner.graph.nodes
    narrowed = {
        i: replace(p, formats=frozenset({asked[i]}))
        if by_name(nodes[i].op).matmul_engine
        else p
        for i, p in planner.permissions.items()
    }
    return replace(planner, permissions=narrowed)


def as_autocast(planner: Planner) -> Planner:
    """``planner``, restricted in two ways to what ``torch.autocast`` does.

    Ops that autocast keeps in fp32 stay in fp32, and ops whose results it saves for the
    backward pass in a low format are low, as far as the rules permit.
    """
    graph, permissions = planner.graph, planner.permissions
    followed = autocast_formats(graph, permissions, planner.policy.formats)
    saved = saved_ops(graph)
    narrowed = dict(permissions)
    for node, permission in permissions.items():
        fmt = followed[node]
        text = _PROMOTED if fmt is Format.FP32 else _SAVED if node in saved else ""
        if text and len(permission.formats) > 1:
            reason = Reason(rule="autocast", text=text, permits=(fmt.label,))
            narrowed[node] = replace(
                permission, formats=frozenset({fmt}), reasons=(*permission.reasons, reason)
            )
    return replace(planner, permissions=narrowed)


def analysis_of(
    planner: Planner,
    cost: CostModel,
    points: Sequence[Point],
    errors: Mapping[Format, Errors],
    codes: Sensitivities | None = None,
) -> Analysis:
    """The analysis of a planner's graph, each op a unit: fused kernels compute in fp32 inside.

    The error of a point counts if any op on its path has the format. ``codes`` has the
    sensitivities of formats whose ops read codes.
    """
    graph = planner.graph
    units = make_units(graph, planner.permissions, planner.policy.formats)
    paths = [sorted({units.of[n] for n in p.path}) for p in points]
    constants = np.zeros(len(units.members))
    floats = {f: Roundings(units=constants, lists=paths, errors=e) for f, e in errors.items()}
    saturation, found = joined({f: s for f, (_, s) in (codes or {}).items()})
    coded = {
        fmt: roundings(units, where, found[fmt], fmt, {})
        for fmt, (where, _) in (codes or {}).items()
    }
    either = floats | coded
    rounded = {f: either[f] for f in planner.policy.formats if f in either}
    made = Analysis.of(
        graph, units, cost, rounded, probes=sum(s.probes for s in found.values())
    )
    return replace(made, saturation=saturation)


def points_of(planner: Planner) -> tuple[Point, ...]:
    """The points where plans may round, of ops to which the rules leave a choice."""
    units = make_units(planner.graph, planner.permissions, planner.policy.formats)
    return find_points(planner.graph, frozenset(units.of))


def compiled_cost(
    graph: Graph,
    policy: Policy,
    device: str,
    *,
    shapes: Shapes | None = None,
    binding: FxBinding | None = None,
) -> CompiledCost:
    """The cost model; with ``binding``, the FX nodes, single kernels are measured."""
    formats = (Format.FP32, *policy.formats)
    kernels = None
    if binding is not None:
        threads = torch.get_num_threads() if device == "cpu" else 1
        kernels = KernelTimes(
            graph=graph, binding=binding, device=device, formats=formats, threads=threads
        )
    rates = {f: rate_here(device, f) for f in formats}
    return CompiledCost(graph=graph, rates=rates, shapes=shapes or {}, kernels=kernels)


def sensitivities(
    captured: Captured,
    points: Sequence[Point],
    formats: Sequence[Format],
    args: Sequence[Any],
    *,
    probing: bool = False,
    counted: Collection[int] | None = None,
    progress: Progress = silent,
) -> dict[Format, Errors]:
    """Errors of ``points`` by format: from one backward pass, or by probing.

    They are probed if ``probing`` is set, or if an op has no gradient. ``counted`` are numbers
    of the outputs that errors are of; None for those that copy no input.
    """
    if counted is None:
        counted = own_outputs(captured, args)

    def told(done: int, total: int) -> None:
        progress("sensitivity", done, total)

    def probed() -> dict[Format, Errors]:
        return {low: probe_all(captured, points, low, args, counted, told) for low in formats}

    if probing:
        return probed()
    try:
        return {
            low: first_order(captured, points, low, args, counted, told) for low in formats
        }
    except (RuntimeError, NotImplementedError):
        return probed()


def choose(found: Sequence[Choice], budget: float = math.inf) -> Choice:
    """The fastest choice whose squared error is within ``budget``.

    Of equally fast ones the most accurate; if none is within it, the most accurate of all.
    """
    least = min(p.error for p in found)
    within = [p for p in found if p.error <= max(budget, least)]
    fastest = min(p.time_s for p in within)
    return min((p for p in within if p.time_s <= SAME_TIME * fastest), key=lambda p: p.error)


def device_of(module: torch.nn.Module, args: Sequence[Any]) -> str:
    """The device that the module runs on: ``cpu``, ``cuda``."""
    tensors = (*module.parameters(), *(a for a in args if isinstance(a, torch.Tensor)))
    return next((t.device.type for t in tensors), "cpu")
