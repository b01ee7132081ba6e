"""Replays edits on an ONNX model, in place: everything they do not name stays as it was."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from finecast.edits import ConvertConstant, Edit, InsertCast, SetFormat, SetPort, Use
from finecast.formats import Format
from finecast.frontends.onnx.reader import DATA_TYPES, Binding, Port, constant_tensor
from finecast.graph import Graph
from finecast.rounding import convert_constant

# Attributes that state the float type an op creates.
_TYPE_ATTRIBUTES = {
    "Cast": "to",
    "EyeLike": "dtype",
    "RandomNormal": "dtype",
    "RandomNormalLike": "dtype",
    "RandomUniform": "dtype",
    "RandomUniformLike": "dtype",
    "Multinomial": "dtype",
    "Bernoulli": "dtype",
    "SequenceEmpty": "dtype",
}


def apply_edits(graph: Graph, binding: Binding, edits: Sequence[Edit]) -> None:
    """Change the model behind ``binding`` as ``edits`` say.

    The graph describes the model as it was before; read it anew to go on.
    """
    writer = _Writer(graph, binding)
    for edit in edits:
        if isinstance(edit, SetFormat):
            writer.set_format(edit)
        elif isinstance(edit, SetPort):
            writer.set_port(edit)
    for edit in edits:
        if isinstance(edit, InsertCast):
            writer.cast(edit)
        elif isinstance(edit, ConvertConstant):
            writer.convert(edit)
    writer.drop_dead_constants()
    writer.drop_identity_casts()


class _Writer:
    def __init__(self, graph: Graph, binding: Binding) -> None:
        self.graph = graph
        self.binding = binding
        self.names = _taken_names(binding.model)
        self.replaced: list[ir.Value] = []

    def set_format(self, edit: SetFormat) -> None:
        node = self.graph.nodes[edit.node]
        for value in self.graph.following_outputs(node):
            _set_type(self.binding.values[value.id], edit.to)
        native = self.binding.nodes[edit.node]
        if native is None:
            return
        data_type = DATA_TYPES[edit.to]
        attribute = _TYPE_ATTRIBUTES.get(native.op_type)
        if attribute is not None:
            native.attributes[attribute] = ir.AttrInt64(attribute, int(data_type))
        elif native.op_type == "ConstantOfShape":
            given = native.attributes.get("value")
            fill = given.as_tensor().numpy() if given else np.zeros(1, np.float32)
            native.attributes["value"] = ir.AttrTensor("value", _tensor(fill, edit.to, "value"))

    def set_port(self, edit: SetPort) -> None:
        _set_type(self.binding.values[edit.value], edit.to)

    def cast(self, edit: InsertCast) -> None:
        value = self.binding.values[edit.value]
        inner = [u for u in edit.uses if not self._is_body_end(u)]
        if inner:
            self._cast_at_source(value, edit.to, inner)
        for use in edit.uses:
            if self._is_body_end(use):
                self._cast_at_body_end(value, edit.to, use)

    def _is_body_end(self, use: Use) -> bool:
        port = self._port(use)
        return port is not None and isinstance(port.owner, ir.Graph)

    def _port(self, use: Use) -> Port | None:
        return None if use.node is None else self.binding.ports[use.node][use.index]

    def _cast_at_source(self, value: ir.Value, to: Format, uses: list[Use]) -> None:
        node, home = self._new_cast(value, to), _home(value, self.binding.model.graph)
        producer = value.producer()
        if producer is not None:
            home.insert_after(producer, node)
        elif len(home):
            home.insert_before(home[0], node)
        else:
            home.append(node)
        for use in uses:
            if use.node is None:
                self._give_output(value, node.outputs[0])
            else:
                self._redirect(use, node.outputs[0])

    def _cast_at_body_end(self, value: ir.Value, to: Format, use: Use) -> None:
        port = self._port(use)
        assert port is not None and isinstance(port.owner, ir.Graph)
        node = self._new_cast(value, to)
        port.owner.append(node)
        port.owner.outputs[port.index] = node.outputs[0]

    def _new_cast(self, value: ir.Value, to: Format) -> ir.Node:
        name = self._fresh(f"{value.name}_{to.label}")
        node = ir.node(
            "Cast",
            [value],
            {"to": int(DATA_TYPES[to])},
            name=self._fresh(f"cast_{name}"),
            outputs=[ir.Value(name=name, shape=value.shape, type=ir.TensorType(DATA_TYPES[to]))],
        )
        return node

    def _give_output(self, old: ir.Value, new: ir.Value) -> None:
        """The model's output keeps its name; what it was computed as takes another."""
        outputs = self.binding.model.graph.outputs
        for index, value in enumerate(outputs):
            if value is old:
                outputs[index] = new
        if old in self.binding.model.graph.inputs:
            return
        new.name, old.name = old.name, new.name

    def _redirect(self, use: Use, value: ir.Value) -> None:
        port = self._port(use)
        assert port is not None and isinstance(port.owner, ir.Node)
        port.owner.replace_input_with(port.index, value)

    def convert(self, edit: ConvertConstant) -> None:
        value = self.binding.values[edit.value]
        tensor = constant_tensor(value)
        assert tensor is not None
        name = self._fresh(f"{value.name}_{edit.to.label}")
        new = ir.Value(name=name, shape=value.shape, type=ir.TensorType(DATA_TYPES[edit.to]))
        new.const_value = _lazy_tensor(tensor, edit.to, name)
        home = _home(value, self.binding.model.graph)
        home.register_initializer(new)
        for use in edit.uses:
            port = self._port(use)
            if port is None:
                self._give_output(value, new)
            elif isinstance(port.owner, ir.Graph):
                self._cast_at_body_end(value, edit.to, use)
            else:
                self._redirect(use, new)
        self.replaced.append(value)

    def drop_dead_constants(self) -> None:
        """Remove originals that no consumer is left for, and give their name back."""
        for value in self.replaced:
            if value.uses() or value.is_graph_output():
                continue
            home = _home(value, self.binding.model.graph)
            producer = value.producer()
            if producer is not None:
                home.remove(producer, safe=True)
            elif value.name in home.initializers:
                if value in home.inputs:
                    home.inputs.remove(value)
                home.initializers.pop(value.name)

    def drop_identity_casts(self) -> None:
        """A Cast of the model whose input already has its type does nothing now."""
        for node in self.binding.nodes:
            if node is None or node.op_type != "Cast" or node.graph is None:
                continue
            source, result = node.inputs[0], node.outputs[0]
            if source is None or source.dtype != result.dtype or result.is_graph_output():
                continue
            result.replace_all_uses_with(source)
            node.graph.remove(node, safe=True)

    def _fresh(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name


def _taken_names(model: ir.Model) -> set[str]:
    names: set[str] = set()
    for graph in (model.graph, *model.graph.subgraphs()):
        names.update(v.name or "" for v in graph.inputs)
        names.update(graph.initializers)
        for node in graph:
            names.add(node.name or "")
            names.update(v.name or "" for v in node.outputs)
    return names


def _home(value: ir.Value, default: ir.Graph) -> ir.Graph:
    """The graph in which ``value`` is defined: casts of it go there, outside of bodies."""
    producer = value.producer()
    if producer is not None and isinstance(producer.graph, ir.Graph):
        return producer.graph
    return value.graph if isinstance(value.graph, ir.Graph) else default


def _set_type(value: ir.Value, fmt: Format) -> None:
    value.type = ir.TensorType(DATA_TYPES[fmt])


def _tensor(array: np.ndarray, fmt: Format, name: str) -> ir.Tensor:
    return ir.tensor(convert_constant(array, fmt), dtype=DATA_TYPES[fmt], name=name)


def _lazy_tensor(source: ir.TensorProtocol, fmt: Format, name: str) -> ir.LazyTensor:
    """Converted when it is written, so that no two copies of all weights are held."""
    return ir.LazyTensor(
        lambda: _tensor(source.numpy(), fmt, name),
        dtype=DATA_TYPES[fmt],
        shape=ir.Shape(source.shape),
        name=name,
    )
