"""The ONNX frontend: a model file in, the neutral graph out; a plan in, a model out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from finecast import ops
from finecast.edits import Edit, edits
from finecast.errors import ModelError, UsageError
from finecast.formats import Format
from finecast.frontends.onnx.model import (
    OnnxFile,
    check,
    check_writable,
    digest,
    load,
    save,
    to_bytes,
)
from finecast.frontends.onnx.opset import needed_opset, opset_of, raise_opset
from finecast.frontends.onnx.reader import Binding, name_nodes, read
from finecast.frontends.onnx.schema import signature
from finecast.frontends.onnx.writer import apply_edits
from finecast.graph import Graph
from finecast.plan import Plan
from finecast.policy import Policy, Scope

__all__ = [
    "Applied",
    "OnnxFile",
    "Prepared",
    "apply",
    "check",
    "check_writable",
    "digest",
    "load",
    "minimal_opset",
    "opset_of",
    "prepare",
    "resolve_io",
    "save",
    "to_bytes",
]

PLAN_KEY = "finecast.plan"
POLICY_KEY = "finecast.policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model ready to be planned: named nodes, known types, an opset that suffices."""

    file: OnnxFile
    model: ir.Model
    graph: Graph
    binding: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The model that a plan gives, and the edits that made it."""

    model: ir.Model
    graph: Graph
    edits: tuple[Edit, ...]


def prepare(file: OnnxFile, policy: Policy) -> Prepared:
    """Name the nodes, raise the opset as far as ``policy`` can need, infer types.

    ``file.model`` itself is left as it was.
    """
    model = file.model.clone()
    name_nodes(model)
    if policy.scope is not Scope.NONE:
        model = raise_opset(model, needed_opset(model, policy.format, _candidates(policy)))
    return _read(file, model)


def _read(file: OnnxFile, model: ir.Model) -> Prepared:
    name_nodes(model)
    model = ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(
        model
    ).model
    graph, binding = read(model, digest=file.digest)
    return Prepared(file=file, model=model, graph=graph, binding=binding)


def _candidates(policy: Policy) -> frozenset[str] | None:
    """Op types that may be lowered; None for all."""
    if policy.scope is not Scope.MATMULT or policy.op_formats:
        return None
    names = (n for info in ops.OP_TABLE if info.matmul_engine for n in info.onnx)
    return frozenset(n.rpartition("::")[2] for n in names)


def minimal_opset(prepared: Prepared, formats: Mapping[int, Format]) -> int:
    """The smallest opset, from the file's own up, that admits the chosen formats."""
    own = opset_of(prepared.file.model)
    needed = own
    for node_id, fmt in formats.items():
        native = prepared.binding.nodes[node_id]
        if native is None or fmt is Format.FP32 or native.domain not in ("", "ai.onnx"):
            continue
        found = signature(native.op_type, "", own)
        since = dict(found.since).get(fmt) if found else None
        # An op that is not defined at the file's opset came from raising it.
        needed = max(needed, since or opset_of(prepared.model))
    return needed


def apply(file: OnnxFile, plan: Plan) -> Applied:
    """Replay ``plan`` on the model it was made for; ``file.model`` is left as it was.

    Raises:
        ModelError: If the plan was made for another model.
    """
    if plan.model != file.digest:
        raise ModelError(
            f"the plan was made for another model: digest {plan.model}, not {file.digest}",
            where=str(file.path),
            fix="make a plan for this file, or give the file that the plan was made for",
        )
    model = file.model.clone()
    name_nodes(model)
    prepared = _read(file, raise_opset(model, plan.opset))
    graph = prepared.graph
    by_name = {n.name: n.id for n in graph.nodes}
    missing = [d.node for d in plan.decisions if d.node not in by_name]
    if missing:
        raise ModelError(f"the plan names a node the model lacks: {missing[0]!r}")
    formats = {by_name[name]: fmt for name, fmt in plan.formats.items()}
    done = edits(graph, formats, resolve_io(graph, plan.io))
    apply_edits(graph, prepared.binding, done)
    if done:
        prepared.model.metadata_props[PLAN_KEY] = plan.digest
        prepared.model.metadata_props[POLICY_KEY] = plan.policy
    return Applied(model=prepared.model, graph=graph, edits=done)


def resolve_io(graph: Graph, io: Mapping[str, Format]) -> dict[int, Format]:
    """Declared formats by value id.

    Raises:
        UsageError: If a name is not a float input or output of the model.
    """
    ports = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    for name in io:
        if name not in ports or ports[name].format is None:
            known = ", ".join(n for n, v in ports.items() if v.format is not None)
            raise UsageError(
                f"{name!r} is not a float input or output", where="--io", fix=f"use {known}"
            )
    return {ports[name].id: fmt for name, fmt in io.items()}
