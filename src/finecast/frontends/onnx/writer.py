"""Makes edits in an ONNX model, in place; everything that they do not name stays as it was."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

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
    place_after,
    place_first,
)
from finecast.frontends.onnx.reader import OnnxBinding
from finecast.frontends.onnx.statements import STATEMENTS, Maker, rounding
from finecast.graph import Graph, Node
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
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
from finecast.planning.switches import SWITCH

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
    dtype, shape = value.dtype, value.shape
    out = editor.op("Mul", [value, factors], name=name, dtype=dtype, shape=shape)
    editor.made[0].metadata_props.update({MARK: "", SCALES: what.node})
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
    model = OnnxModel(graph, binding)
    for edit in edits:
        if isinstance(edit, SetFormat):
            model.retype(edit.node, edit.to)
        elif isinstance(edit, SetPort):
            model.declare(edit.value, edit.to)
    for edit in edits:
        if isinstance(edit, InsertCast):
            model.cast(edit, exact=edit.value in rounded)
        elif isinstance(edit, ConvertConstant):
            model.convert(edit)
    for edit in edits:  # last: they round what a reader reads after the other edits
        if isinstance(edit, RoundTrip):
            model.round_trip(edit)
    drop_unread(dict.fromkeys(model.replaced))
    merge_casts(binding.model.graphs())


class OnnxModel:
    """A model that is changed by primitives: by them edits are made, and switchable roundings.

    ``frontends/roundable.py`` says what it shares with models of other libraries.

    Attributes:
        library: What messages call models of this kind.
        graph: The graph of the model before anything was changed.
        replaced: Constants that some ops no longer read.
    """

    library: str = "ONNX"

    def __init__(self, graph: Graph, binding: OnnxBinding) -> None:
        self.graph = graph
        self.replaced: list[ir.Value] = []
        self._binding = binding
        self._main = binding.model.graph
        self._editor = Editor(binding.model)
        self._maker = Maker(self._editor)
        self._switch = ir.val(SWITCH, ir.DataType.BOOL)
        self._elements: dict[int, ir.Value] = {}
        # Nodes that come first in the main graph: elements of the switch, then others.
        self._gathers: list[ir.Node] = []
        self._prologue: list[ir.Node] = []

    # What is read, and by whom.

    def tensor(self, value: int) -> ir.Value:
        """The ONNX value of a value."""
        return self._binding.values[value]

    def read_at(self, node: int, index: int) -> ir.Value:
        """What input ``index`` of ``node`` reads after the changes so far."""
        port = self._binding.ports[node][index]
        assert port is not None
        return port.value()

    def give(self, value: int, uses: Iterable[Use], tensor: ir.Value) -> None:
        """Have ``uses`` of the value read ``tensor``.

        The model's output gets it under its own name. The value is renamed: its new name ends
        in its type. An input that is an output as well keeps its name.
        """
        old = self._binding.values[value]
        for port in map(self._port, uses):
            if port is not None:
                port.read(tensor)
                continue
            outputs = self._main.outputs
            for index, end in enumerate(outputs):
                if end is old:
                    outputs[index] = tensor
            if old not in self._main.inputs:
                name = self._editor.fresh(f"{old.name}_{dtype_label(old.type)}")
                tensor.name, old.name = old.name, name

    def _port(self, use: Use) -> Port | None:
        return None if use.node is None else self._binding.ports[use.node][use.index]

    # Roundings that switch.

    def constant(self, array: NDArray[np.float32]) -> ir.Value:
        """A constant of these numbers."""
        return self._editor.constant("finecast_constant", array)

    def rounded(self, tensor: ir.Value, how: Rounder) -> ir.Value:
        """``tensor`` rounded as a conversion to the format or encoding rounds, in fp32."""
        out = rounding(self._maker, tensor, how.encoding or how.format)
        self._place(tensor)
        return out

    def without_infinities(self, tensor: ir.Value, top: float | None) -> ir.Value:
        """``tensor`` with each Inf replaced by ``top`` of its sign, or by NaN."""
        label = self._editor.fresh(f"{tensor.name}_finite")
        made, out = self._maker.rounding.without_infinities(tensor, top, label)
        self._editor.made += made
        self._place(tensor)
        return out

    def switched(self, k: int, on: ir.Value, off: ir.Value) -> ir.Value:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        if k not in self._elements:
            index = self._editor.constant(f"{SWITCH}_index_{k}", np.array(k, np.int64))
            self._elements[k] = self._editor.op(
                "Gather", [self._switch, index], name=f"{SWITCH}_{k}", dtype=ir.DataType.BOOL
            )
            self._gathers += self._editor.take()
        choice = [self._elements[k], on, off]
        name = self._editor.fresh(f"{off.name}_switched")
        out = self._editor.op("Where", choice, name=name, shape=off.shape)
        self._place(off if on.producer() is None else on)
        return out

    def _place(self, value: ir.Value) -> None:
        """Put the nodes that were made, which read ``value``, after it."""
        producer = value.producer()
        if producer is not None and producer.graph is None:  # itself in the prologue
            self._prologue += self._editor.take()
        else:
            place_after(value, self._editor.take(), self._main, self._prologue)

    def finish(self, switches: int = 0) -> ir.Model:
        """The changed model; its extra input has as many elements as ``switches``."""
        if switches:
            self._switch.shape = ir.Shape([switches])
            self._main.inputs.append(self._switch)
        place_first([*self._gathers, *self._prologue], self._main)
        return self._binding.model

    # Edits, which are noted in the model.

    def retype(self, node: int, to: Format) -> None:
        """Have a node compute in ``to``."""
        changed, dtype = self.graph.nodes[node], DATA_TYPES[to]
        for value in self.graph.following_outputs(changed):
            self._binding.values[value.id].type = ir.TensorType(dtype)
        native = self._binding.nodes[node]
        if native is None:
            _mark(self._binding.owners[node], phi_mark(changed), changed.format, to)
            return
        _mark(native, MARK, changed.format, to)
        attribute = _TYPE_ATTRIBUTES.get(native.op_type)
        if attribute is not None:
            native.attributes[attribute] = ir.AttrInt64(attribute, int(dtype))
        elif native.op_type == "ConstantOfShape":
            given = native.attributes.get("value")
            fill = given.as_tensor().numpy() if given else np.zeros(1, np.float32)
            tensor = ir.tensor(to.encode(fill), dtype=dtype, name="value")
            native.attributes["value"] = ir.AttrTensor("value", tensor)

    def declare(self, value: int, to: Format) -> None:
        """Set an input's type; an output's comes with its producer or an inserted cast."""
        native = self._binding.values[value]
        if native.is_graph_input():
            native.type = ir.TensorType(DATA_TYPES[to])

    def cast(self, edit: InsertCast, *, exact: bool) -> None:
        """Cast a value where it is defined; ``exact`` if it is first rounded in fp32.

        An output of a body that is a value from outside is cast in the body.
        """
        value = self._binding.values[edit.value]
        home = home_of(value, self._main)
        at_source: list[Use] = []
        ends: list[tuple[ir.Graph, Port]] = []
        for use in edit.uses:
            port = self._port(use)
            if port and isinstance(port.owner, ir.Graph) and port.owner is not home:
                ends.append((port.owner, port))
            else:
                at_source.append(use)
        if at_source:
            read = value
            if exact and edit.to is Format.BF16:
                blocks = in_blocks(self.graph, edit.value)
                read = self._maker.rounded(value, edit.to, blocks=blocks)
            low = self._maker.cast(read, edit.to, value.name)
            self._editor.place_after(value)
            self.give(edit.value, at_source, low)
        casts: dict[ir.Graph, ir.Value] = {}
        for body, port in ends:
            if body not in casts:
                casts[body] = self._maker.cast(value, edit.to)
                body.extend(self._editor.take())
            port.read(casts[body])

    def convert(self, edit: ConvertConstant) -> None:
        """Convert a constant for its uses; one in a body becomes one of the main graph.

        Only where it is an output of a body it has to stay in it.
        """
        value = self._binding.values[edit.value]
        shared: ir.Value | None = None
        for use in edit.uses:
            port = self._port(use)
            if port is not None and isinstance(port.owner, ir.Graph):
                port.read(self._constant(value, edit.to, port.owner))
                continue
            if shared is None:
                shared = self._initializer(value, edit.to)
            self.give(edit.value, [use], shared)
        self.replaced.append(value)

    def _initializer(self, value: ir.Value, to: Encoding) -> ir.Value:
        """A constant of the main graph: the numbers of ``value``, stored in ``to``."""
        tensor = constant_tensor(value)
        assert tensor is not None
        return self._editor.constant(f"{value.name}_{to.label}", ConvertedTensor(tensor, to))

    def _constant(self, value: ir.Value, to: Format, home: ir.Graph) -> ir.Value:
        """A Constant node in the body ``home``: a body's outputs must be made in it."""
        tensor = constant_tensor(value)
        assert tensor is not None
        name = self._editor.fresh(f"{value.name}_{to.label}")
        new = self._editor.op(
            "Constant",
            [],
            {"value": ConvertedTensor(tensor, to, name)},
            name=name,
            node=self._editor.fresh(f"constant_{name}"),
            dtype=DATA_TYPES[to],
            shape=shape_of(tensor),
        )
        home.extend(self._editor.take())
        return new

    def round_trip(self, edit: RoundTrip) -> None:
        """Put nodes that round after the value; a constant is rounded when it is written."""
        value = self._binding.values[edit.value]
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
            out = row.back(self._maker, value, to)
        else:
            out = rounding(self._maker, value, to)
        if not row.by_casts:
            for node in self._editor.made:
                node.metadata_props[ROUNDING] = f"{to.label} {out.name}"
        self._editor.place_after(value)
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
