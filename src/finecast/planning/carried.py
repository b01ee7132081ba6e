"""State that the caller of a model carries from call to call, such as keys and values.

Law: an output that becomes an input of the next call has the type of that input. So all
inputs and outputs that carry state, the ops that read them and the ops that make them are one
decision of a plan: they are in one unit, and the plan declares the types of the inputs and
outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import READS_ANY_FORMAT
from finecast.planning.units import Units


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """The state of a graph.

    Attributes:
        ports: Ids of the values that are its inputs and outputs.
        nodes: Ids of the nodes that read these inputs or make these outputs.
    """

    ports: frozenset[int] = frozenset()
    nodes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, graph: Graph, state: Mapping[str, str]) -> Carried:
        """The fp32 state among ``state``: names of outputs by those of inputs."""
        read = [v for v in graph.inputs if v.name in state and v.format is Format.FP32]
        output_names = {state[v.name] for v in read}
        written = [
            v for v in graph.outputs if v.name in output_names and v.format is Format.FP32
        ]
        readers = {node.id for value in read for node in _reading(graph, value)}
        makers = {v.producer for v in written if v.producer is not None}
        return cls(
            ports=frozenset(v.id for v in (*read, *written)),
            nodes=frozenset(readers | makers),
        )

    def declared(self, graph: Graph, formats: Mapping[int, Format]) -> dict[str, Format]:
        """The low format of the state, by names of inputs and outputs.

        Empty where not all of its nodes have the same low format, which values are stored in.
        """
        state_formats = {formats.get(node, Format.FP32).result for node in self.nodes}
        if len(state_formats) != 1 or state_formats == {Format.FP32}:
            return {}
        names = (v.name for v in graph.values if v.id in self.ports)
        return dict.fromkeys(names, state_formats.pop())

    def unit(self, units: Units) -> Mapping[int, int]:
        """The unit that decides each input and output; empty if nothing does."""
        unit_ids = {units.of.get(node, -1) for node in self.nodes}
        if len(unit_ids) != 1 or -1 in unit_ids:
            return {}
        return dict.fromkeys(self.ports, unit_ids.pop())


def _reading(graph: Graph, value: Value) -> Iterator[Node]:
    """The nodes whose format decides in which one they read ``value``."""
    for number in value.uses:
        node = graph.nodes[number]
        ports = zip(node.inputs, node.follows_in, strict=True)
        follows = any(index == value.id and follows for index, follows in ports)
        if follows and node.native not in READS_ANY_FORMAT:
            yield node
