"""Replays edits on a GraphDef: casts, low constants, type attributes.

Law: the result has the ports of the model, in name, type and shape; what no edit names is as
it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.errors import ModelError, UsageError
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
    storage,
)

_CAST: Final = "tf::Cast"


def apply_edits(
    graph: Graph,
    binding: GraphBinding,
    edits: Sequence[Edit],
    formats: Mapping[int, Format],
) -> FrozenModel:
    """The model with ``edits`` made; that of ``binding`` is left as it was.

    Raises:
        ModelError: If an edit asks for a format that TensorFlow's ops do not compute in.
        UsageError: If it changes a port's type.
    """
    rewriter = Rewriter.of(graph, binding)
    stored = storage(graph, formats, {})
    for edit in edits:
        match edit:
            case SetFormat():
                rewriter.set_format(edit.node, edit.to)
            case InsertCast():
                source = binding.values[edit.value]
                cast = rewriter.add_cast(source, stored[edit.value], edit.to)
                rewriter.rewire(edit.value, edit.uses, cast)
            case ConvertConstant():
                rewriter.rewire(edit.value, edit.uses, rewriter.constant(edit.value, edit.to))
            case RoundTrip():
                raise ModelError(
                    f"no op of TensorFlow's computes in {edit.to.label}",
                    where=graph.values[edit.value].name,
                    fix="use bf16 or fp16",
                )
            case SetPort():
                raise UsageError(
                    "--io does not apply to SavedModels: a signature keeps its types",
                    where=graph.values[edit.value].name,
                    fix="leave it out",
                )
    if edits:
        rewriter.restate_casts(stored)
    return rewriter.finish()


@dataclass(slots=True, kw_only=True)
class Rewriter:
    """A copy of a model's nodes, and new ones."""

    graph: Graph
    binding: GraphBinding
    nodes: dict[str, NodeDef]
    outputs: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, graph: Graph, binding: GraphBinding) -> Rewriter:
        """A rewriter of the binding's model."""
        copy = tf.compat.v1.GraphDef()
        copy.CopyFrom(binding.model.graph)
        return cls(graph=graph, binding=binding, nodes={n.name: n for n in copy.node})

    def set_format(self, node: int, fmt: Format) -> None:
        """The op computes in ``fmt``."""
        attribute = self.binding.types[node].attribute
        self.nodes[self.binding.nodes[node]].attr[attribute].type = type_number(fmt)

    def add_cast(self, tensor: str, source: Format, to: Format) -> str:
        """A Cast of any tensor; the tensor that it gives."""
        name = self.fresh(f"{plain(tensor)}/cast_{to.label}")
        node = tf.compat.v1.NodeDef(name=name, op="Cast", input=[reference(tensor)])
        node.attr["SrcT"].type = type_number(source)
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

    def rewire(self, value: int, uses: Sequence[Use], tensor: str) -> None:
        """Let ``uses`` of a value read ``tensor`` in its place."""
        for use in uses:
            if use.node is None:
                self.outputs[self.binding.values[value]] = tensor
            else:
                self.nodes[self.binding.nodes[use.node]].input[use.index] = reference(tensor)

    def restate_casts(self, stored: Mapping[int, Format]) -> None:
        """The model's own casts read whatever format they are given now."""
        for node in self.graph.nodes:
            source = node.inputs[0] if node.native == _CAST else None
            if source is not None and source in stored:
                cast = self.nodes[self.binding.nodes[node.id]]
                cast.attr["SrcT"].type = type_number(stored[source])

    def finish(self) -> FrozenModel:
        """The model of the nodes that its outputs need."""
        model = self.binding.model
        outputs = tuple(self._moved(port) for port in model.outputs)
        result = tf.compat.v1.GraphDef()
        result.versions.CopyFrom(model.graph.versions)
        result.library.CopyFrom(model.graph.library)
        kept = self._needed([plain(p.tensor) for p in (*outputs, *model.inputs)])
        result.node.extend(n for name, n in self.nodes.items() if name in kept)
        return replace(model, graph=result, outputs=outputs)

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
