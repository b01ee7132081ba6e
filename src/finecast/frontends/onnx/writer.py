"""Makes edits in an ONNX model, in place; everything that they do not name stays as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from finecast.frontends.exact_casts import in_blocks
from finecast.frontends.onnx.casts import merge_casts
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    MARK,
    ROUNDING,
    ConvertedTensor,
    constant_tensor,
    shape_of,
)
from finecast.frontends.onnx.names import FreshNames
from finecast.frontends.onnx.opset import FREE_INITIALIZERS
from finecast.frontends.onnx.placing import home_of, place_after
from finecast.frontends.onnx.port_formats import dtype_label
from finecast.frontends.onnx.reader import OnnxBinding
from finecast.frontends.onnx.statements import STATEMENTS, Maker, rounding
from finecast.frontends.onnx.ties import Port
from finecast.graph import Graph, Node
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)

# Attributes that state the float type of an op's result, by op type.
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


def apply_edits(
    graph: Graph,
    binding: OnnxBinding,
    edits: Sequence[Edit],
    rounded: Collection[int] = (),
) -> None:
    """Make ``edits`` in the model behind ``binding``.

    Afterwards ``graph`` and ``binding`` describe the model before the edits: read it again.

    Args:
        graph: The graph of the model.
        binding: The ONNX objects that its ids stand for.
        edits: The edits.
        rounded: Ids of values that are rounded in fp32 before they are cast to bf16.
    """
    if not edits:
        return
    writer = _Writer(graph, binding, rounded)
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
    for edit in edits:  # last: they round what a reader reads after the other edits
        if isinstance(edit, RoundTrip):
            writer.round_trip(edit)
    writer.drop_dead_constants()
    merge_casts((binding.model.graph, *binding.model.graph.subgraphs()))


class _Writer:
    def __init__(self, graph: Graph, binding: OnnxBinding, rounded: Collection[int]) -> None:
        self.graph = graph
        self.rounded = rounded
        self.binding = binding
        self.main = binding.model.graph
        self.fresh = FreshNames(binding.model)
        self.replaced: list[ir.Value] = []
        self.list_initializers = (binding.model.ir_version or 0) < FREE_INITIALIZERS
        self.maker = Maker(self.fresh, self._register)

    def set_format(self, edit: SetFormat) -> None:
        node = self.graph.nodes[edit.node]
        for value in self.graph.following_outputs(node):
            _set_type(self.binding.values[value.id], edit.to)
        native = self.binding.nodes[edit.node]
        if native is None:
            owner = self.binding.owners[edit.node]
            _mark(owner, phi_mark(node), node.format, edit.to)
            return
        _mark(native, MARK, node.format, edit.to)
        data_type = DATA_TYPES[edit.to]
        attribute = _TYPE_ATTRIBUTES.get(native.op_type)
        if attribute is not None:
            native.attributes[attribute] = ir.AttrInt64(attribute, int(data_type))
        elif native.op_type == "ConstantOfShape":
            given = native.attributes.get("value")
            fill = given.as_tensor().numpy() if given else np.zeros(1, np.float32)
            native.attributes["value"] = ir.AttrTensor(
                "value", _tensor(fill, edit.to, "value")
            )

    def set_port(self, edit: SetPort) -> None:
        """Set an input's type; an output's comes with its producer or an inserted cast."""
        value = self.binding.values[edit.value]
        if value.is_graph_input():
            _set_type(value, edit.to)

    def cast(self, edit: InsertCast) -> None:
        value = self.binding.values[edit.value]
        home = home_of(value, self.main)
        at_source: list[Use] = []
        ends: list[tuple[ir.Graph, int]] = []  # outputs of bodies, of values from outside
        for use in edit.uses:
            port = self._port(use)
            if port and isinstance(port.owner, ir.Graph) and port.owner is not home:
                ends.append((port.owner, port.index))
            else:
                at_source.append(use)
        if at_source:
            self._cast_at_source(edit, value, at_source)
        casts: dict[ir.Graph, ir.Value] = {}
        for body, index in ends:
            if body not in casts:
                node = self.maker.cast(value, edit.to)
                body.append(node)
                casts[body] = node.outputs[0]
            body.outputs[index] = casts[body]

    def _port(self, use: Use) -> Port | None:
        return None if use.node is None else self.binding.ports[use.node][use.index]

    def _cast_at_source(self, edit: InsertCast, value: ir.Value, uses: Sequence[Use]) -> None:
        """Cast ``value`` where it is defined, for all ``uses``; first round it if asked to."""
        first: list[ir.Node] = []
        if edit.value in self.rounded and edit.to is Format.BF16:
            blocks = in_blocks(self.graph, edit.value)
            first = self.maker.rounded(value, edit.to, blocks=blocks)
        read = first[-1].outputs[0] if first else value
        node = self.maker.cast(read, edit.to, value.name)
        place_after(value, [*first, node], self.main)
        for use in uses:
            self._give(use, value, node.outputs[0])

    def _give(self, use: Use, old: ir.Value, new: ir.Value) -> None:
        port = self._port(use)
        if port is None:
            self._give_output(old, new)
        elif isinstance(port.owner, ir.Graph):
            port.owner.outputs[port.index] = new
        else:
            port.owner.replace_input_with(port.index, new)

    def _give_output(self, old: ir.Value, new: ir.Value) -> None:
        """Make ``new`` the model's output under the name of ``old``, which is renamed.

        Its new name ends in its type. An input that is an output as well keeps its name.
        """
        outputs = self.main.outputs
        for index, value in enumerate(outputs):
            if value is old:
                outputs[index] = new
        if old in self.main.inputs:
            return
        new.name, old.name = old.name, self.fresh(f"{old.name}_{dtype_label(old.type)}")

    def convert(self, edit: ConvertConstant) -> None:
        """Convert a constant for its uses; one in a body becomes one of the main graph.

        Only where it is an output of a body it has to stay in it.
        """
        value = self.binding.values[edit.value]
        tensor = constant_tensor(value)
        assert tensor is not None
        shared: ir.Value | None = None
        for use in edit.uses:
            port = self._port(use)
            if port is not None and isinstance(port.owner, ir.Graph):
                port.owner.outputs[port.index] = self._constant(
                    value, tensor, edit.to, port.owner
                )
                continue
            if shared is None:
                shared = self._initializer(value, tensor, edit.to)
            self._give(use, value, shared)
        self.replaced.append(value)

    def _initializer(
        self, value: ir.Value, tensor: ir.TensorProtocol, to: Encoding
    ) -> ir.Value:
        """A constant of the main graph: ``tensor``, that of ``value``, stored in ``to``."""
        name = self.fresh(f"{value.name}_{to.label}")
        new = ir.val(name, const_value=ConvertedTensor(tensor, to, name))
        self._register(new)
        return new

    def _register(self, value: ir.Value) -> None:
        self.main.register_initializer(value)
        if self.list_initializers:
            self.main.inputs.append(value)

    def _constant(
        self, value: ir.Value, tensor: ir.TensorProtocol, to: Format, home: ir.Graph
    ) -> ir.Value:
        """A Constant node in the body ``home``: a body's outputs must be made in it."""
        name = self.fresh(f"{value.name}_{to.label}")
        new = ir.val(name, DATA_TYPES[to], shape_of(tensor))
        attributes = {"value": ConvertedTensor(tensor, to, name)}
        label = self.fresh(f"constant_{name}")
        home.append(ir.node("Constant", [], attributes, name=label, outputs=[new]))
        return new

    def round_trip(self, edit: RoundTrip) -> None:
        """Put nodes that round after the value; a constant is rounded when it is written."""
        value = self.binding.values[edit.value]
        made: dict[int, ir.Value] = {}
        for use in edit.uses:
            port = self._port(use)
            if port is None or isinstance(port.owner, ir.Graph):
                continue
            seen = port.owner.inputs[port.index]
            assert seen is not None
            if id(seen) not in made:
                constant = self.graph.values[edit.value].constant is not None
                made[id(seen)] = (
                    self._stored_in(value, edit.to) if constant else self._round(seen, edit.to)
                )
            port.owner.replace_input_with(port.index, made[id(seen)])

    def _stored_in(self, value: ir.Value, to: Encoding) -> ir.Value:
        """The constant ``value`` stored in ``to``, and converted back to fp32 by nodes."""
        tensor = constant_tensor(value)
        assert tensor is not None
        self.replaced.append(value)
        low = self._initializer(value, tensor, to)
        nodes = STATEMENTS[to.format].back(self.maker, low, to)
        place_after(low, nodes, self.main)
        return self._rounding(nodes, to) if nodes else low

    def _round(self, value: ir.Value, to: Encoding) -> ir.Value:
        """``value`` rounded to ``to``, in fp32."""
        nodes = rounding(self.maker, value, to)
        place_after(value, nodes, self.main)
        return self._rounding(nodes, to)

    def _rounding(self, nodes: Sequence[ir.Node], to: Encoding) -> ir.Value:
        """The result of the ``nodes`` of one rounding; marks them unless they are casts."""
        out = nodes[-1].outputs[0]
        if not STATEMENTS[to.format].by_casts:
            for node in nodes:
                node.metadata_props[ROUNDING] = f"{to.label} {out.name}"
        return out

    def drop_dead_constants(self) -> None:
        """Remove the constants that were converted and that nothing reads any more."""
        for value in dict.fromkeys(self.replaced):
            if value.uses() or value.is_graph_output():
                continue
            home = home_of(value, self.main)
            producer = value.producer()
            if producer is not None:
                home.remove(producer, safe=True)
            elif value.name in home.initializers:
                if value in home.inputs:
                    home.inputs.remove(value)
                home.initializers.pop(value.name or "")


def _set_type(value: ir.Value, fmt: Format) -> None:
    value.type = ir.TensorType(DATA_TYPES[fmt])


def _tensor(array: np.ndarray, fmt: Format, name: str) -> ir.TensorProtocol:
    return ir.tensor(fmt.encode(array), dtype=DATA_TYPES[fmt], name=name)


def phi_mark(phi: Node) -> str:
    """The metadata key under which the op that owns ``phi`` has the phi's former format."""
    return f"{MARK}.{phi.attributes['port']}"


def _mark(native: ir.Node, key: str, before: Format | None, to: Format) -> None:
    """Note the format of a node before its first edit; no note if it is back to that."""
    was = native.metadata_props.get(key) or (before.label if before else "")
    if was == to.label:
        native.metadata_props.pop(key, None)
    else:
        native.metadata_props[key] = was
