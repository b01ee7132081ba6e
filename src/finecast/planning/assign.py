"""From permissions to formats without a cost model: every op that may be low is."""

from __future__ import annotations

from collections.abc import Mapping

from finecast.graph import Graph
from finecast.numbers.encodings import Encodings
from finecast.numbers.formats import Format
from finecast.planning.choices import Choice
from finecast.planning.plan import Decision, Plan
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from finecast.rules.reason import Reason


def lowest(permissions: Mapping[int, Permission], *lows: Format) -> dict[int, Format]:
    """The first of ``lows`` that is permitted, else fp32 or the one format left."""
    return {i: pick(p, *lows, Format.FP32) for i, p in permissions.items()}


def highest(permissions: Mapping[int, Permission]) -> dict[int, Format]:
    """fp32 wherever it is permitted."""
    return {i: pick(p, Format.FP32) for i, p in permissions.items()}


def chosen(
    permissions: Mapping[int, Permission], units: Units, choice: Choice
) -> dict[int, Format]:
    """Units as chosen, all else fp32 where permitted.

    So are a unit's ops that may not have a format for operands that others of it have.
    """
    of = choice.by_node(units)
    fp32 = Format.FP32
    return {i: pick(p, of.get(i, fp32), fp32) for i, p in permissions.items()}


def pick(permission: Permission, *preferred: Format) -> Format:
    """The first of ``preferred`` that is permitted, else the smallest of what is."""
    for fmt in preferred:
        if fmt in permission.formats:
            return fmt
    return min(permission.formats, key=lambda f: (f.storage_bytes, f.label))


def make_plan(
    graph: Graph,
    formats: Mapping[int, Format],
    permissions: Mapping[int, Permission],
    policy: Policy,
    *,
    opset: int,
    engine: str,
    because: str,
    evidence: Mapping[int, Mapping[str, float | str]] | None = None,
) -> Plan:
    """A plan with the reasons of all rules and, last, why the format was chosen among them.

    ``evidence`` has by node id what the choice was based on: times, errors.
    """
    decisions: list[Decision] = []
    for node in graph.float_nodes:
        if node.format is not Format.FP32:
            continue
        fmt = formats[node.id]
        known = (evidence or {}).get(node.id, {})
        chosen = Reason(rule="decision", text=because, permits=(fmt.label,), evidence=known)
        free = len(permissions[node.id].formats) > 1
        decisions.append(
            Decision(
                node=node.name,
                op=node.op,
                format=fmt,
                reasons=permissions[node.id].reasons + ((chosen,) if free else ()),
                encodings=permissions[node.id].encodings.get(fmt, Encodings()),
            )
        )
    return Plan(
        model=graph.digest,
        policy=policy.label,
        opset=opset,
        decisions=tuple(decisions),
        io=_declared(graph, policy),
        engine=engine,
    )


def _declared(graph: Graph, policy: Policy) -> dict[str, Format]:
    ports = [v for v in (*graph.inputs, *graph.outputs) if v.format is Format.FP32]
    stored = policy.stored
    low = {v.name: stored for v in ports} if policy.io_low else {}
    return {name: f for name, f in low.items() if f is not Format.FP32} | dict(policy.io)
