"""The toy on this machine, for ``tune``: plans by rules, stated times, modelled errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from finecast import rules
from finecast.data.workload import Workload
from finecast.engines.probe import Speed
from finecast.errors import Unfit, UsageError
from finecast.graph import Graph
from finecast.measure.racing import Effort, Race
from finecast.native.subject import Built, Examined, Subject, UserRules
from finecast.numbers.formats import Format
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.points import rounding_points
from finecast.planning.problem import Analysis, roundings
from finecast.planning.provenance import Provenance
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.units import make_units
from finecast.progress import Progress
from finecast.rules.policy import Policy
from finecast.rules.user_rules import check_names
from tests.native.toy_chain import FORMATS, Chain, ToySession, lowered, time_s


@dataclass(kw_only=True)
class ToyBuilt(Built):
    content: bytes


def check_policy(graph: Graph, policy: Policy) -> None:
    wrong = [f.label for f in policy.formats if f not in FORMATS]
    if wrong or policy.io or policy.io_low:
        raise UsageError(f"a toy has no {wrong[0] if wrong else 'other ports'}")
    check_names(policy, graph)


def planner_of(
    graph: Graph, policy: Policy, user_rules: UserRules, *, measured: bool
) -> Planner:
    check_policy(graph, policy)
    context = rules.Context(
        graph=graph, policy=policy, user_rules=tuple(user_rules), measured=measured
    )
    permissions = rules.permit(context)
    return Planner(graph=graph, policy=policy, permissions=permissions, engine="toy")


def built_of(chain: Chain, graph: Graph, plan: Plan, name: str) -> ToyBuilt:
    plan.check(graph, where=name)
    model = lowered(chain, plan)
    notes = Provenance.of(plan, name).notes
    content = json.dumps({"ops": model, "notes": notes}).encode()
    inner = model[1:-1]  # casts of the input and the output are at the ends
    casts = sum(op["op"] == "cast" for op in inner)
    return ToyBuilt(
        model=model, plan=plan, size_bytes=len(content), casts=casts, content=content
    )


@dataclass(kw_only=True)
class ToySubject(Subject):
    graph: Graph

    @property
    def runner(self) -> str:
        return "toy"

    @property
    def formats(self) -> tuple[Format, ...]:
        return (Format.BF16,)

    def check_formats(self, policy: Policy) -> None:
        pass  # a model has those that it computes in

    def speed(self, fmt: Format) -> Speed:
        return Speed(gains=True, text=f"{fmt.label} takes a quarter of fp32's time")

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> ToyExamined:
        return ToyExamined(planner=planner_of(self.graph, policy, user_rules, measured=True))

    def session(self, built: Built) -> ToySession:
        return ToySession.of(built.model)

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        seconds = {n: sum(map(time_s, one.model)) for n, one in built.items()}
        return Race.stated(sum(map(time_s, self.model.model)), seconds)


@dataclass(frozen=True, kw_only=True)
class ToyExamined(Examined):
    planner: Planner

    def without(self, unfit: Unfit) -> ToyExamined:
        return replace(self, planner=self.planner.without(unfit))

    def analysis(
        self, *, of_time: bool = True, lost: Mapping[Format, float] = MappingProxyType({})
    ) -> Analysis:
        graph, formats = self.planner.graph, self.planner.policy.formats
        units = make_units(graph, self.planner.permissions, formats)
        points = rounding_points(graph, units)
        named = {
            f: {n.name: time_s({"op": n.op, "format": f.label}) for n in graph.nodes}
            for f in (Format.FP32, *formats)
        }
        errors = {
            f: Sensitivity(
                values=np.full(len(points.points), f.unit_roundoff**2),
                weights=np.full(len(points.weights), f.unit_roundoff**2),
                shared=np.zeros(len(points.shared)),
            )
            for f in formats
        }
        rounded = {f: roundings(units, points, e, {}) for f, e in errors.items()}
        return Analysis.of(graph, units, MeasuredCost(times_s=named), rounded)
