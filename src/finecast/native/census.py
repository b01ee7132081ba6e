"""What a model is made of: ops by class and type, FLOPs, bytes, risky values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from finecast.graph import Graph, Node, Value
from finecast.naming import number_of
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import OpKind, by_name
from finecast.ops.bodies import LOOPS, body_owners
from finecast.ops.flops import Shape, bytes_moved, flops
from finecast.reports.base import Report, TextTable
from finecast.rules.constants import constant_problem
from finecast.rules.facts import Facts, ValueFacts, first_nonfinite
from finecast.rules.observed import divided_by, range_limit
from finecast.rules.quantized import STATES_CODES, computed_in

# By op: the input whose Inf gives a finite result, so that nothing later shows the overflow.
_ABSORBING: Final[Mapping[str, int]] = {
    "div": 1,
    "reciprocal": 0,
    "rsqrt": 0,
    "sigmoid": 0,
    "tanh": 0,
    "erf": 0,
    "clip": 0,
    "min": 0,
}
_OPERAND_RANK: Final = 2
"""Least rank of operands of integer products; scales and zero points have a lower one."""
_LOST_SHARE: Final = 0.01
"""Share of a value that is reported if it becomes zero; rules forbid only at higher shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCount:
    """Nodes of one class of ops.

    ``uncounted`` nodes are those whose FLOPs are not all in ``flops``, ``unknown`` those whose
    bytes are not all in ``bytes``: a shape is not known, or the node is in the body of a loop,
    which is counted once.
    """

    kind: str
    nodes: int
    ops: dict[str, int]
    types: dict[str, int]
    flops: float
    bytes: float
    uncounted: int
    unknown: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Risk:
    """A value that the reduced format cannot represent."""

    value: str
    node: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Census(Report):
    """What a model is made of.

    Attributes:
        name: The model's name.
        opset: Its operation set; 0 where its library has none.
        nodes: The number of its nodes.
        parameters: The number of its parameters.
        size_bytes: Its bytes on disk.
        classes: Its nodes by class, the classes with most FLOPs first.
        notes: What is said beside that, by its heading.
        warnings: Values that ``low`` cannot hold.
        low: The format that values were looked at for; None without data.
    """

    name: str
    opset: int
    nodes: int
    parameters: int
    size_bytes: int
    classes: tuple[ClassCount, ...]
    notes: dict[str, str] = field(default_factory=dict[str, str])
    warnings: tuple[Risk, ...] = ()
    low: Format | None = None

    @property
    def lines(self) -> list[str]:
        """The model's size, its classes of ops, notes, and how many values are at risk."""
        opset = f"opset {self.opset}, " if self.opset else ""
        size = f"{self.parameters:,} parameters, {self.size_bytes / 1e6:.2f} MB"
        lines = [f"{self.name}: {opset}{number_of(self.nodes, 'node')}, {size}"]
        for row in self.classes:
            work = _number(row.flops, row.uncounted)
            lines.append(
                f"{row.kind}: {_counts(row.ops)}" + (f"; {work} MFLOP" if work else "")
            )
        lines += self._notes
        if self.warnings:
            lines.append(
                f"{number_of(len(self.warnings), 'value')} that {self._low} cannot hold"
            )
        return lines

    @property
    def tables(self) -> Sequence[TextTable]:
        """The classes, and the values at risk."""
        rows = [
            (
                row.kind,
                _counts(row.ops, ":"),
                _counts(row.types, ":"),
                _number(row.flops, row.uncounted),
                _number(row.bytes, row.unknown),
                f"{row.parameters:,}" if row.parameters else "",
            )
            for row in self.classes
        ]
        classes = TextTable(
            left=("class", "ops", "nodes by type"),
            right=("MFLOP", "MB\nmoved", "params"),
            rows=rows,
            fold=("ops", "nodes by type"),
            notes=self._notes,
        )
        risky = TextTable(
            title=f"values that {self._low} cannot hold",
            left=("value", "of", "what"),
            rows=[(one.value, one.node, one.text) for one in self.warnings],
            fold=("value",),
        )
        return [classes, risky] if self.warnings else [classes]

    @property
    def _low(self) -> str:
        return "the reduced format" if self.low is None else self.low.label

    @property
    def _notes(self) -> list[str]:
        return [f"{key}: {text}" for key, text in self.notes.items()]

    def _content(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "opset": self.opset,
            "nodes": self.nodes,
            "parameters": self.parameters,
            "size_bytes": self.size_bytes,
            "classes": [
                {
                    "class": row.kind,
                    "nodes": row.nodes,
                    "ops": row.ops,
                    "types": row.types,
                    "flops": row.flops,
                    "bytes": row.bytes,
                    "unknown_flops": row.uncounted,
                    "unknown_shapes": row.unknown,
                    "parameters": row.parameters,
                }
                for row in self.classes
            ],
            "notes": self.notes,
            "warnings": [
                {"value": w.value, "node": w.node, "text": w.text} for w in self.warnings
            ],
        }

    @classmethod
    def of(
        cls,
        graph: Graph,
        shapes: Mapping[int, Shape],
        facts: Facts | None = None,
        *,
        name: str,
        size_bytes: int,
        opset: int = 0,
    ) -> Census:
        """Count a graph whose values have ``shapes``; ``facts`` are those observed, if any."""
        classes = count_classes(graph, shapes)
        return cls(
            name=name,
            opset=opset,
            nodes=len(graph.nodes),
            parameters=sum(c.parameters for c in classes),
            size_bytes=size_bytes,
            classes=classes,
            notes=notes(graph, facts or {}),
        )


