"""The plan that lowers every op that may be low, except those to keep."""

from __future__ import annotations

from collections.abc import Collection

from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner, pick


def all_low_but(planner: Planner, kept: Collection[str]) -> tuple[Plan, list[str]]:
    """The plan, and the op types of the nodes that it lowers.

    Nodes named in ``kept`` stay fp32; all others get the policy's format if they may have it.
    """
    low, nodes = planner.policy.format, planner.graph.nodes
    formats = {
        i: pick(p, Format.FP32) if nodes[i].name in kept else pick(p, low, Format.FP32)
        for i, p in planner.permissions.items()
    }
    plan = planner.plan(formats, "converted by neural_compressor's interface")
    return plan, [nodes[i].op for i, fmt in formats.items() if fmt is low]
