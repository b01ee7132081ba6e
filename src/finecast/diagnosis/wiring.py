"""Which ops of two models read other results, which outputs are, and their order.

Ops are paired by ``graph.matching``, by names first: a residual sum that reads another layer,
or a subtraction whose operands changed places, has a partner all the same.

Law: of two exports of one net nothing is reported where ops only hand a value on, where one
model computes once what the other computes twice, and of what is computed when a model is
loaded. Ops are compared that have the same name or the same weights: the partners of others
are guessed by their place. A value of an op without a partner is not known, and is compared
with none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

from finecast.graph import Graph, Value
from finecast.graph.matching import Matching
from finecast.graph.structure import SAME_NUMBERS, Structure, fed, structure_of

_HANDED_ON: Final = SAME_NUMBERS | {"cast", "quantize", "dequantize"}
_COMMUTATIVE: Final = frozenset(
    {"add", "equal", "logical", "max", "mean", "min", "mul", "not_equal", "sum"}
)
_CONSTANT: Final = "constant"

Source = Hashable
"""What a value is: the result of an op, an input by its name, or a constant; None if that is
not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One model: its ops that compute from inputs, and the values that are equal."""

    graph: Graph
    structure: Structure
    live: frozenset[int]
    paired: frozenset[int]
    same: Mapping[int, Hashable]

    @classmethod
    def of(cls, graph: Graph, paired: frozenset[int]) -> _Side:
        structure = structure_of(graph)
        return cls(
            graph=graph,
            structure=structure,
            live=fed(structure),
            paired=paired,
            same=_classes(graph, structure),
        )

    def origin(self, index: int) -> Value:
        """The value of that id, or that which ops without a partner only hand on."""
        value = self.graph.values[index]
        while value.producer is not None and value.producer not in self.paired:
            node = self.graph.nodes[value.producer]
            first = node.inputs[0] if node.inputs else None
            if node.op not in _HANDED_ON or first is None:
                break
            value = self.graph.values[first]
        return value


def _classes(graph: Graph, structure: Structure) -> dict[int, Hashable]:
    """For each result a name that it shares with results of equal ops on equal values."""
    classes: dict[int, Hashable] = {}
    for node, op in zip(graph.nodes, structure, strict=True):
        # Constants are known by their digests, as each model may have a copy of its own.
        read = tuple(
            None if i is None or graph.values[i].constant else classes.get(i, i)
            for i in node.inputs
        )
        key = hash((op.op, op.attributes, op.shape, op.weights, read))
        classes |= {i: (key, port) for port, i in enumerate(node.outputs) if i is not None}
    return classes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wires:
    """The values of both models, named alike where they correspond."""

    one: _Side
    two: _Side
    pairs: Mapping[int, int]
    named: bool

    def before(self, index: int, *, by_op: bool) -> Source:
        """A value of the first model, as the result in the second that it should be.

        Args:
            index: The value's id.
            by_op: Whether an op that computes from constants is told from a constant.
        """
        value = self.one.origin(index)
        if value.producer is None or (not by_op and value.producer not in self.one.live):
            return self._read(value)
        other = self.pairs.get(value.producer)
        if other is None:
            return None
        own = self.one.graph.nodes[value.producer].outputs
        results = self.two.graph.nodes[other].outputs
        result = results[own.index(value.id)] if len(own) == len(results) else None
        return None if result is None else self.two.same[result]

    def after(self, index: int, *, by_op: bool) -> Source:
        """A value of the second model."""
        value = self.two.origin(index)
        if value.producer is None or (not by_op and value.producer not in self.two.live):
            return self._read(value)
        return self.two.same[value.id] if value.producer in self.two.paired else None

    def _read(self, value: Value) -> Source:
        if value.constant is not None or value.producer is not None:
            return _CONSTANT
        return ("input", value.name) if self.named and value.is_input else None

    def differ(self, number: int) -> bool:
        """Whether an op of the first model reads other values than its partner."""
        a, b = self.one.graph.nodes[number], self.two.graph.nodes[self.pairs[number]]
        op, other = self.one.structure[number], self.two.structure[b.id]
        by_op = number not in self.one.live
        # By its place alone the partner of one of two equal ops may be that of the other; and
        # exporters compute sizes and tables in different ways.
        weighed = bool(op.weights) and op.weights == other.weights and not by_op
        if op.op != other.op or not (a.name == b.name or weighed):
            return False
        if len(a.inputs) != len(b.inputs):
            return False
        here = [None if i is None else self.before(i, by_op=by_op) for i in a.inputs]
        there = [None if i is None else self.after(i, by_op=by_op) for i in b.inputs]
        if op.op in _COMMUTATIVE:
            return None not in (*here, *there) and Counter(here) != Counter(there)
        return any(_apart(x, y) for x, y in zip(here, there, strict=True))


def _apart(one: Source, two: Source) -> bool:
    """Whether both are known, and not the same."""
    return one is not None and two is not None and one != two


def other_wiring(
    before: Graph, after: Graph, matching: Matching
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The ops of ``before`` whose partners read other values, and what differs of ports.

    Another order of inputs or outputs is another model to callers by position.
    """
    pairs = matching.pairs
    wires = _Wires(
        one=_Side.of(before, frozenset(pairs)),
        two=_Side.of(after, frozenset(pairs.values())),
        pairs=pairs,
        named={v.name for v in before.inputs} == {v.name for v in after.inputs},
    )
    outputs = {value.name: value.id for value in after.outputs}
    others = tuple(
        f"output {value.name!r} is the result of another op"
        for value in before.outputs
        if value.name in outputs
        and _apart(
            wires.before(value.id, by_op=True), wires.after(outputs[value.name], by_op=True)
        )
    )
    kinds = zip(("inputs", "outputs"), before.ports, after.ports, strict=True)
    others += tuple(
        f"{kind} come in another order: {', '.join(two)}; it was {', '.join(one)}"
        for kind, one, two in kinds
        if one != two and sorted(one) == sorted(two)
    )
    return frozenset(n for n in pairs if wires.differ(n)), others
