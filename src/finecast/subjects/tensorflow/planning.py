"""What is known of a model before a plan is chosen: permissions, kernels, costs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from finecast import rules
from finecast.engines.base import Feeds, Session
from finecast.engines.faults import faults
from finecast.engines.kernels import kernel_query
from finecast.engines.tensorflow import TensorFlowEngine
from finecast.engines.tensorflow.probe_graphs import cast_graph
from finecast.frontends import tensorflow as frontend
from finecast.frontends.tensorflow import Imported
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline import casting, profiles
from finecast.pipeline.casting import CastRate
from finecast.pipeline.profiles import Profiles
from finecast.pipeline.subject import UserRules
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules import Context
from finecast.rules.facts import ValueFacts
from finecast.rules.override import active, check_overrides
from finecast.rules.policy import Policy
from finecast.subjects.tensorflow.source import check_formats


def make_planner(
    captured: Imported,
    policy: Policy,
    engine: TensorFlowEngine,
    *,
    facts: Mapping[int, ValueFacts] | None = None,
    user_rules: UserRules = (),
    measured: bool = False,
) -> Planner:
    """Let the rules judge every op, and the overrides of the blocks around the caller.

    Raises:
        RuleConflictError: If they leave an op no format.
        UsageError: If TensorFlow does not compute in a format.
    """
    check_formats(policy)
    check_overrides(captured.graph)
    context = Context(
        graph=captured.graph,
        policy=policy,
        facts=facts or {},
        kernels=kernel_query(engine),
        engine=engine.name,
        faults=faults(engine.name, engine.device, captured.graph, policy.formats),
        user_rules=(*user_rules, *active()),
        measured=measured,
    )
    return Planner(
        graph=captured.graph,
        policy=policy,
        permissions=rules.permit(context),
        engine=engine.name,
    )


def profile_ends(
    captured: Imported, planner: Planner, engine: TensorFlowEngine, feeds: Feeds
) -> Profiles:
    """Profile the fp32 model and the lowest plan in each format, once each.

    Raises:
        EngineError: If none of the lowest plans runs.
    """

    def profiled(plan: Plan) -> Session:
        return engine.open(frontend.apply(captured, plan).model, profiling=True)

    return profiles.profile_ends(planner, profiled, feeds)


def measured_cost(
    graph: Graph,
    found: Profiles,
    engine: TensorFlowEngine,
    shapes: Mapping[int, ValueFacts],
) -> MeasuredCost:
    """Times by node, and of casts."""
    return profiles.measured_cost(graph, found, partial(_casts, engine), shapes)


def _casts(engine: TensorFlowEngine, low: Format) -> CastRate:
    def session(fmt: Format, size: int) -> Session:
        return engine.open(cast_graph(fmt, size), profiling=True)

    return casting.measure_casts(engine, low, session)
