"""A copy of a model that rounds what the switch of an extra input turns on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from finecast.frontends.tensorflow.library import DTYPES, tf, type_number
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort
from finecast.frontends.tensorflow.reader import GraphBinding
from finecast.frontends.tensorflow.writer import Rewriter, plain, reference
from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant
from finecast.planning.edits import Use
from finecast.planning.switches import Switch

SWITCH: Final = "finecast_switch"
_FP32: Final = Format.FP32


def with_outputs(model: FrozenModel, graph: Graph, binding: GraphBinding) -> FrozenModel:
    """``model`` with all its float values as outputs, named by their ids.

    A session can be asked for any of them; nothing is fused that it is asked for.
    """
    shown = tuple(
        SignaturePort(
            name=str(value.id),
            tensor=binding.values[value.id],
            dtype=value.dtype,
            shape=None,
        )
        for value in graph.values
        if value.format is not None and value.constant is None and value.producer is not None
    )
    return replace(model, outputs=shown)


def with_switches(
    graph: Graph, binding: GraphBinding, switches: Sequence[Switch]
) -> FrozenModel:
    """A copy of the binding's model that rounds what its extra input switches on.

    The input ``finecast_switch`` is a bool vector: element k rounds what ``switches[k]`` has,
    to its format and back to fp32. Law: with all of them off it is the model.
    """
    inserter = _Inserter(Rewriter.of(graph, binding))
    for k, switch in enumerate(switches):
        for (node, index), encoding in switch.ports.items():
            inserter.round_port(node, index, encoding, k)
        for index, encoding in switch.outputs.items():
            inserter.round_output(graph.outputs[index].id, encoding.format, k)
    return inserter.finish(len(switches))


@dataclass(slots=True, kw_only=False)
class _Inserter:
    rewriter: Rewriter
    elements: dict[int, str] = field(default_factory=dict[int, str])

    def round_output(self, value: int, fmt: Format, k: int) -> None:
        """Round the value where it is an output of the model."""
        tensor = self.rewriter.binding.values[value]
        low = self.rewriter.add_cast(tensor, _FP32, fmt)
        back = self.rewriter.add_cast(low, fmt, _FP32)
        self.rewriter.rewire(value, [Use(node=None)], self._choice(k, back, tensor))

    def round_port(self, node: int, index: int, encoding: Encoding, k: int) -> None:
        """Round what the node reads at one input; a constant ahead of time."""
        graph, binding = self.rewriter.graph, self.rewriter.binding
        value = graph.nodes[node].inputs[index]
        assert value is not None
        exact, stats = binding.values[value], graph.values[value].constant
        if stats is None:
            low = self.rewriter.add_cast(exact, _FP32, encoding.format)
            rounded = self.rewriter.add_cast(low, encoding.format, _FP32)
        else:
            array = convert_constant(stats.read(), encoding.format).astype(np.float32)
            rounded = self.rewriter.add_constant(
                f"{plain(exact)}/rounded", array, DTYPES[_FP32]
            )
        chosen = self._choice(k, rounded, exact)
        self.rewriter.rewire(value, [Use(node=node, index=index)], chosen)

    def _choice(self, k: int, rounded: str, exact: str) -> str:
        """``rounded`` where element ``k`` of the switch is on."""
        name = self.rewriter.fresh(f"{plain(exact)}/switched")
        inputs = [self._element(k), rounded, exact]
        node = tf.compat.v1.NodeDef(
            name=name, op="SelectV2", input=[reference(i) for i in inputs]
        )
        node.attr["T"].type = type_number(_FP32)
        self.rewriter.nodes[name] = node
        return f"{name}:0"

    def _element(self, k: int) -> str:
        if k not in self.elements:
            nodes = self.rewriter.nodes
            index = self.rewriter.add_constant(f"{SWITCH}/{k}/index", np.array(k), tf.int32)
            axis = self.rewriter.add_constant(f"{SWITCH}/{k}/axis", np.array(0), tf.int32)
            name = f"{SWITCH}/{k}"
            inputs = [SWITCH, reference(index), reference(axis)]
            node = tf.compat.v1.NodeDef(name=name, op="GatherV2", input=inputs)
            node.attr["Tparams"].type = tf.bool.as_datatype_enum
            node.attr["Tindices"].type = tf.int32.as_datatype_enum
            node.attr["Taxis"].type = tf.int32.as_datatype_enum
            nodes[name] = node
            self.elements[k] = f"{name}:0"
        return self.elements[k]

    def finish(self, count: int) -> FrozenModel:
        model = self.rewriter.binding.model
        node = tf.compat.v1.NodeDef(name=SWITCH, op="Placeholder")
        node.attr["dtype"].type = tf.bool.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape([count]).as_proto())
        self.rewriter.nodes[SWITCH] = node
        port = SignaturePort(name=SWITCH, tensor=f"{SWITCH}:0", dtype="bool", shape=(count,))
        done = self.rewriter.finish()
        kept = done.graph
        if not any(n.name == SWITCH for n in kept.node):
            kept.node.append(node)
        return replace(done, inputs=(*model.inputs, port))
