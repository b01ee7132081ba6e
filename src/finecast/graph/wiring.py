"""Which ops of two models read other results, which outputs are, and their order.

Ops are paired by ``graph.matching``, by names first: a residual sum that reads another layer,
or a subtraction whose operands changed places, has a partner all the same.

Law: of two exports of one net nothing is reported where ops only hand a value on, where one
model computes once what the other computes twice, and of what is computed when a model is
loaded. Ops are compared that have the same name or the same weights: the partners of others
are guessed by their place. A value of an op without a partner is not known, and is compared
with none.

A plan keeps no more of its model than a ``Structure``, and both sides are then compared by
theirs: without the order of inputs and outputs. That of a plan of an earlier version has no
ports: which op computes what is read is compared, and not which of its results it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, NamedTuple, TypeAlias

from finecast.graph import Graph
from finecast.graph.matching import Matching
from finecast.graph.structure import (
    MODEL_INPUT,
    SAME_NUMBERS,
    Structure,
    digest,
    fed,
    structure_of,
)

_HANDED_ON: Final = SAME_NUMBERS | {"cast", "quantize", "dequantize"}
_COMMUTATIVE: Final = frozenset(
    {"add", "equal", "logical", "max", "mean", "min", "mul", "not_equal", "sum"}
)
_CONSTANT: Final = "constant"


class _Input(NamedTuple):
    """An input of the model, by its name or a digest of it; without one where unknown."""

    name: str


class _Result(NamedTuple):
    """One of the results of an op."""

    op: int
    port: int


_Value: TypeAlias = "_Input | _Result | str | None"
"""What an op reads; ``_CONSTANT`` for a constant, None where it reads nothing."""

Source = Hashable
"""What a value is: the result of an op, an input by its name, or a constant; None if that is
not known."""


@dataclass(slots=True, kw_only=True)
class _Side:
    """One model: its ops that compute from inputs, and the values that are equal.

    Attributes:
        structure: Its ops.
        reads: What each op reads.
        results: How many results each op has.
        outputs: The outputs of the model, by a digest of the name.
        paired: Ops with a partner.
        live: Ops that compute from inputs.
        same: For each op a name that it shares with equal ops on equal values.
    """

    structure: Structure
    reads: Sequence[Sequence[_Value]]
    results: Sequence[int]
    outputs: Mapping[str, _Value]
    paired: frozenset[int]
    live: frozenset[int] = field(init=False)
    same: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self.live, self.same = fed(self.structure), _classes(self.structure, self.reads)

    @classmethod
    def of_graph(cls, graph: Graph, paired: frozenset[int]) -> _Side:
        return cls(
            structure=structure_of(graph),
            reads=[[_value(graph, i) for i in node.inputs] for node in graph.nodes],
            results=[len(node.outputs) for node in graph.nodes],
            outputs={digest(v.name): _value(graph, v.id) for v in graph.outputs},
            paired=paired,
        )

    @classmethod
    def of_structure(
        cls, structure: Structure, paired: frozenset[int], *, ported: bool, named: bool
    ) -> _Side:
        reads = [
            [
                _Input(port if named else "")
                if i == MODEL_INPUT
                else _Result(i, int(port or 0) if ported else 0)
                for i, port in zip(op.inputs, op.ports or repeat(""), strict=False)
            ]
            for op in structure
        ]
        results = [len(op.results) if ported else 1 for op in structure]
        outputs = {
            name: _Result(n, port)
            for n, op in enumerate(structure)
            for port, name in enumerate(op.results if ported else ())
            if name
        }
        return cls(
            structure=structure, reads=reads, results=results, outputs=outputs, paired=paired
        )

    def origin(self, value: _Value) -> _Value:
        """A value, or that which ops without a partner only hand on as it."""
        while isinstance(value, _Result) and value.op not in self.paired:
            first = next(iter(self.reads[value.op]), None)
            if self.structure[value.op].op not in _HANDED_ON or first is None:
                break
            value = first
        return value

    def known(self, result: _Result) -> Source:
        """The result of an op, by the name that equal ops on equal values share."""
        return self.same[result.op], result.port


def _value(graph: Graph, index: int | None) -> _Value:
    if index is None:
        return None
    value = graph.values[index]
    if value.producer is not None:
        return _Result(value.producer, graph.nodes[value.producer].outputs.index(index))
    if value.constant is not None:
        return _CONSTANT
    return _Input(value.name) if value.is_input else None


def _classes(structure: Structure, reads: Sequence[Sequence[_Value]]) -> list[int]:
    """For each op a name that it shares with equal ops on equal values."""
    classes: list[int] = []

    def known(value: _Value) -> Hashable:
        if isinstance(value, _Result):
            known_op = value.op < len(classes)  # as all are, but in a loop
            return (classes[value.op] if known_op else value.op), value.port
        # Constants are known by their digests, as each model may have a copy of its own.
        return None if value == _CONSTANT else value

    for op, values in zip(structure, reads, strict=True):
        read = tuple(map(known, values))
        classes.append(hash((op.op, op.attributes, op.shape, op.weights, read)))
    return classes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wires:
    """The values of both models, named alike where they correspond."""

    one: _Side
    two: _Side
    pairs: Mapping[int, int]
    named: bool

    def before(self, read: _Value, *, by_op: bool) -> Source:
        """A value of the first model, as the result in the second that it should be.

        Args:
            read: The value.
            by_op: Whether an op that computes from constants is told from a constant.
        """
        value = self.one.origin(read)
        if not isinstance(value, _Result) or not (by_op or value.op in self.one.live):
            return self._read(value)
        other = self.pairs.get(value.op)
        if other is None or self.one.results[value.op] != self.two.results[other]:
            return None
        return self.two.known(_Result(other, value.port))

    def after(self, read: _Value, *, by_op: bool) -> Source:
        """A value of the second model."""
        value = self.two.origin(read)
        if not isinstance(value, _Result) or not (by_op or value.op in self.two.live):
            return self._read(value)
        return self.two.known(value) if value.op in self.two.paired else None

    def _read(self, value: _Value) -> Source:
        if isinstance(value, _Input):
            return value if self.named else None
        return None if value is None else _CONSTANT

    def differ(self, number: int) -> bool:
        """Whether an op of the first model reads other values than its partner."""
        partner = self.pairs[number]
        op, other = self.one.structure[number], self.two.structure[partner]
        by_op = number not in self.one.live
        # By its place alone the partner of one of two equal ops may be that of the other; and
        # exporters compute sizes and tables in different ways.
        weighed = bool(op.weights) and op.weights == other.weights and not by_op
        if op.op != other.op or not (op.name == other.name or weighed):
            return False
        if len(self.one.reads[number]) != len(self.two.reads[partner]):
            return False
        here = [self.before(value, by_op=by_op) for value in self.one.reads[number]]
        there = [self.after(value, by_op=by_op) for value in self.two.reads[partner]]
        if op.op in _COMMUTATIVE:
            return None not in (*here, *there) and Counter(here) != Counter(there)
        return any(_apart(x, y) for x, y in zip(here, there, strict=True))


def _apart(one: Source, two: Source) -> bool:
    """Whether both are known, and not the same."""
    return one is not None and two is not None and one != two


def other_wiring(
    before: Graph | Structure, after: Graph | Structure, matching: Matching
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The ops of ``before`` whose partners read other values, and what differs of outputs.

    Another order of inputs or outputs is another model to callers by position, and is reported
    of two graphs.
    """
    pairs = matching.pairs
    ends = frozenset(pairs), frozenset(pairs.values())
    if isinstance(before, Graph) and isinstance(after, Graph):
        sides = _Side.of_graph(before, ends[0]), _Side.of_graph(after, ends[1])
        named = {v.name for v in before.inputs} == {v.name for v in after.inputs}
        orders = _other_orders(before, after)
    else:
        one, two = (structure_of(s) if isinstance(s, Graph) else s for s in (before, after))
        sides, named, orders = _sides(one, two, ends), True, ()
    wires = _Wires(one=sides[0], two=sides[1], pairs=pairs, named=named)
    names = {
        digest(value.name): f"output {value.name!r}"
        for graph in (before, after)
        if isinstance(graph, Graph)
        for value in graph.outputs
    }
    others = tuple(
        f"{names.get(name, 'an output')} is the result of another op"
        for name, value in sides[0].outputs.items()
        if name in sides[1].outputs
        and _apart(
            wires.before(value, by_op=True), wires.after(sides[1].outputs[name], by_op=True)
        )
    )
    return frozenset(n for n in pairs if wires.differ(n)), (*dict.fromkeys(others), *orders)


def _sides(
    before: Structure, after: Structure, ends: tuple[frozenset[int], frozenset[int]]
) -> tuple[_Side, _Side]:
    """Both structures, by what both say: an earlier version of one has no ports.

    Where inputs of the model have other names, one input is not told from another. One that no
    op reads is in no structure.
    """
    ported = all(any(op.results for op in side) for side in (before, after))
    inputs, others = (
        {port for op in side for i, port in zip(op.inputs, op.ports, strict=False) if i < 0}
        for side in (before, after)
    )
    named = ported and (inputs <= others or inputs >= others)
    one, two = (
        _Side.of_structure(side, paired, ported=ported, named=named)
        for side, paired in zip((before, after), ends, strict=True)
    )
    return one, two


def _other_orders(before: Graph, after: Graph) -> tuple[str, ...]:
    """Inputs and outputs that come in another order."""
    kinds = zip(("inputs", "outputs"), before.ports, after.ports, strict=True)
    return tuple(
        f"{kind} come in another order: {', '.join(two)}; it was {', '.join(one)}"
        for kind, one, two in kinds
        if one != two and sorted(one) == sorted(two)
    )
