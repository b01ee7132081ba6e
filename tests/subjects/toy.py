"""A frontend in as few lines as one takes: ``.toy`` files, JSON of a chain of ops.

Rules judge its ops, costs are stated and errors of rounding are the format's; no engine runs
it and no device emulates it, and it says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from finecast import files, rules, subjects
from finecast.data.feeds import synthetic_feeds
from finecast.devices.emulation import Emulation
from finecast.engines.base import Feeds
from finecast.engines.probe import Speed
from finecast.errors import ModelError, UsageError
from finecast.graph import Graph
from finecast.measure.timing import Latency
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified, compare
from finecast.pipeline.census import Census, count_classes
from finecast.pipeline.conversion import Conversion
from finecast.pipeline.model import RunOptions
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.program import Program
from finecast.pipeline.subject import Built, UserRules
from finecast.pipeline.workload import Workload
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import roundings
from finecast.planning.proposing import MAX_STEPS, Analysis
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.units import make_units, rounding_points
from finecast.progress import Progress
from finecast.rules.matching import check_names
from finecast.rules.policy import Policy
from tests.subjects.toy_chain import FORMATS, Chain, ToySession, graph_of, lowered, time_s

ROW: Final = subjects.FrontendEntry(
    suffixes=(".toy",), packages=("toy",), module=__name__, requires="json", install="python"
)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """``.toy`` files are known to the whole package until the test ends."""
    monkeypatch.setattr(subjects, "FRONTENDS", (*subjects.FRONTENDS, ROW))


def read(path: Path, *, trust: bool = False) -> ToyModel:
    del trust  # nothing in a file is ever executed
    try:
        chain: Chain = json.loads(path.read_text(encoding="utf-8"))["ops"]
        graph = graph_of(chain, files.digest(path))
    except OSError as error:
        raise UsageError(
            f"cannot read the model: {error.strerror}", where=str(path)
        ) from error
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise ModelError(f"no toy: {error}", where=str(path), fix="write it again") from error
    return ToyModel(path=path, model=chain, graph=graph, size_bytes=path.stat().st_size)


def take(model: object) -> ToyModel:
    raise UsageError("a toy is a file", where=type(model).__name__, fix="give its path")


@dataclass(frozen=True, kw_only=True)
class ToyBuilt:
    model: Chain
    plan: Plan

    @property
    def casts(self) -> int:
        inner = self.model[1:-1]  # those of the input and the output are at the ends
        return sum(op["op"] == "cast" for op in inner)

    @property
    def content(self) -> bytes:
        return json.dumps({"ops": self.model, "plan": self.plan.digest}).encode()

    @property
    def size_bytes(self) -> int:
        return len(self.content)


@dataclass(frozen=True, kw_only=True)
class ToyModel:
    path: Path
    model: Chain
    graph: Graph
    size_bytes: int
    external: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def digest(self) -> str:
        return self.graph.digest

    def taken(self, from_type: str) -> ToyModel:
        raise UsageError("--from-type does not apply to .toy files", where=from_type)

    def check(self, output: Destination) -> None:
        output.check()

    def reference(self) -> ToySession:
        return ToySession.of(self.model)

    def program(self, emulation: Emulation) -> Program:
        raise ModelError("a toy is not emulated", where=emulation.target.name)

    def check_policy(self, policy: Policy) -> None:
        wrong = [f.label for f in policy.formats if f not in FORMATS]
        if wrong or policy.io or policy.io_low:
            raise UsageError(f"a toy has no {wrong[0] if wrong else 'other ports'}")
        check_names(policy, self.graph)

    def build(self, plan: Plan) -> ToyBuilt:
        plan.check(self.graph, where=self.name)
        return ToyBuilt(model=lowered(self.model, plan), plan=plan)

    def notes(self, planner: Planner) -> Sequence[str]:
        return ()

    def planner(self, policy: Policy, user_rules: UserRules, *, measured: bool) -> Planner:
        self.check_policy(policy)
        context = rules.Context(
            graph=self.graph, policy=policy, user_rules=tuple(user_rules), measured=measured
        )
        permissions = rules.permit(context)
        return Planner(graph=self.graph, policy=policy, permissions=permissions, engine="toy")

    def subject(self, engine: str | None, device: Emulation | None) -> ToySubject:
        if engine is not None or device is not None:
            raise UsageError("a toy runs by itself", fix="leave out --engine and --target")
        return ToySubject(
            file=self,
            name=self.name,
            digest=self.digest,
            size_bytes=self.size_bytes,
            original=self.model,
            reference=self.reference(),
        )

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        _, plan = self.judge(policy, options)
        return self.apply(output, plan, options)

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        start = time.perf_counter()
        graph, built = self.graph_for(plan), self.build(plan)
        verified = self._verified(built, synthetic_feeds(self.reference().inputs, batch=4))
        if output.path is not None:
            files.write_bytes(output.path, built.content)
        return Conversion(
            plan=plan,
            nodes=len(graph.nodes),
            casts=built.casts,
            size_bytes=(self.size_bytes, built.size_bytes),
            seconds=time.perf_counter() - start,
            verified=verified,
            model=built.model,
        )

    def _verified(self, built: ToyBuilt, feeds: Feeds) -> Verified:
        got, wanted = (s.run(feeds) for s in (ToySession.of(built.model), self.reference()))
        return compare("toy", [*got.values()], [*wanted.values()])

    def write(
        self, outcome: Outcome, output: Destination, subject: object, workload: Workload
    ) -> tuple[int, Verified]:
        assert isinstance(outcome.built, ToyBuilt)
        assert output.path is not None
        verified = self._verified(outcome.built, workload.timing()[0])
        files.write_bytes(output.path, outcome.built.content)
        return outcome.built.size_bytes, verified

    def census(self, options: RunOptions, low: Format) -> Census:
        classes = count_classes(self.graph, {})
        return Census(
            name=self.name,
            opset=0,
            nodes=len(self.graph.nodes),
            parameters=sum(c.parameters for c in classes),
            size_bytes=self.size_bytes,
            classes=classes,
        )

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        rules = [*options.user_rules.items()]
        return self.graph, self.planner(policy, rules, measured=False).lowest()

    def graph_for(self, plan: Plan) -> Graph:
        plan.check(self.graph, where=self.name)
        plan.check_complete(self.graph, where=self.name)
        return self.graph


@dataclass(frozen=True, kw_only=True)
class ToySubject:
    file: ToyModel
    name: str
    digest: str
    size_bytes: int
    original: Chain
    reference: ToySession
    truth: None = None
    runner: str = "toy"
    target: str = ""
    max_steps: int = MAX_STEPS

    def check(self, policy: Policy) -> None:
        self.file.check_policy(policy)

    def speed(self, fmt: Format) -> Speed:
        return Speed(gains=True, text=f"{fmt.label} takes a quarter of fp32's time")

    def first_nan(self, workload: Workload) -> str:
        return ""

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> ToyExamined:
        return ToyExamined(planner=self.file.planner(policy, user_rules, measured=True))

    def notes(self, planner: Planner) -> Sequence[str]:
        return ()

    def build(self, plan: Plan) -> ToyBuilt:
        return self.file.build(plan)

    def session(self, built: Built) -> ToySession:
        return ToySession.of(built.model)

    def times(
        self, models: Mapping[str, Built | None], workload: Workload, min_time_s: float
    ) -> dict[str, Latency]:
        chains = {n: self.original if b is None else b.model for n, b in models.items()}
        return {n: Latency(samples_s=(sum(map(time_s, c)),)) for n, c in chains.items()}

    def feeds(self, workload: Workload) -> Sequence[Feeds]:
        return workload.timing()


@dataclass(frozen=True, kw_only=True)
class ToyExamined:
    planner: Planner

    def analysis(self) -> Analysis:
        graph, formats = self.planner.graph, self.planner.policy.formats
        units = make_units(graph, self.planner.permissions, formats)
        points = rounding_points(graph, units)
        named = {
            f: {n.name: time_s({"op": n.op, "format": f.label}) for n in graph.nodes}
            for f in (Format.FP32, *formats)
        }
        errors = {
            f: Sensitivity(
                values=np.full(len(points.classes), f.unit_roundoff**2),
                weights=np.full(len(points.weights), f.unit_roundoff**2),
            )
            for f in formats
        }
        rounded = {f: roundings(graph, units, points, e, f, {}) for f, e in errors.items()}
        return Analysis.of(graph, units, MeasuredCost(times_s=named), rounded)
