"""What differs between two plans, two models, or a plan and a new version of its model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from finecast.diagnosis.explanation import decider_of
from finecast.graph import Graph
from finecast.graph.fingerprints import relative_difference
from finecast.graph.matching import Matching, match
from finecast.graph.structure import Structure, fed, lacking, other_weights, structure_of
from finecast.graph.wiring import other_wiring
from finecast.naming import number_of
from finecast.ops import by_name
from finecast.planning.contributions import ERROR_IF, TIME_IN
from finecast.planning.placing import Placement, structure_in
from finecast.planning.plan import Decision, Plan
from finecast.reports.base import Report, TextTable
from finecast.rules.base import DECISION
from finecast.rules.quantized import computed_in

_FACTOR: Final = 1.5
"""A time or an error differs if it is so many times the other: times of single kernels are off
by some ten percent, errors of single roundings by less."""


class Change(Enum):
    """How an op differs. LOST: a rule that decided before says nothing any more.

    Of an op whose format is the same another reason is no change: what it costs was measured
    anew, and reasons are worded by that.
    """

    GONE = "gone"
    NEW = "new"
    RESTATED = "rewritten"
    TYPE = "type"
    LOST = "lost its reason"
    WEIGHTS = "weights"
    SHAPE = "shape"
    ATTRIBUTES = "attributes"
    INPUTS = "inputs"
    TIME = "time"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpState:
    """An op on one side.

    Attributes:
        node: Its name.
        op: What it computes.
        type: The label of its format.
        decided_by: What decided that, in a word or two; empty for a model.
        why: The same in a sentence.
        rules: The rules that gave a verdict.
        deciding: Those of them that decided.
        settled: Whether it computes from constants or sizes alone.
        us: Time of its kernel in that format, by the plan's evidence; None if not known.
        error: Relative error of the worst output if it alone had that format; None likewise.
    """

    node: str
    op: str
    type: str
    decided_by: str = ""
    why: str = ""
    rules: frozenset[str] = frozenset()
    deciding: frozenset[str] = frozenset()
    settled: bool = False
    us: float | None = None
    error: float | None = None

    @classmethod
    def of(cls, decision: Decision) -> OpState:
        """By a plan's decision."""
        label = decision.format.label
        evidence: dict[str, float | str] = {}
        for reason in decision.deciding:
            evidence |= reason.evidence
        return cls(
            node=decision.node,
            op=decision.op,
            type=label,
            decided_by=decider_of(decision),
            why=decision.why,
            rules=frozenset(r.rule for r in decision.reasons),
            deciding=frozenset(r.rule for r in decision.deciding),
            us=_figure(evidence.get(TIME_IN.format(label))),
            error=_figure(evidence.get(ERROR_IF.format(label))),
        )

    def to_dict(self) -> dict[str, Any]:
        """The state in JSON's types."""
        return {
            "node": self.node,
            "op": self.op,
            "format": self.type,
            "decided_by": self.decided_by or None,
            "why": self.why or None,
            "us": self.us,
            "relative_error": self.error,
        }


