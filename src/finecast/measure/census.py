"""What a model is made of: ops by class and type, FLOPs, bytes, risky values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from finecast.facts import Facts
from finecast.flops import Shape, bytes_moved, flops, port_formats
from finecast.formats import Format
from finecast.graph import Graph, Node
from finecast.measure.observe import first_nonfinite
from finecast.ops import by_name
from finecast.rules.observed import range_limit

_LOST_SHARE = 0.01  # worth a line in the report; the rule that forbids asks for more


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCount:
    """Nodes of one class of ops.

    ``flops`` and ``bytes`` are lower bounds where ``unknown`` nodes have a shape that is
    neither declared nor observed.
    """

    kind: str
    nodes: int
    ops: dict[str, int]
    types: dict[str, int]
    flops: float
    bytes: float
    unknown: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A value that the low format would not hold."""

    value: str
    node: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What ``inspect`` reports."""

    name: str
    opset: int
    nodes: int
    parameters: int
    size_bytes: int
    classes: tuple[ClassCount, ...]
    notes: dict[str, str] = field(default_factory=dict[str, str])
    warnings: tuple[Risk, ...] = ()


def count_classes(graph: Graph, shapes: Mapping[int, Shape]) -> tuple[ClassCount, ...]:
    """Count nodes by class, the classes with most FLOPs first."""
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        groups.setdefault(by_name(node.op).kind.label, []).append(node)
    counted: set[int] = set()
    rows = [_count(graph, kind, nodes, shapes, counted) for kind, nodes in groups.items()]
    return tuple(sorted(rows, key=lambda r: (-r.flops, -r.nodes)))


def _count(
    graph: Graph,
    kind: str,
    nodes: list[Node],
    shapes: Mapping[int, Shape],
    counted: set[int],
) -> ClassCount:
    parameters = 0
    for node in nodes:
        for index in node.inputs:
            constant = graph.values[index].constant if index is not None else None
            if constant is not None and index not in counted and index is not None:
                counted.add(index)
                parameters += constant.size if graph.values[index].format else 0
    operations = [flops(graph, n, shapes) for n in nodes]
    moved = [
        bytes_moved(graph, n, port_formats(graph, n, n.format or Format.FP32), shapes)
        for n in nodes
    ]
    return ClassCount(
        kind=kind,
        nodes=len(nodes),
        ops=dict(Counter(n.op for n in nodes).most_common()),
        types=dict(
            Counter(n.format.label if n.format else "other" for n in nodes).most_common()
        ),
        flops=sum(f for f in operations if f is not None),
        bytes=sum(b for b in moved if b is not None),
        unknown=sum(b is None for b in moved),
        parameters=parameters,
    )


def risks(graph: Graph, facts: Facts, low: Format) -> tuple[Risk, ...]:
    """Values that come too close to the largest number of ``low``, or largely vanish in it."""
    found: list[Risk] = []
    for index, seen in facts.items():
        value = graph.values[index]
        node = graph.nodes[value.producer].name if value.producer is not None else "input"
        share = seen.flushed_share(low)
        text = ""
        if seen.nans or seen.infs:
            text = f"{seen.nans} NaN and {seen.infs} Inf in fp32"
        elif seen.largest >= range_limit(low):
            text = f"largest {seen.largest:.4g}, limit {range_limit(low):.4g}"
        elif share >= _LOST_SHARE:
            text = f"{share:.1%} of it becomes zero"
        if text:
            found.append(Risk(value=value.name, node=node, text=text))
    return tuple(found)


def notes(graph: Graph, facts: Facts) -> dict[str, str]:
    """What a user should know beside the table."""
    found: dict[str, str] = {}
    unknown = Counter(n.native for n in graph.nodes if n.op == "unknown")
    if unknown:
        found["not known here, type kept"] = ", ".join(f"{k} {n}" for k, n in unknown.items())
    first = first_nonfinite(graph, dict(facts))
    if first is not None:
        found["first op to give NaN or Inf in fp32"] = first
    return found
