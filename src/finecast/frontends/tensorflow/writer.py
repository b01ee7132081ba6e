"""Replays edits on a GraphDef: casts, low constants, type attributes.

Law: inputs and outputs keep names, types and shapes unless an edit changes their types; what
no edit names does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.frontends.tensorflow.functions import (
    LOOPS,
    as_function,
    bodies,
    fresh,
    library_of,
    needed,
    reference,
    result_types,
    tensor_of,
)
from finecast.frontends.tensorflow.library import DTYPES, NodeDef, tf, type_number
from finecast.frontends.tensorflow.model import (
    FrozenModel,
    SignaturePort,
    base_name,
    reachable,
)
from finecast.frontends.tensorflow.reader import GraphBinding
from finecast.frontends.tensorflow.regions import GraphRegion
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)

CAST: Final = "tf::Cast"


def apply_edits(graph: Graph, binding: GraphBinding, edits: Sequence[Edit]) -> FrozenModel:
    """A copy of the model of ``binding`` with ``edits`` made.

    Raises:
        ModelError: If an edit asks for a format that TensorFlow's ops do not compute in.
    """
    rewriter = Rewriter(graph, binding)
    for edit in edits:
        match edit:
            case SetFormat():
                rewriter.set_format(edit.node, edit.to)
            case SetPort():
                rewriter.set_port(edit.value, edit.to)
            case InsertCast():
                low = rewriter.add_cast(edit.value, edit.to)
                rewriter.rewire(edit.value, edit.uses, low.tensor)
            case ConvertConstant():
                low = rewriter.constant(edit.value, edit.to)
                rewriter.rewire(edit.value, edit.uses, low.tensor)
            case RoundTrip():
                raise ModelError(
                    f"no op of TensorFlow's computes in {edit.to.format.label}",
                    where=graph.values[edit.value].name,
                    fix="use bf16 or fp16",
                )
    if edits:
        rewriter.restate_casts()
    return rewriter.finish()


class At(NamedTuple):
    """A tensor of a region, ``NODE:INDEX``."""

    region: int
    tensor: str


@dataclass(slots=True, kw_only=True)
class Section:
    """A copy of a region, to be changed.

    Attributes:
        nodes: Its nodes by name.
        arguments: Names of the placeholders that are a body's arguments.
        results: Tensors that a body returns; for the model itself its outputs.
    """

    nodes: dict[str, NodeDef]
    arguments: list[str]
    results: list[str]

    @classmethod
    def of(cls, region: GraphRegion) -> Section:
        """A copy of a region."""
        copy = tf.compat.v1.GraphDef()
        copy.node.extend(region.model.graph.node)
        return cls(
            nodes={n.name: n for n in copy.node},
            arguments=[base_name(tensor) for tensor in region.arguments],
            results=[port.tensor for port in region.model.outputs],
        )

    def kept(self, ends: Iterable[str]) -> list[NodeDef]:
        """The nodes called ``ends`` and those they depend on, in order."""
        names = reachable(self.nodes, ends)
        return [node for name, node in self.nodes.items() if name in names]


class Rewriter:
    """A copy of a model, to be changed.

    Attributes:
        graph: The neutral graph of the model.
        binding: What the ids of the graph stand for.
        sections: Copies of the model's regions, by number.
        stored: The format that each float value has after the changes so far, by id.
    """

    def __init__(self, graph: Graph, binding: GraphBinding) -> None:
        self.graph = graph
        self.binding = binding
        self.sections = [Section.of(region) for region in binding.regions]
        self.stored = {v.id: v.format for v in graph.values if v.format is not None}
        self._outputs: dict[str, str] = {}
        self._ports: dict[str, Format] = {}

    def at(self, value: int) -> At:
        """The tensor that a value of the graph is."""
        return At(self.binding.value_regions[value], self.binding.values[value])

    def nodes(self, region: int) -> dict[str, NodeDef]:
        """The nodes of a region, by name."""
        return self.sections[region].nodes

    def set_format(self, node: int, fmt: Format) -> None:
        """Let a node compute in ``fmt``."""
        for slot in self.binding.slots[node]:
            attribute = self.nodes(slot.region)[slot.node].attr[slot.attribute]
            if slot.index is None:
                attribute.type = type_number(fmt)
            else:
                attribute.list.type[slot.index] = type_number(fmt)
        for value in self.graph.following_outputs(self.graph.nodes[node]):
            self.stored[value.id] = fmt

    def set_port(self, value: int, fmt: Format) -> None:
        """Declare an input or output as ``fmt``; an output's tensor must have that type."""
        tensor = self.binding.values[value]
        self._ports[tensor] = fmt
        if self.graph.values[value].is_input:
            self.nodes(0)[base_name(tensor)].attr["dtype"].type = type_number(fmt)
            self.stored[value] = fmt

    def add_cast(self, value: int, to: Format) -> At:
        """The result of a new Cast of a value; it casts from the format in ``stored``."""
        region, tensor = self.at(value)
        node = self.add_node(region, f"{base_name(tensor)}/cast_{to.label}", "Cast")
        node.input.append(reference(tensor))
        node.attr["SrcT"].type = type_number(self.stored[value])
        node.attr["DstT"].type = type_number(to)
        node.attr["Truncate"].b = False
        return At(region, f"{node.name}:0")

    def constant(self, value: int, to: Format) -> At:
        """The tensor of a new constant: the constant ``value`` rounded to ``to``."""
        stats = self.graph.values[value].constant
        assert stats is not None
        region, tensor = self.at(value)
        name = base_name(tensor)
        array = convert_constant(stats.read(), to)
        low = self.add_constant(region, f"{name}/{to.label}", array, DTYPES[to])
        nodes = self.nodes(region)
        waits_for = [i for i in nodes[name].input if i.startswith("^")]
        nodes[base_name(low.tensor)].input.extend(waits_for)
        return low

    def add_constant(
        self, region: int, name: str, array: NDArray[np.generic], dtype: Any
    ) -> At:
        """The tensor of a new constant."""
        node = self.add_node(region, name, "Const")
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))
        return At(region, f"{node.name}:0")

    def add_node(self, region: int, name: str, op: str) -> NodeDef:
        """A new node without inputs; underscores follow ``name`` if it is taken."""
        nodes = self.nodes(region)
        node = tf.compat.v1.NodeDef(name=fresh(name, nodes), op=op)
        nodes[node.name] = node
        return node

    def rewire(self, value: int, uses: Iterable[Use], tensor: str) -> None:
        """Let ``uses`` of a value read ``tensor``, which is in the same region."""
        for use in uses:
            if use.node is None:
                self._outputs[self.binding.values[value]] = tensor
                continue
            entry = self.binding.entries[use.node][use.index]
            section = self.sections[entry.region]
            if entry.is_result:
                section.results[entry.index] = tensor
            else:
                section.nodes[entry.node].input[entry.index] = reference(tensor)

    def read_at(self, node: int, index: int) -> At:
        """The tensor that input ``index`` of a node reads after the changes so far."""
        entry = self.binding.entries[node][index]
        section = self.sections[entry.region]
        if entry.is_result:
            return At(entry.region, section.results[entry.index])
        return At(entry.region, tensor_of(section.nodes[entry.node].input[entry.index]))

    def graft(
        self, region: int, prefix: str, nodes: Sequence[NodeDef], end: str,
        tensors: Sequence[str],
    ) -> At:  # fmt: skip
        """Add copies of ``nodes``, named under ``prefix``; returns that of the tensor ``end``.

        Where nodes read ``p0``, ``p1``..., the copies read ``tensors``.
        """
        inside = {node.name for node in nodes}

        def joined(source: str) -> str:
            name, _, index = tensor_of(source).partition(":")
            if name in inside:
                return reference(f"{prefix}/{name}:{index}")
            return reference(tensors[int(name.removeprefix("p"))])

        for node in nodes:
            copy = self.add_node(region, f"{prefix}/{node.name}", node.op)
            name = copy.name
            copy.CopyFrom(node)
            copy.name = name
            copy.input[:] = [joined(source) for source in node.input]
        return At(region, f"{prefix}/{end}")

    def hand_in(self, region: int, name: str, tensor: str) -> dict[int, str]:
        """Add an argument to all bodies of the op that ``region`` is a body of.

        The op reads it from ``tensor``, of the region that the op is in. A loop passes it on
        unchanged. Returns the argument's tensor by the number of the body's region; it is
        called ``name``, with underscores behind if that is taken.
        """
        regions, own = self.binding.regions, self.binding.regions[region]
        outside = self.nodes(own.parent)
        op, source = outside[own.owner], outside[base_name(tensor)].attr
        loop, attributes = op.op in LOOPS, op.attr
        data = sum(not read.startswith("^") for read in op.input)
        op.input.insert(data, reference(tensor))
        attributes["T" if loop else "Tin"].list.type.append(source["dtype"].type)
        if loop and attributes["output_shapes"].list.shape:
            attributes["output_shapes"].list.shape.add().CopyFrom(source["shape"].shape)
        found: dict[int, str] = {}
        for body in regions:
            if (body.parent, body.owner) != (own.parent, own.owner):
                continue
            given = self.add_node(body.number, name, "Placeholder")
            given.attr["dtype"].CopyFrom(source["dtype"])
            given.attr["shape"].CopyFrom(source["shape"])
            found[body.number] = f"{given.name}:0"
            self.sections[body.number].arguments.append(given.name)
            if loop and body.role == "body":
                self.sections[body.number].results.append(f"{given.name}:0")
        return found

    def restate_casts(self) -> None:
        """State in the model's own Casts the formats that their inputs have in ``stored``."""
        for node in self.graph.nodes:
            source = node.inputs[0] if node.native == CAST else None
            if source is not None and source in self.stored:
                cast = self.nodes(node.region)[self.binding.nodes[node.id]]
                cast.attr["SrcT"].type = type_number(self.stored[source])

    def finish(self, *more: SignaturePort) -> FrozenModel:
        """The changed model, of the nodes that its outputs need; ``more`` inputs come last."""
        model = self.binding.model
        inputs = (*map(self._declared, model.inputs), *more)
        outputs = tuple(self._moved(self._declared(port)) for port in model.outputs)
        result = tf.compat.v1.GraphDef()
        result.versions.CopyFrom(model.graph.versions)
        ends = [base_name(p.tensor) for p in (*outputs, *inputs)]
        result.node.extend(self.sections[0].kept(ends))
        library = library_of(model.graph) | self._functions()
        result.library.function.extend(needed(result.node, library))
        return replace(model, graph=result, inputs=inputs, outputs=outputs)

    def _functions(self) -> dict[str, Any]:
        """The bodies as functions by name, with the names that their ops refer to."""
        library = library_of(self.binding.model.graph)
        found: dict[str, Any] = {}
        for region in self.binding.regions[1:]:
            section = self.sections[region.number]
            ends = [*section.arguments, *(base_name(t) for t in section.results)]
            owner = self.nodes(region.parent)[region.owner]
            name = bodies(owner)[region.role]
            found[name] = as_function(
                name,
                section.kept(ends),
                section.arguments,
                list(zip(section.results, result_types(owner, region.role), strict=True)),
                library,
            )
        return found

    def _declared(self, port: SignaturePort) -> SignaturePort:
        fmt = self._ports.get(port.tensor)
        return port if fmt is None else replace(port, dtype=fmt.label)

    def _moved(self, port: SignaturePort) -> SignaturePort:
        return replace(port, tensor=self._outputs.get(port.tensor, port.tensor))
