"""What is known of a model before a plan is chosen: permissions, kernels, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from finecast import rules
from finecast.engines import EMULATOR
from finecast.engines.base import Engine, Feeds, KernelTime
from finecast.engines.faults import faults
from finecast.engines.integers import INTEGER_ENGINES
from finecast.engines.kernels import kernel_query
from finecast.engines.loading import load_model
from finecast.engines.probe import probe_one, speed_of
from finecast.errors import EngineError, UsageError
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules import Context
from finecast.rules.facts import ValueFacts
from finecast.rules.override import active, check_overrides
from finecast.rules.policy import Policy
from finecast.subjects.engine.casting import measure_casts
from finecast.subjects.engine.native import NativeSource, PreparedModel

# Runs of a profile: enough that each kernel once had a core for itself, on a busy machine too.
_PROFILE_S: Final = 0.5
_MOST_REPEATS: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Kernels of the fp32 model and of the lowest plans, by one engine on the same feeds.

    ``low`` has those formats whose lowest plan the engine runs.
    """

    high: Sequence[KernelTime]
    low: Mapping[Format, Sequence[KernelTime]]

    @property
    def low_s(self) -> float:
        """Seconds of the fastest of the lowest plans."""
        return min(sum(k.time_s for k in kernels) for kernels in self.low.values())


def make_planner(
    prepared: PreparedModel,
    policy: Policy,
    engine: Engine,
    *,
    facts: Mapping[int, ValueFacts] | None = None,
    user_rules: tuple[tuple[str, rules.UserRule], ...] = (),
    measured: bool = False,
) -> Planner:
    """Let the rules judge every op, and the overrides of the blocks around the caller.

    Raises:
        RuleConflictError: If they leave an op no format.
        UsageError: If the model can state none of a format's numbers, or an override names
            no op of it.
    """
    check_stated(policy, engine, prepared)
    check_overrides(prepared.graph)
    name = f"{EMULATOR}:{engine.device}" if engine.name == EMULATOR else engine.name
    context = Context(
        graph=prepared.graph,
        policy=policy,
        facts=facts or {},
        kernels=kernel_query(engine),
        engine=name,
        faults=faults(engine.name, engine.device, prepared.graph, policy.formats),
        user_rules=(*user_rules, *active()),
        measured=measured,
        casts_around=frozenset(f for f in policy.formats if prepared.can_cast(f)),
    )
    return Planner(
        graph=prepared.graph,
        policy=policy,
        permissions=rules.permit(context),
        engine=engine.name,
        opset=prepared.minimal_opset,
        from_type=prepared.from_type,
    )


def check_stated(policy: Policy, engine: Engine, prepared: PreparedModel) -> None:
    """Raise UsageError for a format that the engine lacks, or such a model cannot state."""
    for fmt in policy.formats:
        if fmt is Format.TF32 and engine.name != EMULATOR:
            raise UsageError(
                f"no engine here computes in {fmt.label}",
                fix="name the device with --target (target=...), or use bf16 or fp16",
            )
        if fmt not in prepared.states:
            _refuse(fmt, prepared)
        if fmt.scaled and engine.name != EMULATOR and not probe_one(engine, fmt).runs:
            raise UsageError(
                speed_of(engine, fmt).text,
                where=f"--auto-cast-type {fmt.label}",
                fix=f"use bf16 or fp16, or {' or '.join(sorted(INTEGER_ENGINES))} on a CPU"
                " with integer products (VNNI)",
            )


def _refuse(fmt: Format, prepared: PreparedModel) -> NoReturn:
    if fmt.scaled:
        raise UsageError(
            f"{fmt.label} is planned for ONNX models, and this is one of {prepared.library}",
            where=f"--auto-cast-type {fmt.label}",
            fix="use bf16 or fp16, or give the model as ONNX",
        )
    raise UsageError(
        f"{prepared.library} has no type {fmt.label}: a model cannot state it",
        fix="use bf16 or fp16",
    )


def profile_ends(
    source: NativeSource, planner: Planner, engine: Engine, feeds: Feeds
) -> Profiles:
    """Profile the fp32 model and the lowest plan in each format, once each, in ``engine``.

    Raises:
        EngineError: If the engine runs none of the lowest plans.
    """

    def kernels(plan: Plan) -> Sequence[KernelTime]:
        session = load_model(engine, source.build(plan).model, profiling=True)
        once_s = sum(k.time_s for k in session.profile(feeds, repeats=1))
        repeats = _PROFILE_S / once_s if once_s else _MOST_REPEATS
        return session.profile(feeds, repeats=min(max(int(repeats), 5), _MOST_REPEATS))

    low: dict[Format, Sequence[KernelTime]] = {}
    failed: EngineError | None = None
    for fmt in planner.policy.formats:
        try:
            low[fmt] = kernels(planner.lowest(fmt))
        except EngineError as error:  # others of the formats may do
            failed = failed or error
    if failed is not None and not low:
        raise failed
    return Profiles(high=kernels(planner.highest()), low=low)


def measured_cost(
    graph: Graph, profiles: Profiles, engine: Engine, facts: Mapping[int, ValueFacts]
) -> MeasuredCost:
    """Times by node: a kernel's time is shared evenly by the ops in it."""
    known = {n.name for n in graph.nodes}
    times: dict[Format, dict[str, float]] = {}
    for fmt, kernels in ((Format.FP32, profiles.high), *profiles.low.items()):
        shares = times.setdefault(fmt, {})
        for kernel in kernels:
            inside = [name for name in kernel.ops if name in known]
            for name in inside:
                shares[name] = shares.get(name, 0.0) + kernel.time_s / len(inside)
    lows = sorted(profiles.low, key=lambda fmt: fmt.scaled)  # casts between floats, if any
    rate = measure_casts(engine, lows[0])
    return MeasuredCost(
        times_s=times,
        shapes={i: f.shape for i, f in facts.items()},
        cast_overhead_s=rate.overhead_s,
        cast_bandwidth_gb_s=rate.bandwidth_gb_s,
    )


def kernel_nodes(graph: Graph, kernels: Sequence[KernelTime]) -> list[frozenset[int]]:
    """Node ids of each kernel."""
    ids = {n.name: n.id for n in graph.nodes}
    return [frozenset(ids[name] for name in k.ops if name in ids) for k in kernels]
