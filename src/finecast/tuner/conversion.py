"""From a model and a policy to a converted model, without tuning."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finecast.cost import RooflineCost
from finecast.edits import cast_count
from finecast.engines.base import Engine, Feeds
from finecast.errors import EngineError, UsageError
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
from finecast.tuner.artefact import FeedMaker, Verified, write
from finecast.units import make_units, pattern_kernels, rounding_points


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
    output: Path,
    policy: Policy,
    engines: Sequence[Engine],
    *,
    feeds: FeedMaker,
    data: Sequence[Feeds] = (),
    user_rules: tuple[tuple[str, UserRule], ...] = (),
    verify: bool = True,
    force: bool = False,
) -> Conversion:
    """Convert ``file`` by ``policy`` and write it to ``output``.

    Args:
        file: The model.
        output: Where the converted model goes.
        policy: What to lower.
        engines: In order of preference; the first also judges which kernels exist.
        feeds: Makes feeds to verify the model with.
        data: Batches whose observed ranges the rules may use.
        user_rules: The user's rule functions.
        verify: Whether the model must load and run in one of the engines.
        force: Whether an existing output may be replaced.

    Raises:
        UsageError, ModelError, EngineError: As ``artefact.write``.
    """
    start = time.perf_counter()
    frontend.check_writable(output, force=force)
    prepared = frontend.prepare(file, policy)
    facts = observe(prepared, lambda: data) if data else {}
    planner = make_planner(prepared, policy, engines[0], facts=facts, user_rules=user_rules)
    plan = _auto_plan(planner, feeds) if policy.scope is Scope.AUTO else planner.lowest()
    applied = frontend.apply(file, plan)
    judges = engines if verify else ()
    done = _write(file, plan, applied, output, judges, feeds, force=force, start=start)
    return replace(done, warnings=_warnings(planner, applied))


def replay(
    file: OnnxFile,
    plan: Plan,
    output: Path,
    engines: Sequence[Engine],
    *,
    feeds: FeedMaker,
    verify: bool = True,
    force: bool = False,
) -> Conversion:
    """Write the model that ``plan`` gives."""
    start = time.perf_counter()
    applied = frontend.apply(file, plan)
    judges = engines if verify else ()
    return _write(file, plan, applied, output, judges, feeds, force=force, start=start)


def _write(
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    output: Path,
    engines: Sequence[Engine],
    feeds: FeedMaker,
    *,
    force: bool,
    start: float,
) -> Conversion:
    """Write what ``plan`` gave, and say what it is; ``start`` is when the work began."""
    size, verified = write(file, applied, output, engines, feeds=feeds, force=force)
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
    if profiles is not None and profiles.high and profiles.low:
        units, points = find_units(planner, profiles)
        cost = measured_cost(graph, profiles, low, planner.engine, {})
    else:
        units = make_units(graph, planner.permissions, low, pattern_kernels(graph))
        points = rounding_points(graph, units)
        cost = RooflineCost(target=load_target(local_target()))
    return propose(planner, units, points, cost, Sensitivity.zero(points))[-1].plan


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
