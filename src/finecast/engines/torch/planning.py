"""Plans of a captured module: permissions, costs, sensitivities, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

import numpy as np
import torch

from finecast import rules
from finecast.engines.faults import faults
from finecast.engines.probe import Speed
from finecast.engines.torch.autocast import autocast_formats, saved_ops
from finecast.engines.torch.costs import CompiledCost
from finecast.engines.torch.integers import takes_codes
from finecast.engines.torch.kernels import KernelTimes
from finecast.engines.torch.rates import rate_here
from finecast.errors import UsageError
from finecast.frontends.torch import Captured
from finecast.frontends.torch.probing import Errors, first_order, own_outputs, probe_all
from finecast.frontends.torch.reader import FxBinding
from finecast.graph import Graph, Node
from finecast.naming import look_up
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.flops import Shapes
from finecast.planning.assign import lowest
from finecast.planning.choices import Choice
from finecast.planning.cost import CostModel
from finecast.planning.planner import Planner
from finecast.planning.points import Point, RoundingPoints, find_points
from finecast.planning.problem import Analysis, Roundings, roundings
from finecast.planning.sensitivity import Sensitivity, joined
from finecast.planning.units import make_units
from finecast.progress import Progress, silent
from finecast.rules import Context, UserRule
from finecast.rules.base import Reason
from finecast.rules.facts import ValueFacts
from finecast.rules.override import Overrides, active
from finecast.rules.policy import Policy, Scope
from finecast.rules.raf import raf_rules
from finecast.rules.training import TRAINING_RULES

ENGINE: Final = "torch"
# By format whose ops read codes: where plans round to it, and the errors of that.
Sensitivities = Mapping[Format, tuple[RoundingPoints, Sensitivity]]
# Plans whose predicted time is within this factor of the fastest count as equally fast: a cost
# model cannot tell them apart. The most accurate of them is taken.
SAME_TIME: Final = 1.01
_PROMOTED: Final = (
    "it reads fp32: rounded, it would add errors that torch.autocast does not make"
)
_SAVED: Final = "the backward pass reads its result, which torch.autocast saves in this format"


class RuleSet(Enum):
    """Which rules judge ops: finecast's for inference or for training, or RAF's lists."""

    FINECAST = "finecast"
    TRAINING = "training"
    RAF = "raf"

    @classmethod
    def parse(cls, name: str) -> RuleSet:
        """Read a rule set's name.

        Raises:
            UsageError: If there is none of that name.
        """
        return look_up(name, {r.value: r for r in cls}, what="rule set", where="rule_set")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a module besides its graph.

    Attributes:
        measured: Whether errors will be measured.
        facts: Facts of values, from which scaled formats take their ranges.
        unsupported: Native names of ops without a low kernel.
    """

    measured: bool
    facts: Mapping[int, ValueFacts] = field(default_factory=dict[int, ValueFacts])
    unsupported: frozenset[str] = frozenset()


def make_torch_planner(
    graph: Graph,
    policy: Policy,
    *,
    known: Known,
    user_rules: Sequence[tuple[str, UserRule]] = (),
    rule_set: RuleSet = RuleSet.FINECAST,
    overrides: Overrides | None = None,
) -> Planner:
    """Let the rules judge every op.

    ``overrides`` are by default those of the ``with`` blocks around the caller.
    """
    # RAF's rule set applies overrides itself: its rules are of another kind.
    overriding = () if rule_set is RuleSet.RAF else active(overrides)

    def kernels(node: Node, fmt: Format) -> bool | None:
        works = takes_codes(node) if fmt.has_scales else node.native not in known.unsupported
        return None if works else False

    context = Context(
        graph=graph,
        policy=policy,
        facts=known.facts,
        kernels=kernels,
        engine=ENGINE,
        faults=faults(ENGINE, "", graph, policy.formats),
        user_rules=(*user_rules, *overriding),
        measured=known.measured,
        casts_around=frozenset(f for f in policy.formats if f.has_scales),
    )
    judges = (
        raf_rules(graph, _only_format(policy), overrides)
        if rule_set is RuleSet.RAF
        else TRAINING_RULES
        if rule_set is RuleSet.TRAINING
        else rules.RULES
    )
    permissions = rules.permit(context, judges)
    return Planner(graph=graph, policy=policy, permissions=permissions, engine=ENGINE)


def _only_format(policy: Policy) -> Format:
    """The policy's one low format; raises UsageError if there are several."""
    if len(policy.formats) > 1:
        raise UsageError(
            f"RAF's rule set takes one format, not {policy.label}", fix="name one of them"
        )
    return policy.format


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


def check_formats(policy: Policy, coded: Collection[Format] = ()) -> None:
    """Raise UsageError for a format that PyTorch's ops do not compute in.

    ``coded`` are formats of codes that kernels of the engine which runs the module take.
    """
    for fmt in policy.formats:
        if not fmt.encodes_results and fmt not in coded:
            raise UsageError(
                f"PyTorch's ops do not compute in {fmt.label}",
                fix="use bf16 or fp16 (tf32 is a switch: torch.set_float32_matmul_precision)",
            )


def speed_here(device: str, fmt: Format) -> Speed:
    """Whether products are faster in ``fmt``, as measured."""
    speed = rate_here(device, fmt).speed
    relation = (
        f"{1 / speed:.1f} times slower than" if speed < 1 else f"{speed:.2g} times as fast as"
    )
    return Speed(
        gains=speed >= 1, text=f"{fmt.label} is {relation} fp32 on this {device} (measured)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A policy as it is followed on a device.

    Attributes:
        policy: The policy without formats that are slower there.
        obstacle: Why the policy should not be followed at all; empty if it should.
        told: Notes for the user on slow formats.
    """

    policy: Policy
    obstacle: str = ""
    told: tuple[str, ...] = ()


def formats_to_follow(policy: Policy, device: str) -> Followed:
    """The policy without formats that are slower on ``device``.

    Scope ``auto`` leaves out formats that are slower than fp32 and says so; if all are, that
    is the obstacle. In other scopes (``all:fp16``) all formats are kept, and the measured
    ratio is told.

    Raises:
        UsageError: If PyTorch's ops do not compute in a format at all.
    """
    if policy.scope is Scope.NONE:
        return Followed(policy=policy, obstacle="scope none changes nothing")
    check_formats(policy)
    speeds = {fmt: speed_here(device, fmt) for fmt in policy.formats}
    slow = {fmt: s.text for fmt, s in speeds.items() if not s.gains}
    if policy.scope is Scope.AUTO and len(slow) == len(speeds):
        return Followed(policy=policy, obstacle="; ".join(slow.values()))
    left = tuple(fmt for fmt in speeds if fmt not in slow)
    narrowed = replace(policy, formats=left) if policy.scope is Scope.AUTO else policy
    then = "left out" if policy.scope is Scope.AUTO else "converting all the same, as asked"
    told = tuple(f"{text}; {then}" for text in slow.values())
    return Followed(policy=narrowed, told=told)


def device_of(module: torch.nn.Module, args: Sequence[Any]) -> str:
    """The device that the module runs on: ``cpu``, ``cuda``."""
    tensors = (*module.parameters(), *(a for a in args if isinstance(a, torch.Tensor)))
    return next((t.device.type for t in tensors), "cpu")