def _figure(value: float | str | None) -> float | None:
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDifference:
    """An op on both sides; None where it is not there. Without ``changes`` all is equal.

    Attributes:
        before: The op before.
        after: The op after.
        changes: How it differs.
        weights: The norm of the difference of its weights, relative to the larger of their
            norms, of those that differ most; infinite if NaN or Inf are in other places.
            None if they are equal, not at hand or of other sizes.
        reordered: Whether its other weights have the same numbers in another order.
    """

    before: OpState | None
    after: OpState | None
    changes: tuple[Change, ...]
    weights: float | None = None
    reordered: bool = False

    @property
    def shown(self) -> OpState:
        """The op as it is after, or was before where it is gone."""
        state = self.after or self.before
        assert state is not None
        return state

    @property
    def types(self) -> str:
        """The types before and after: ``bf16 -> fp32``."""
        if self.before and self.after and self.before.type != self.after.type:
            return f"{self.before.type} -> {self.after.type}"
        return self.shown.type

    @property
    def text(self) -> str:
        """The op by its name, and why it has its type where a plan says that."""
        before, after, name = self.before, self.after, self.shown.node
        if before and after and before.node != after.node:
            name = f"{after.node} (was {before.node})"
        told = {Change.TYPE, Change.LOST, Change.NEW} & {*self.changes}
        parts = [self.shown.why] if told and self.shown.why else []
        if self.weights == math.inf:
            parts.append("weights have NaN or Inf in other places")
        elif self.weights is not None:
            parts.append(f"weights differ by {self.weights:.2g} of their norm")
        parts += ["weights are the same numbers in another order"] if self.reordered else []
        return f"{name}: {'; '.join(parts)}" if parts else name

    def to_dict(self) -> dict[str, Any]:
        """The difference in JSON's types."""
        return {
            "changes": [change.value for change in self.changes],
            "before": self.before and self.before.to_dict(),
            "after": self.after and self.after.to_dict(),
            # JSON has no infinity: the text says what it is.
            "weights_relative_difference": None if self.weights == math.inf else self.weights,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is compared.

    Attributes:
        name: Its file.
        structure: Its ops.
        states: The ops that plans decide, by their number in ``structure``.
        live: The ops that compute from the numbers of an input, likewise.
        declared: What a plan says of inputs, outputs and a KV cache; None of a model.
        graph: The model, where that is at hand.
    """

    name: str
    structure: Structure
    states: Mapping[int, OpState]
    live: frozenset[int]
    declared: tuple[str, ...] | None = None
    graph: Graph | None = None

    def state(self, number: int) -> OpState:
        """The op of that number, which a plan may not decide."""
        op = self.structure[number]
        return self.states.get(number) or OpState(
            node=op.name, op=op.op, type="no float type", settled=True
        )

    @classmethod
    def of_plan(cls, plan: Plan, name: str) -> Side:
        """The model of a plan with the plan's types."""
        structure = structure_in(plan)
        decided = {d.node: d for d in plan.counted}
        states = {
            n: OpState.of(decided[op.name])
            for n, op in enumerate(structure)
            if op.name in decided
        }
        return replace(cls._of(name, structure, states), declared=plan.declared)

    @classmethod
    def of_graph(cls, graph: Graph, name: str) -> Side:
        """A model with the types that it has."""
        states = {
            node.id: OpState(node=node.name, op=node.op, type=computed_in(graph, node))
            for node in graph.float_nodes
            if node.format is not None and by_name(node.op).has_numbers
        }
        return replace(cls._of(name, structure_of(graph), states), graph=graph)

    @classmethod
    def _of(cls, name: str, structure: Structure, states: Mapping[int, OpState]) -> Side:
        """With what is said of each op by its place in the graph."""
        live = fed(structure)
        placed = {n: replace(s, settled=n not in live) for n, s in states.items()}
        return cls(name=name, structure=structure, states=placed, live=live)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceGroup:
    """Ops of one class that differ alike.

    ``example`` is the one that takes the most time; where no time is known the one whose
    weights differ most, or the first.
    """

    changes: tuple[Change, ...]
    types: str
    op: str
    ops: tuple[OpDifference, ...]
    example: OpDifference


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(Report):
    """What differs between two sides, op by op.

    Attributes:
        before: The file of the first.
        after: The file of the second.
        ops: All ops of both that plans decide; those that are gone last.
        renamed: How many ops have another name.
        declared: What one of two plans alone says of inputs, outputs and a KV cache; of two
            models which outputs are results of other ops.
        placement: What a plan does to a new version of its model, if that was asked.
    """

    before: str
    after: str
    ops: tuple[OpDifference, ...]
    renamed: int
    declared: tuple[str, ...] = ()
    placement: Placement | None = None

    @property
    def changed(self) -> tuple[OpDifference, ...]:
        """The ops that differ."""
        return tuple(one for one in self.ops if one.changes)

    @property
    def matched_share(self) -> float:
        """The lesser share of either side's ops that the other has, too; 1 without ops.

        Ops that compute from constants or sizes alone are left out: engines compute them when
        they load a model, and exporters state them in very different ways.
        """
        gone, new = (
            sum(change in one.changes and not one.shown.settled for one in self.ops)
            for change in (Change.GONE, Change.NEW)
        )
        both = sum(
            one.before is not None and one.after is not None and not one.shown.settled
            for one in self.ops
        )
        return both / (both + max(gone, new)) if both + gone + new else 1.0

    def count(self, change: Change) -> int:
        """The number of ops that differ in this way."""
        return sum(change in one.changes for one in self.ops)

    @property
    def groups(self) -> list[DifferenceGroup]:
        """The ops that differ, by how they do and by class; large groups first."""
        ops_by_group: dict[tuple[tuple[Change, ...], str, str], list[OpDifference]] = {}
        for one in self.changed:
            ops_by_group.setdefault((one.changes, one.types, one.shown.op), []).append(one)
        return [
            DifferenceGroup(
                changes=changes,
                types=types,
                op=op,
                ops=tuple(ops),
                example=max(ops, key=lambda one: (one.shown.us or 0.0, one.weights or 0.0)),
            )
            for (changes, types, op), ops in sorted(
                ops_by_group.items(), key=lambda f: -len(f[1])
            )
        ]

    @property
    def summary(self) -> list[str]:
        """A few lines that sum up."""
        counts = {c: self.count(c) for c in Change}
        same = len(self.ops) - len(self.changed)
        both = len(self.ops) - counts[Change.GONE] - counts[Change.NEW]
        renamed = f", {self.renamed} of them by other names" if self.renamed else ""
        told = [f"{c.value} ({number_of(n, 'op')})" for c, n in counts.items() if n]
        lines = [
            f"{number_of(both, 'op')} in both{renamed}; {same} without a change",
            *self.declared,
        ]
        if told or not self.declared:
            lines.append(f"changes: {', '.join(told)}" if told else "nothing differs")
        if self.placement is not None:
            lines.append(f"if it is applied: {self.placement.text}")
        return lines

    @property
    def lines(self) -> list[str]:
        """The counts, and the groups of ops that differ."""
        return [f"{self.before} -> {self.after}", *self.summary] + [
            f"{number_of(len(g.ops), g.op)} {', '.join(c.value for c in g.changes)}:"
            f" {g.types}, as {g.example.text}"
            for g in self.groups
        ]

    @property
    def tables(self) -> Sequence[TextTable]:
        """The ops that differ, by how they do."""
        rows = [
            (
                str(len(g.ops)),
                ", ".join(change.value for change in g.changes),
                g.op,
                g.types,
                g.example.text,
            )
            for g in self.groups
        ]
        heads = ("ops", "what", "op", "type", "for example")
        notes = self.summary
        return [TextTable(left=heads, rows=rows, fold=heads[1:], notes=notes)]

    @property
    def each(self) -> TextTable:
        """A row for each op that differs."""
        heads = ("what", "type", "op")
        rows = [
            (", ".join(change.value for change in one.changes), one.types, one.text)
            for one in self.changed
        ]
        return TextTable(left=heads, rows=rows, fold=heads, notes=self.summary)

    def _content(self) -> dict[str, Any]:
        placement = self.placement
        return {
            "before": self.before,
            "after": self.after,
            "summary": self.summary,
            "matched_share": self.matched_share,
            "renamed": self.renamed,
            "declared": list(self.declared),
            "counts": {c.value: self.count(c) for c in Change},
            "ops": [one.to_dict() for one in self.changed],
            "apply": None
            if placement is None
            else {
                "share": placement.share,
                "gone": list(placement.gone),
                "new": list(placement.new),
                "refused": dict(placement.refused),
            },
        }


def difference(before: Side, after: Side) -> Difference:
    """What differs between two sides, whose ops are matched by name and by structure."""
    matching = match(before.structure, after.structure)
    sides = (before.graph or before.structure, after.graph or after.structure)
    rewired, outputs = other_wiring(*sides, matching)
    pairs = (
        (n in before.states, _pair(before, after, n, matching, inputs=n in rewired))
        for n in sorted(matching.pairs)
    )
    # Ops without float types are counted only where they differ.
    ops = [pair for decided, pair in pairs if decided or pair.changes]
    ops += _restated(before, after, matching)
    seen = (
        {one.before.node for one in ops if one.before},
        {one.after.node for one in ops if one.after},
    )
    new = [s for s in after.states.values() if s.node not in seen[1]]
    gone = [s for s in before.states.values() if s.node not in seen[0]]
    ops += [OpDifference(before=None, after=s, changes=(Change.NEW,)) for s in new]
    ops += [OpDifference(before=s, after=None, changes=(Change.GONE,)) for s in gone]
    return Difference(
        before=before.name,
        after=after.name,
        ops=tuple(ops),
        declared=(*_declared(before, after), *outputs),
        renamed=sum(
            one.before is not None
            and one.after is not None
            and one.before.node != one.after.node
            for one in ops
        ),
    )


def _declared(before: Side, after: Side) -> tuple[str, ...]:
    """What one of two plans alone says; of a model nothing is known."""
    if before.declared is None or after.declared is None:
        return ()
    sides = (
        ("before", before.declared, after.declared),
        ("after", after.declared, before.declared),
    )
    return tuple(
        f"only {name}: {text}"
        for name, own, other in sides
        for text in own
        if text not in other
    )


def _pair(
    before: Side, after: Side, number: int, found: Matching, *, inputs: bool
) -> OpDifference:
    """An op of both sides; in another type it may be decided on one side alone."""
    other = found.pairs[number]
    mine, theirs = before.state(number), after.state(other)
    changes: list[Change] = [Change.TYPE] if mine.type != theirs.type else []
    if mine.decided_by and theirs.decided_by and mine.deciding - theirs.rules - {DECISION}:
        changes.append(Change.LOST)
    a, b = before.structure[number], after.structure[other]
    # In another type weights are rounded, at least.
    other_numbers = mine.type == theirs.type and other_weights(a, b)
    changes += [Change.WEIGHTS] if other_numbers else []
    decided = number in before.states
    changes += [Change.SHAPE] if decided and a.shape and b.shape and a.shape != b.shape else []
    of_one_library = a.attributes.partition(":")[0] == b.attributes.partition(":")[0]
    # Exporters state in different ways what is computed at load, as sizes.
    if of_one_library and (decided or number in before.live):
        changes += [Change.ATTRIBUTES] if a.attributes != b.attributes else []
    changes += [Change.INPUTS] if inputs else []
    if mine.type == theirs.type:
        changes += [Change.TIME] if _differ(mine.us, theirs.us) else []
        changes += [Change.ERROR] if _differ(mine.error, theirs.error) else []
    return OpDifference(
        before=mine,
        after=theirs,
        changes=tuple(changes),
        weights=_weights(before, after, number, other) if other_numbers else None,
        reordered=other_numbers and sorted(a.numbers) == sorted(b.numbers),
    )


def _weights(before: Side, after: Side, number: int, other: int) -> float | None:
    """How far the weights of an op are apart, as in ``OpDifference``."""
    if before.graph is None or after.graph is None:
        return None
    a, b = before.structure[number], after.structure[other]
    turned = a.attributes != b.attributes
    ones = before.graph.constants(before.graph.nodes[number])
    twos = after.graph.constants(after.graph.nodes[other])
    if turned:
        ones, twos = [ones[i] for i in lacking(a, b)], [twos[i] for i in lacking(b, a)]
    distances: list[float] = []
    for one in ones:
        alike = next((two for two in twos if two.size == one.size), None)
        if alike is not None:
            twos.remove(alike)
            distance = relative_difference(one.read(), alike.read(), turned=turned)
            distances += [] if distance is None else [distance]
    return max(distances, default=None)


def _differ(one: float | None, two: float | None) -> bool:
    if one is None or two is None or not (one > 0 and two > 0):
        return False
    return max(one / two, two / one) > _FACTOR


def _restated(before: Side, after: Side, found: Matching) -> list[OpDifference]:
    """Ops that are written as others; the shorter group's last op stands beside several."""
    made: list[OpDifference] = []
    for group in found.regroupings:
        mine = [before.states[n] for n in group.before if n in before.states]
        theirs = [after.states[n] for n in group.after if n in after.states]
        if not (mine and theirs):
            continue
        for place in range(max(len(mine), len(theirs))):
            one, two = (side[min(place, len(side) - 1)] for side in (mine, theirs))
            changed = (Change.RESTATED, *([Change.TYPE] if one.type != two.type else []))
            made.append(OpDifference(before=one, after=two, changes=changed))
    return made