def _counts(found: Mapping[str, int], between: str = " ") -> str:
    """Names with their numbers; a narrow column breaks between them at a blank."""
    return ", ".join(f"{name}{between}{count}" for name, count in found.items())


def _number(value: float, unknown: int) -> str:
    """Millions; a lower bound if ``unknown`` nodes are left out, or counted only once."""
    if not value:
        return "unknown" if unknown else ""
    return f"{'>= ' if unknown else ''}{value / 1e6:,.2f}"


def count_classes(graph: Graph, shapes: Mapping[int, Shape]) -> tuple[ClassCount, ...]:
    """Count nodes by class, the classes with most FLOPs first."""
    groups: dict[str, list[Node]] = {}
    for node in graph.nodes:
        groups.setdefault(by_name(node.op).kind.label, []).append(node)
    counted: set[int] = set()
    repeated = _repeated(graph)
    rows = [
        _count(graph, kind, nodes, shapes, counted, repeated) for kind, nodes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda r: (-r.flops, -r.nodes)))


def _count(
    graph: Graph,
    kind: str,
    nodes: list[Node],
    shapes: Mapping[int, Shape],
    counted: set[int],
    repeated: set[int],
) -> ClassCount:
    parameters = 0
    for node in nodes:
        for index in node.inputs:
            if index is None or index in counted:
                continue
            constant = graph.values[index].constant
            if constant is not None:
                counted.add(index)
                parameters += constant.size if _is_parameter(graph, node, index) else 0
    operations = [flops(graph, n, shapes) for n in nodes]
    moved = [bytes_moved(graph, n, None, shapes) for n in nodes]
    in_loop = [n.region in repeated for n in nodes]
    types = [computed_in(graph, n) if by_name(n.op).has_numbers else "" for n in nodes]
    countable = [by_name(n.op).flops is not None for n in nodes]
    return ClassCount(
        kind=kind,
        nodes=len(nodes),
        ops=dict(Counter(n.op for n in nodes).most_common()),
        types=dict(Counter(t or "other" for t in types).most_common()),
        flops=sum(f for f in operations if f is not None),
        bytes=sum(b for b in moved if b is not None),
        uncounted=sum(
            known and (f is None or (f > 0 and loops))
            for known, f, loops in zip(countable, operations, in_loop, strict=True)
        ),
        unknown=sum(
            b is None or (b > 0 and loops) for b, loops in zip(moved, in_loop, strict=True)
        ),
        parameters=parameters,
    )


