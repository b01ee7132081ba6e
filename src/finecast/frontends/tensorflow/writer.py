"""Replays edits on a GraphDef: casts, low constants, type attributes.

Law: the result has the ports of the model, in name, type and shape; what no edit names is as
it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.frontends.tensorflow.library import DTYPES, NodeDef, tf, type_number
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort
from finecast.frontends.tensorflow.reader import GraphBinding
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

_CAST: Final = "tf::Cast"


def apply_edits(graph: Graph, binding: GraphBinding, edits: Sequence[Edit]) -> FrozenModel:
    """The model with ``edits`` made; that of ``binding`` is left as it was.

    Raises:
        ModelError: If an edit asks for a format that TensorFlow's ops do not compute in.
    """
    rewriter = Rewriter.of(graph, binding)
    for edit in edits:
        match edit:
            case SetFormat():
                rewriter.set_format(edit.node, edit.to)
            case SetPort():
                rewriter.set_port(edit.value, edit.to)
            case InsertCast():
                cast = rewriter.add_cast(edit.value, edit.to)
                rewriter.rewire(edit.value, edit.uses, cast)
            case ConvertConstant():
                rewriter.rewire(edit.value, edit.uses, rewriter.constant(edit.value, edit.to))
            case RoundTrip():
                raise ModelError(
                    f"no op of TensorFlow's computes in {edit.to.format.label}",
                    where=graph.values[edit.value].name,
                    fix="use bf16 or fp16",
                )
    if edits:
        rewriter.restate_casts()
    return rewriter.finish()


@dataclass(slots=True, kw_only=True)
class Rewriter:
    """A copy of a model's nodes, and new ones.

    Attributes:
        graph: The model's graph.
        binding: What of the model its ids stand for.
        nodes: By name.
        stored: The format that each float value has by now, by id.
        outputs: Tensors that stand for outputs' own.
        ports: Types of inputs and outputs that are declared anew, by their own tensors.
    """

    graph: Graph
    binding: GraphBinding
    nodes: dict[str, NodeDef]
    stored: dict[int, Format]
    outputs: dict[str, str] = field(default_factory=dict[str, str])
    ports: dict[str, Format] = field(default_factory=dict[str, Format])

    @classmethod
    def of(cls, graph: Graph, binding: GraphBinding) -> Rewriter:
        """A rewriter of the binding's model."""
        copy = tf.compat.v1.GraphDef()
        copy.CopyFrom(binding.model.graph)
        stored = {v.id: v.format for v in graph.values if v.format is not None}
        nodes = {n.name: n for n in copy.node}
        return cls(graph=graph, binding=binding, nodes=nodes, stored=stored)

    def set_format(self, node: int, fmt: Format) -> None:
        """The op computes in ``fmt``."""
        attribute = self.binding.types[node].attribute
        self.nodes[self.binding.nodes[node]].attr[attribute].type = type_number(fmt)
        for value in self.graph.following_outputs(self.graph.nodes[node]):
            self.stored[value.id] = fmt

    def set_port(self, value: int, fmt: Format) -> None:
        """An input or output is declared as ``fmt``; what an output is given has that type."""
        tensor = self.binding.values[value]
        self.ports[tensor] = fmt
        if self.graph.values[value].is_input:
            self.nodes[plain(tensor)].attr["dtype"].type = type_number(fmt)
            self.stored[value] = fmt

    def add_cast(self, value: int, to: Format) -> str:
        """A Cast of a value, as it is stored by now; the tensor that it gives."""
        tensor = self.binding.values[value]
        name = self.fresh(f"{plain(tensor)}/cast_{to.label}")
        node = tf.compat.v1.NodeDef(name=name, op="Cast", input=[reference(tensor)])
        node.attr["SrcT"].type = type_number(self.stored[value])
        node.attr["DstT"].type = type_number(to)
        node.attr["Truncate"].b = False
        self.nodes[name] = node
        return f"{name}:0"

    def constant(self, value: int, to: Format) -> str:
        """The constant rounded to ``to``; its tensor."""
        stats = self.graph.values[value].constant
        assert stats is not None
        name = plain(self.binding.values[value])
        array = convert_constant(stats.read(), to)
        low = self.add_constant(f"{name}/{to.label}", array, DTYPES[to])
        waits_for = [i for i in self.nodes[name].input if i.startswith("^")]
        self.nodes[plain(low)].input.extend(waits_for)
        return low

    def add_constant(self, name: str, array: NDArray[np.generic], dtype: Any) -> str:
        """A constant; its tensor."""
        name = self.fresh(name)
        node = tf.compat.v1.NodeDef(name=name, op="Const")
        node.attr["dtype"].type = dtype.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array, dtype))
        self.nodes[name] = node
        return f"{name}:0"

    def fresh(self, name: str) -> str:
        """A name that no node has."""
        while name in self.nodes:
            name += "_"
        return name

    def rewire(self, value: int, uses: Iterable[Use], tensor: str) -> None:
        """Let ``uses`` of a value read ``tensor`` in its place."""
        for use in uses:
            if use.node is None:
                self.outputs[self.binding.values[value]] = tensor
            else:
                self.nodes[self.binding.nodes[use.node]].input[use.index] = reference(tensor)

    def graft(
        self, prefix: str, nodes: Sequence[NodeDef], end: str, tensors: Sequence[str]
    ) -> str:
        """Copies of ``nodes``, which read ``tensors`` as ``p0``, ``p1``...; their ``end``."""
        inside = {node.name for node in nodes}

        def joined(source: str) -> str:
            name, _, index = tensor_of(source).partition(":")
            if name in inside:
                return reference(f"{prefix}/{name}:{index}")
            return reference(tensors[int(name.removeprefix("p"))])

        for node in nodes:
            copy = tf.compat.v1.NodeDef()
            copy.CopyFrom(node)
            copy.name = f"{prefix}/{node.name}"
            copy.input[:] = [joined(source) for source in node.input]
            self.nodes[copy.name] = copy
        return f"{prefix}/{end}"

    def restate_casts(self) -> None:
        """The model's own casts read whatever format they are given now."""
        for node in self.graph.nodes:
            source = node.inputs[0] if node.native == _CAST else None
            if source is not None and source in self.stored:
                cast = self.nodes[self.binding.nodes[node.id]]
                cast.attr["SrcT"].type = type_number(self.stored[source])

    def finish(self, *more: SignaturePort) -> FrozenModel:
        """The model of the nodes that its outputs need; ``more`` are inputs behind its own."""
        model = self.binding.model
        inputs = (*map(self._declared, model.inputs), *more)
        outputs = tuple(self._moved(self._declared(port)) for port in model.outputs)
        result = tf.compat.v1.GraphDef()
        result.versions.CopyFrom(model.graph.versions)
        result.library.CopyFrom(model.graph.library)
        kept = self._needed([plain(p.tensor) for p in (*outputs, *inputs)])
        result.node.extend(n for name, n in self.nodes.items() if name in kept)
        return replace(model, graph=result, inputs=inputs, outputs=outputs)

    def _declared(self, port: SignaturePort) -> SignaturePort:
        fmt = self.ports.get(port.tensor)
        return port if fmt is None else replace(port, dtype=fmt.label)

    def _moved(self, port: SignaturePort) -> SignaturePort:
        return replace(port, tensor=self.outputs.get(port.tensor, port.tensor))

    def _needed(self, ends: Sequence[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(ends)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [plain(i.removeprefix("^")) for i in self.nodes[name].input]
        return found


def plain(tensor: str) -> str:
    """The node of a tensor."""
    return tensor.partition(":")[0]


def reference(tensor: str) -> str:
    """A tensor as NodeDefs name it: without its index where that is 0."""
    return tensor.removesuffix(":0")


def tensor_of(reference: str) -> str:
    """The tensor that an input of a NodeDef names: ``a:0`` of ``a``."""
    return reference if ":" in reference else f"{reference}:0"
