"""Makes edits in an ONNX model, in place; everything that they do not name stays as it was."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir

from finecast.frontends.exact_casts import in_blocks
from finecast.frontends.onnx.casts import merge_casts
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ComputedTensor,
    ConvertedTensor,
    constant_tensor,
    set_constant,
    shape_of,
)
from finecast.frontends.onnx.definitions import dtype_label
from finecast.frontends.onnx.editor import (
    MARK,
    ROUNDING,
    Editor,
    Port,
    drop_unread,
    home_of,
)
from finecast.frontends.onnx.reader import OnnxBinding
from finecast.frontends.onnx.statements import STATEMENTS, Maker, rounding
from finecast.graph import Graph, Node
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, AdjustOperand
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)

# Metadata of a node, with the index of its input as suffix: the bytes, in base64, of the
# constant there before numbers were added to it. An addition is not exact.
WAS: Final = f"{MARK}.constant."
# Metadata of a node, with ``INPUT.AXIS`` as suffix, the axis counted from the end: the
# exponents of two that the constant there was multiplied by.
TIMES: Final = f"{MARK}.exponents."
# Metadata of a multiplication that was inserted in front of an op: that op's name.
SCALES: Final = f"{MARK}.scales"
# The type of the numbers in these notes.
STORED: Final = np.dtype("<f4")

# Attributes that state the float type of an op's result, by op type.
_TYPE_ATTRIBUTES: Final = {
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


def adjust(binding: OnnxBinding, edits: Iterable[AdjustOperand]) -> None:
    """Adjust operands in the model behind ``binding``, which has to be read again then.

    A constant gets other numbers. A value is multiplied by a node in front of the op, one for
    all ops that read the same product.
    """
    editor = Editor(binding.model)
    products: dict[tuple[ir.Value, int, tuple[int, ...]], ir.Value] = {}
    for edit in edits:
        what, value = edit.what, binding.values[edit.value]
        port, tensor = binding.ports[edit.node][what.port], constant_tensor(value)
        assert port is not None
        assert isinstance(port.owner, ir.Node)
        if tensor is None:
            key = value, what.axis, what.exponents
            if key not in products:
                products[key] = _multiplied(editor, value, what)
            port.read(products[key])
            continue
        notes = port.owner.metadata_props
        if what.add:
            before = tensor.numpy().astype(STORED).tobytes()
            notes[f"{WAS}{port.index}"] = base64.b64encode(before).decode()
        else:
            exponents = " ".join(map(str, what.exponents))
            notes[f"{TIMES}{port.index}.{-what.axis}"] = exponents
        set_constant(value, ComputedTensor(tensor, what.of))


def _multiplied(editor: Editor, value: ir.Value, what: Adjustment) -> ir.Value:
    name = editor.fresh(f"finecast_scale_{value.name}")
    ones = np.ones((what.channels, *(1,) * (-what.axis - 1)), np.float32)
    factors = editor.constant(f"{name}_by", what.of(ones))
    notes = {MARK: "", SCALES: what.node}
    inputs = [value, factors]
    out = editor.op(
        "Mul", inputs, name=name, dtype=value.dtype, shape=value.shape, notes=notes
    )
    editor.place_after(value)
    return out


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
    drop_unread(dict.fromkeys(writer.replaced))
    merge_casts(binding.model.graphs())


class _Writer:
    """Makes edits one by one; ``replaced`` are constants that some ops no longer read."""

    def __init__(self, graph: Graph, binding: OnnxBinding, rounded: Collection[int]) -> None:
        self.graph = graph
        self.rounded = rounded
        self.binding = binding
        self.main = binding.model.graph
        self.editor = Editor(binding.model)
        self.maker = Maker(self.editor)
        self.replaced: list[ir.Value] = []

    def set_format(self, edit: SetFormat) -> None:
        node = self.graph.nodes[edit.node]
        dtype = DATA_TYPES[edit.to]
        for value in self.graph.following_outputs(node):
            self.binding.values[value.id].type = ir.TensorType(dtype)
        native = self.binding.nodes[edit.node]
        if native is None:
            owner = self.binding.owners[edit.node]
            _mark(owner, phi_mark(node), node.format, edit.to)
            return
        _mark(native, MARK, node.format, edit.to)
        attribute = _TYPE_ATTRIBUTES.get(native.op_type)
        if attribute is not None:
            native.attributes[attribute] = ir.AttrInt64(attribute, int(dtype))
        elif native.op_type == "ConstantOfShape":
            given = native.attributes.get("value")
            fill = given.as_tensor().numpy() if given else np.zeros(1, np.float32)
            tensor = ir.tensor(edit.to.encode(fill), dtype=dtype, name="value")
            native.attributes["value"] = ir.AttrTensor("value", tensor)

    def set_port(self, edit: SetPort) -> None:
        """Set an input's type; an output's comes with its producer or an inserted cast."""
        value = self.binding.values[edit.value]
        if value.is_graph_input():
            value.type = ir.TensorType(DATA_TYPES[edit.to])

    def cast(self, edit: InsertCast) -> None:
        value = self.binding.values[edit.value]
        home = home_of(value, self.main)
        at_source: list[Use] = []
        ends: list[Port] = []  # outputs of bodies, of values from outside
        for use in edit.uses:
            port = self._port(use)
            if port and isinstance(port.owner, ir.Graph) and port.owner is not home:
                ends.append(port)
            else:
                at_source.append(use)
        if at_source:
            self._cast_at_source(edit, value, at_source)
        casts: dict[ir.Node | ir.Graph, ir.Value] = {}
        for port in ends:
            if port.owner not in casts:
                casts[port.owner] = self.maker.cast(value, edit.to)
                port.owner.append(self.editor.made.pop())
            port.read(casts[port.owner])

    def _port(self, use: Use) -> Port | None:
        return None if use.node is None else self.binding.ports[use.node][use.index]

    def _cast_at_source(self, edit: InsertCast, value: ir.Value, uses: Sequence[Use]) -> None:
        """Cast ``value`` where it is defined, for all ``uses``; first round it if asked to."""
        read = value
        if edit.value in self.rounded and edit.to is Format.BF16:
            blocks = in_blocks(self.graph, edit.value)
            read = self.maker.rounded(value, edit.to, blocks=blocks)
        low = self.maker.cast(read, edit.to, value.name)
        self.editor.place_after(value)
        for use in uses:
            self._give(use, value, low)

    def _give(self, use: Use, old: ir.Value, new: ir.Value) -> None:
        """Let ``use`` read ``new``.

        The model's output gets it under the name of ``old``, which is renamed: its new name
        ends in its type. An input that is an output as well keeps its name.
        """
        port = self._port(use)
        if port is not None:
            port.read(new)
            return
        outputs = self.main.outputs
        for index, value in enumerate(outputs):
            if value is old:
                outputs[index] = new
        if old not in self.main.inputs:
            label = dtype_label(old.type)
            new.name, old.name = old.name, self.editor.fresh(f"{old.name}_{label}")

    def convert(self, edit: ConvertConstant) -> None:
        """Convert a constant for its uses; one in a body becomes one of the main graph.

        Only where it is an output of a body it has to stay in it.
        """
        value = self.binding.values[edit.value]
        shared: ir.Value | None = None
        for use in edit.uses:
            port = self._port(use)
            if port is not None and isinstance(port.owner, ir.Graph):
                port.read(self._constant(value, edit.to, port.owner))
                continue
            if shared is None:
                shared = self._initializer(value, edit.to)
            self._give(use, value, shared)
        self.replaced.append(value)

    def _initializer(self, value: ir.Value, to: Encoding) -> ir.Value:
        """A constant of the main graph: the numbers of ``value``, stored in ``to``."""
        tensor = constant_tensor(value)
        assert tensor is not None
        return self.editor.constant(f"{value.name}_{to.label}", ConvertedTensor(tensor, to))

    def _constant(self, value: ir.Value, to: Format, home: ir.Graph) -> ir.Value:
        """A Constant node in the body ``home``: a body's outputs must be made in it."""
        tensor = constant_tensor(value)
        assert tensor is not None
        name = self.editor.fresh(f"{value.name}_{to.label}")
        new = self.editor.op(
            "Constant",
            [],
            {"value": ConvertedTensor(tensor, to, name)},
            name=name,
            node=self.editor.fresh(f"constant_{name}"),
            dtype=DATA_TYPES[to],
            shape=shape_of(tensor),
        )
        home.extend(self.editor.take())
        return new

    def round_trip(self, edit: RoundTrip) -> None:
        """Put nodes that round after the value; a constant is rounded when it is written."""
        value = self.binding.values[edit.value]
        constant = self.graph.values[edit.value].constant is not None
        made: dict[ir.Value, ir.Value] = {}
        for use in edit.uses:
            port = self._port(use)
            if port is None or isinstance(port.owner, ir.Graph):
                continue
            seen = port.value()
            if seen not in made:
                made[seen] = self._rounded(value if constant else seen, edit.to, constant)
            port.read(made[seen])

    def _rounded(self, value: ir.Value, to: Encoding, constant: bool) -> ir.Value:
        """``value`` rounded to ``to``, in fp32; a constant is stored in ``to``."""
        row = STATEMENTS[to.format]
        if constant:
            self.replaced.append(value)
            value = self._initializer(value, to)
            out = row.back(self.maker, value, to)
        else:
            out = rounding(self.maker, value, to)
        if not row.by_casts:
            for node in self.editor.made:
                node.metadata_props[ROUNDING] = f"{to.label} {out.name}"
        self.editor.place_after(value)
        return out


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
