"""From a model and a policy to a converted model, without tuning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from finecast.cost import RooflineCost
from finecast.edits import cast_count
from finecast.emulation import Emulation
from finecast.engines.base import Engine, Feeds
from finecast.engines.probe import probe_one
from finecast.errors import EngineError, UsageError
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile
from finecast.measure.environment import local_target
from finecast.measure.observe import observe
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.rules import UserRule
from finecast.rules.op_formats import unused
from finecast.sensitivity import Sensitivity
from finecast.targets import load_target
from finecast.tuner.analysis import (
    Planner,
    find_units,
    make_planner,
    measured_cost,
    profile_ends,
    propose,
)
from finecast.tuner.artefact import Destination, FeedMaker, Verified, write
from finecast.units import make_units, pattern_kernels, rounding_points

# A format whose kernels are no faster than this gains nothing: what short probes resolve.
_GAINS: Final = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A converted model and what was done to it. ``size_bytes`` are before and after."""

    plan: Plan
    nodes: int
    casts: int
    size_bytes: tuple[int, int]
    seconds: float
    verified: Verified
    warnings: tuple[str, ...] = ()


def convert(
    file: OnnxFile,
    output: Destination,
    policy: Policy,
    engines: Sequence[Engine],
    *,
    feeds: FeedMaker,
    target: Emulation | None = None,
    data: Sequence[Feeds] = (),
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    verify: bool = True,
) -> Conversion:
    """Convert ``file`` by ``policy`` and write it to ``output``.

    Args:
        file: The model.
        output: Where the converted model goes.
        policy: What to lower.
        engines: In order of preference; the first also judges which kernels exist.
        feeds: Makes feeds to verify the model with.
        target: A device that is not here: its roofline decides where costs do.
        data: Batches whose observed ranges the rules may use.
        user_rules: The user's rule functions.
        verify: Whether the model must load and run in one of the engines.

    Raises:
        UsageError, ModelError, EngineError: As ``artefact.write``.
    """
    start = time.perf_counter()
    output.check()
    with frontend.paused_collection():  # graph and plan live on until all is written
        prepared = frontend.prepare(file, policy)
        facts = observe(prepared, lambda: data) if data else {}
        planner = make_planner(
            prepared, policy, engines[0], facts=facts, user_rules=user_rules
        )
        if policy.scope is not Scope.AUTO:
            plan = planner.lowest()
        elif target is not None:
            shapes = {i: f.shape for i, f in facts.items()}
            plan = _modelled_plan(planner, RooflineCost(target=target.target, shapes=shapes))
        else:
            plan = _auto_plan(planner, feeds)
        applied = frontend.apply(file, plan, prepared)
    judges = engines if verify else ()
    done = _write(file, plan, applied, output, judges, feeds, start=start)
    warnings = _warnings(planner, applied)
    if target is None and applied.edits:
        warnings += _slow(engines, done.verified, policy.format)
    return replace(done, warnings=warnings)


def replay(
    file: OnnxFile,
    plan: Plan,
    output: Destination,
    engines: Sequence[Engine],
    *,
    feeds: FeedMaker,
    verify: bool = True,
) -> Conversion:
    """Write the model that ``plan`` gives."""
    start = time.perf_counter()
    applied = frontend.apply(file, plan)
    judges = engines if verify else ()
    return _write(file, plan, applied, output, judges, feeds, start=start)


def _write(
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
    *,
    start: float,
) -> Conversion:
    """Write what ``plan`` gave, and say what it is; ``start`` is when the work began."""
    size, verified = write(file, applied, output, engines, feeds)
    return Conversion(
        plan=plan,
        nodes=len(applied.graph.nodes),
        casts=cast_count(applied.graph, applied.edits),
        size_bytes=(file.size_bytes, size),
        seconds=time.perf_counter() - start,
        verified=verified,
    )


def _auto_plan(planner: Planner, feeds: FeedMaker) -> Plan:
    """The fastest plan that the rules allow: by profile where the model can be run."""
    graph, low = planner.graph, planner.policy.format
    try:
        session = planner.engine.load(planner.prepared.file.path)
        given = feeds(session)
        profiles = profile_ends(planner, given) if given is not None else None
    except (EngineError, UsageError):
        profiles = None  # nothing can be run here: the roofline of this machine decides
    if profiles is None or not (profiles.high and profiles.low):
        return _modelled_plan(planner, RooflineCost(target=load_target(local_target())))
    units, points = find_units(planner, profiles)
    cost = measured_cost(graph, profiles, low, planner.engine, {})
    return propose(planner, units, points, cost, Sensitivity.zero(points))[-1].plan


def _modelled_plan(planner: Planner, cost: RooflineCost) -> Plan:
    """The fastest plan that the rules allow, by a roofline."""
    graph, low = planner.graph, planner.policy.format
    units = make_units(graph, planner.permissions, low, pattern_kernels(graph))
    points = rounding_points(graph, units)
    return propose(planner, units, points, cost, Sensitivity.zero(points))[-1].plan


def _slow(engines: Sequence[Engine], verified: Verified, low: Format) -> tuple[str, ...]:
    """Whether the engine that runs the model here gains nothing by the format."""
    engine = next((e for e in engines if e.name == verified.engine), None)
    found = probe_one(engine, low) if engine else None
    if found is None or found.speed is None or found.speed > _GAINS:
        return ()
    why = f" ({found.reason})" if found.reason else ""
    speed = f"{low.label} runs at {found.speed:.2g}x fp32's speed in {verified.engine} here"
    return (f"{speed}{why}: the model is smaller, not faster",)


def _warnings(planner: Planner, applied: Applied) -> tuple[str, ...]:
    policy, nodes = planner.policy, applied.graph.nodes
    found = [f"--op {n} matches no op" for n in unused(tuple(policy.op_formats), nodes)]
    for option, listed in (("--include", policy.include), ("--exclude", policy.exclude)):
        found += [
            f"{option} {p.pattern!r} matches no node"
            for p in listed
            if not any(p.search(n.name) for n in nodes)
        ]
    unknown = sorted({n.native for n in nodes if n.op == "unknown" and n.format is not None})
    if unknown:
        found.append(f"ops that are not known here keep their type: {', '.join(unknown)}")
    if not applied.edits and policy.scope is not Scope.NONE:
        found.append("nothing was converted: the rules leave every op in its type")
    return tuple(found)
