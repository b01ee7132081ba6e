"""Notes on nodes that viewers show: the format that a search chose, its time, and why.

Netron and others list a node's ``metadata_props``. Only ops whose format costs decided have
such notes: of others a policy or a rule says all there is to say. Undoing a conversion takes
the notes out.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from finecast.frontends.onnx.reader import OnnxBinding
from finecast.graph import Graph
from finecast.planning.plan import Decision, Plan
from finecast.rules.base import DECIDED_BY, DECISION

NOTES: Final = ("finecast.type", "finecast.kernel_ms", "finecast.reason")
# A model has thousands of ops: what is noted of all should stay small beside its weights.
_LONGEST: Final = 200


def note_decisions(graph: Graph, binding: OnnxBinding, plan: Plan) -> None:
    """Note on each node what a search decided and why; notes of before are taken out."""
    drop_notes(binding.model)
    decided = {d.node: d for d in plan.decisions}
    for node in graph.float_nodes:
        native, decision = binding.nodes[node.id], decided.get(node.name)
        if native is not None and decision is not None:
            native.metadata_props.update(_notes(decision))


def drop_notes(model: ir.Model) -> None:
    """Take the notes out of a model."""
    for node in model.graph.all_nodes():
        for key in NOTES:
            node.metadata_props.pop(key, None)


def _notes(decision: Decision) -> dict[str, str]:
    """The notes of an op; none if costs did not decide its format."""
    label = decision.format.label
    for reason in decision.reasons:
        if reason.rule == DECISION and DECIDED_BY in reason.evidence:
            time_us = reason.evidence.get(f"{label} us")
            text = reason.text[:_LONGEST]
            timed = f"{time_us / 1e3:.4g}" if isinstance(time_us, float) else ""
            found = zip(NOTES, (label, timed, text), strict=True)
            return {key: value for key, value in found if value}
    return {}