def _is_parameter(graph: Graph, node: Node, index: int) -> bool:
    """Whether a constant is a parameter: floats, or codes that stand for floats.

    Scales and zero points are not: they say how other constants are encoded.
    """
    value = graph.values[index]
    kind = by_name(node.op).kind
    if kind is OpKind.CAST and value.format is None:
        return not value.is_decision and not _is_subtracted(graph, node)
    if kind is not OpKind.QUANTIZE:
        return value.format is not None
    if node.op in STATES_CODES:
        return index == node.inputs[0]
    return len(value.shape or ()) >= _OPERAND_RANK


def _is_subtracted(graph: Graph, cast: Node) -> bool:
    """Whether the result of a cast is subtracted, as a zero point is from codes."""
    result = graph.values[cast.outputs[0]] if cast.outputs[0] is not None else None
    readers = () if result is None else graph.readers(result)
    return any(r.op == "sub" and result and r.inputs[1] == result.id for r in readers)


def _repeated(graph: Graph) -> set[int]:
    """Numbers of the regions that a loop may run several times."""
    owners = body_owners(graph)
    repeated_regions: set[int] = set()
    for region in sorted(owners):  # enclosing regions have lower numbers
        if owners[region].op in LOOPS or owners[region].region in repeated_regions:
            repeated_regions.add(region)
    return repeated_regions


def risks(graph: Graph, facts: Facts, low: Format) -> tuple[Risk, ...]:
    """What ``low`` cannot hold: constants, then values that overflow, vanish, or are NaN."""
    value_risks = [r for v in graph.values if (r := _constant_risk(graph, v, low)) is not None]
    for index, seen in facts.items():
        value = graph.values[index]
        node = graph.nodes[value.producer].name if value.producer is not None else "input"
        text = _risk(graph, value, seen, low)
        if text:
            value_risks.append(Risk(value=value.name, node=node, text=text))
    return tuple(value_risks)


def _risk(graph: Graph, value: Value, seen: ValueFacts, low: Format) -> str:
    share = seen.flushed_share(low)
    divides = divided_by(graph, value) if share else None
    if seen.nans or seen.infs:
        text = f"{seen.nans} NaN and {seen.infs} Inf in fp32"
        return text + (_absorbed(graph, value) if seen.infs else "")
    if seen.largest >= range_limit(low):
        text = f"largest {seen.largest:.4g}, limit {range_limit(low):.4g}"
        return text + (_absorbed(graph, value) if seen.largest >= overflow_limit(low) else "")
    if divides is not None:
        return f"a share of {share:.2g} becomes zero, and {divides.name} divides by it"
    return f"{share:.1%} of it becomes zero" if share >= _LOST_SHARE else ""


def _absorbed(graph: Graph, value: Value) -> str:
    """Text: a reader that gives a finite result for Inf and so hides an overflow; or empty."""
    for node in (graph.nodes[n] for n in value.uses):
        port = _ABSORBING.get(node.op)
        if port is not None and port < len(node.inputs) and node.inputs[port] == value.id:
            return f"; {node.name} makes a finite number of Inf"
    return ""


def _constant_risk(graph: Graph, value: Value, low: Format) -> Risk | None:
    """A constant that ``low`` cannot represent, by the law of the rule ``constants``."""
    readers = [n for i in value.uses if value in graph.following_inputs(n := graph.nodes[i])]
    if value.constant is None or value.format is not Format.FP32 or not readers:
        return None
    problem = constant_problem(value, low)
    if problem is None:
        return None
    text = f"constant, {problem.what} {problem.number:.4g}, limit {problem.limit:.4g}"
    return Risk(value=value.name, node=readers[0].name, text=text)


def notes(graph: Graph, facts: Facts) -> dict[str, str]:
    """Notes beside the table of classes: unknown ops, the first op that gives NaN or Inf."""
    texts: dict[str, str] = {}
    unknown = Counter(n.native for n in graph.nodes if n.op == "unknown")
    if unknown:
        texts["not known here, type kept"] = ", ".join(f"{k} {n}" for k, n in unknown.items())
    first = first_nonfinite(graph, dict(facts))
    if first is not None:
        texts["first op to give NaN or Inf in fp32"] = first
    return texts
