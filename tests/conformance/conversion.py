"""Converts a case under one policy and says whether what came out is valid ONNX."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx

import finecast
from finecast.errors import FinecastError
from finecast.frontends import onnx as frontend
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules.policy import Policy

_VALIDATION = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    RuntimeError,
)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A converted model, its plan, and the graph that the plan decides."""

    plan: Plan
    graph: Graph
    formats: dict[int, Format]

    @property
    def low(self) -> int:
        """Ops that took the low format."""
        own = {n.id: n.format for n in self.graph.nodes}
        return sum(f is not own[i] and f is not Format.FP32 for i, f in self.formats.items())

    @property
    def kept(self) -> str:
        """Why ops were left alone, the most frequent reason first."""
        reasons = Counter(
            d.reasons[0].text
            for d in self.plan.decisions
            if d.format is Format.FP32 and d.reasons
        )
        if reasons:
            return reasons.most_common(1)[0][0]
        own = {n.format.label for n in self.graph.nodes if n.format is not None}
        if own - {"fp32"}:
            return f"already {'/'.join(sorted(own - {'fp32'}))}"
        return "its floats keep their type: no op of it computes in fp32"


def convert(path: Path, output: Path, policy: Policy, engine: str) -> Converted:
    """The model at ``path`` converted for ``engine`` as users convert it, not verified yet."""
    done = finecast.convert(
        path, output, policy=policy, engine=engine, verify=False, force=True
    )
    graph = frontend.apply(frontend.load(path), done.plan).graph
    chosen = {d.node: d.format for d in done.plan.decisions}
    formats = {n.id: chosen[n.name] for n in graph.nodes if n.name in chosen}
    return Converted(plan=done.plan, graph=graph, formats=formats)


def invalid(path: Path) -> str:
    """What onnx's checker, with strict shape inference, holds against a file; or nothing."""
    try:
        frontend.check(path)
    except FinecastError as error:
        return error.what
    return ""


def originally_invalid(model: onnx.ModelProto) -> str:
    """The same of the model before it was converted."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except _VALIDATION as error:
        return str(error).strip().splitlines()[0][:200]
    return ""
