"""The plan of everything that may be low, but for what is kept."""

from __future__ import annotations

from collections.abc import Collection

from finecast.numbers.formats import Format
from finecast.planning.assign import pick
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner


def all_low_but(planner: Planner, kept: Collection[str]) -> tuple[Plan, list[str]]:
    """The plan, and the ops that have the policy's format in it; ``kept`` are nodes' names."""
    low, nodes = planner.policy.format, planner.graph.nodes
    formats = {
        i: pick(p, Format.FP32) if nodes[i].name in kept else pick(p, low, Format.FP32)
        for i, p in planner.permissions.items()
    }
    plan = planner.plan(formats, "converted by neural_compressor's interface")
    return plan, [nodes[i].op for i, fmt in formats.items() if fmt is low]
