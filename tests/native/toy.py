"""A frontend in as few lines as one takes: ``.toy`` files, JSON of a chain of ops.

Rules judge its ops, costs are stated and errors of rounding are the format's; no engine runs
it and no device emulates it, and it says so.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from finecast import files
from finecast.data.feeds import synthetic_feeds
from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation
from finecast.errors import ModelError, UsageError
from finecast.graph import Graph
from finecast.native import opening
from finecast.native.artefact import Converted, Destination, Verified
from finecast.native.census import Census
from finecast.native.emulated import Program
from finecast.native.model import Judgement, OpenedModel, RunOptions
from finecast.numbers.formats import Format
from finecast.planning.placing import Placement, place
from finecast.planning.plan import Plan
from finecast.planning.provenance import Provenance
from finecast.plugin import FrontendEntry
from finecast.rules.policy import Policy
from tests.native.toy_chain import Chain, ToySession, graph_of, verify
from tests.native.toy_subject import ToyBuilt, ToySubject, built_of, check_policy, planner_of

ROW: Final = FrontendEntry(
    suffixes=(".toy",), packages=("toy",), module=__name__, requires="json", install="python"
)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """``.toy`` files are known to the whole package until the test ends."""
    monkeypatch.setattr(opening, "FRONTENDS", (*opening.FRONTENDS, ROW))


def read(path: Path, *, trust: bool = False) -> ToyModel:
    del trust  # nothing in a file is ever executed
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        chain: Chain = content["ops"]
        graph = graph_of(chain, files.digest(path))
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path)) from error
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise ModelError(f"no toy: {error}", where=str(path), fix="write it again") from error
    made_by = Provenance.read(content.get("notes", {}))
    facts: Any = {"path": path, "name": str(path), "model": chain, "graph": graph}
    return ToyModel(digest=graph.digest, converted=made_by, **facts)


def take(model: object) -> ToyModel:
    raise UsageError("a toy is a file", where=type(model).__name__, fix="give its path")


@dataclass(frozen=True, kw_only=True)
class ToyModel(OpenedModel):
    path: Path
    name: str
    model: Chain
    graph: Graph
    digest: str
    converted: Provenance | None = None

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size

    def to_fp32(self, from_type: str) -> ToyModel:
        raise UsageError("--from-type does not apply to .toy files", where=from_type)

    def check(self, output: Destination) -> None:
        output.check()

    def reference(self) -> ToySession:
        return ToySession.of(self.model)

    def program(self, emulation: Emulation) -> Program:
        raise ModelError("a toy is not emulated", where=emulation.target.name)

    def check_policy(self, policy: Policy) -> None:
        check_policy(self.graph, policy)

    def build(self, plan: Plan) -> ToyBuilt:
        return built_of(self.model, self.graph, plan, self.name)

    def subject(self, engine: str | None, device: Emulation | None) -> ToySubject:
        if engine is not None or device is not None:
            raise UsageError("a toy runs by itself", fix="leave out --engine and --target")
        return ToySubject(model=self, graph=self.graph, reference=self.reference())

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Converted:
        return self.apply(output, self.judge(policy, options)[1], options)

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Converted:
        start = time.perf_counter()
        nodes, built = self.graph_for(plan).nodes, self.build(plan)
        verified = verify(self.model, built.model, synthetic_feeds(self.reference().inputs))
        if output.path is not None:
            files.write_bytes(output.path, built.content)
        return Converted(
            plan=plan,
            counts=plan.counts,
            nodes=len(nodes),
            casts=built.casts,
            size_bytes=(self.size_bytes, built.size_bytes),
            output=output.path,
            seconds=time.perf_counter() - start,
            verified=verified,
            model=built.model,
        )

    def write(
        self, built: object, output: Destination, subject: object, workload: Workload
    ) -> tuple[int, Verified]:
        assert isinstance(built, ToyBuilt)
        assert output.path is not None
        verified = verify(self.model, built.model, workload.timing()[0])
        files.write_bytes(output.path, built.content)
        return built.size_bytes, verified

    def census(self, options: RunOptions, low: Format) -> Census:
        return Census.of(self.graph, {}, name=self.name, size_bytes=self.size_bytes)

    def judge(self, policy: Policy, options: RunOptions) -> Judgement:
        rules = [*options.user_rules.items()]
        planner = planner_of(self.graph, policy, rules, measured=False)
        return self.graph, planner.lowest(), ()

    def read_graph(self) -> Graph:
        return self.graph

    def placement(self, plan: Plan) -> Placement:
        return place(plan, self.graph, lambda _: 0)

    def graph_for(self, plan: Plan) -> Graph:
        plan.check(self.graph, where=self.name)
        plan.check_complete(self.graph, where=self.name)
        return self.graph
