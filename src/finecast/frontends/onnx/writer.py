"""Makes edits in an ONNX model, in place; everything that they do not name stays as it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.exact_casts import StoredAs
from finecast.frontends.native_model import OFFSET, RUNS, SCALE, NativeModel
from finecast.frontends.onnx.casts import merge_casts
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ComputedTensor,
    ConvertedTensor,
    set_constant,
    shape_of,
)
from finecast.frontends.onnx.definitions import AXES_ARE_INPUTS_SINCE, dtype_label, opset_of
from finecast.frontends.onnx.editor import (
    MARK,
    ROUNDING,
    Editor,
    Port,
    drop_unread,
    every_value,
    home_of,
    place_after,
    place_first,
)
from finecast.frontends.onnx.parts import Computed, ModelInParts
from finecast.frontends.onnx.reader import SCALAR_NAMES, OnnxBinding
from finecast.frontends.onnx.statements import KINDS, STATEMENTS, Maker, rounding
from finecast.frontends.onnx.types import bodies
from finecast.graph import SCALARS, Graph
from finecast.numbers.encodings import Dynamic, Encoding, Reading, Scaled
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.ops import lookup
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
from finecast.planning.points import SWITCH

_JOINED: Final = "finecast_joined/"
"""Prefix of the names that another model's nodes and values get in this one."""
_AXES_ARE_INPUTS: Final = AXES_ARE_INPUTS_SINCE["ReduceMean"]
# Those of which the result has the shape of the last input.
_ELEMENTWISE: Final = frozenset({"clamp", "is_inf", "multiply", "select"})

# A constant and an encoding that it is stored in.
_Coded: TypeAlias = tuple[ir.Value, Encoding]

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


def _apart(shape: ir.Shape | None) -> ir.Shape | None:
    """``shape`` with other names of open sizes: that of a NonZero is another in each model.

    ONNX Runtime has values of one size share their memory, and takes equal names for that.
    """
    if shape is None:
        return None
    sizes = (d if isinstance(d, int) else d.value for d in shape)
    return ir.Shape(f"{_JOINED}{d}" if isinstance(d, str) else d for d in sizes)


def apply_edits(
    graph: Graph,
    binding: OnnxBinding,
    edits: Sequence[Edit],
    rounded: Mapping[int, StoredAs] = MappingProxyType({}),
) -> None:
    """Make ``edits`` in the model behind ``binding``.

    Afterwards ``graph`` and ``binding`` describe the model before the edits: read it again.

    Args:
        graph: The graph of the model.
        binding: The ONNX objects that its ids stand for.
        edits: The edits.
        rounded: Values that are rounded in fp32 before they are cast to bf16, by id.
    """
    if not edits:
        return
    model = EditedModel(graph, binding)
    for edit in edits:
        if isinstance(edit, SetFormat):
            model.retype(edit.node, edit.to)
        elif isinstance(edit, SetPort):
            model.declare(edit.value, edit.to)
    for edit in edits:
        if isinstance(edit, InsertCast):
            model.insert_cast(edit, rounded.get(edit.value))
        elif isinstance(edit, ConvertConstant):
            model.convert(edit)
    # Last: they round what a reader reads after the other edits.
    model.insert_roundings([edit for edit in edits if isinstance(edit, RoundTrip)])
    drop_unread(dict.fromkeys(model.replaced))
    merge_casts(binding.model.graphs())


@final
class EditedModel(NativeModel):
    """A model that is changed in place; its tensors are values of onnx_ir.

    Attributes:
        binding: What the ids of the graph stand for.
        replaced: Constants that some ops no longer read.
    """

    library: ClassVar[str] = "ONNX"
    states: ClassVar[Collection[Format]] = STATEMENTS.keys()
    emulates_all: ClassVar[bool] = True
    computes: ClassVar[bool] = True

    def __init__(self, graph: Graph, binding: OnnxBinding, *, emulates: bool = False) -> None:
        """Roundings are those of conversions; if it ``emulates``, those of a device."""
        super().__init__(graph)
        self._emulates = emulates
        self.replaced: list[ir.Value] = []
        self.binding = binding
        self._low: dict[tuple[ir.Value, Format], ir.Value] = {}
        # Constants that are stored in an encoding, as they are read; None before they are.
        self._decoded: dict[_Coded, ir.Value | None] = {}
        self._main = binding.model.graph
        self._editor = Editor(binding.model)
        self._maker = Maker(self._editor)
        self._maker.rounding.offset = self._offset
        self._inputs: dict[str, ir.Value] = {}
        # The results of ops that were made, each after those whose results it reads.
        self._made: dict[ir.Value, int] = {}
        # Nodes that come first in the main graph: elements of the switch, then others.
        self._gathers: list[ir.Node] = []
        self._unsorted = False  # whether nodes stand before what they read
        self._prologue: list[ir.Node] = []
        self._functions: dict[ir.Node, Computed] = {}

    # What is read, and by whom.

    def tensor(self, value: int) -> ir.Value:
        """The ONNX value of a value."""
        return self.binding.values[value]

    def read_at(self, node: int, index: int) -> ir.Value:
        """What input ``index`` of ``node`` reads after the changes so far."""
        port = self.binding.ports[node][index]
        assert port is not None
        return port.value()

    def give(self, value: int, uses: Iterable[Use], tensor: ir.Value) -> None:
        """Have ``uses`` of the value read ``tensor``.

        The model's output gets it under its own name. The value is renamed: its new name ends
        in its type. An input that is an output as well keeps its name.
        """
        old = self.binding.values[value]
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
        return None if use.node is None else self.binding.ports[use.node][use.index]

    # Adjusted operands.

    def adjust_attribute(self, node: int, what: Adjustment) -> None:
        """Multiply float attributes of the node."""
        native = self.binding.nodes[node]
        assert native is not None
        own = (what.attribute,)
        for name in SCALAR_NAMES[native.op_type] if what.attribute == SCALARS else own:
            if name in native.attributes:
                before = np.array(native.attributes[name].as_float(), np.float32)
                native.attributes[name] = ir.AttrFloat32(name, float(what.of(before)))

    def adjust_constant(self, edit: AdjustOperand) -> None:
        """Give a constant other numbers; where other ops read it, too, the op gets a copy."""
        what, port = edit.what, self.binding.ports[edit.node][edit.what.port]
        assert port is not None
        assert isinstance(port.owner, ir.Node)
        value = port.value()
        tensor = self.binding.constant(value)
        assert tensor is not None
        adjusted = ComputedTensor(tensor, what.of)
        if value in self.binding.folded or len(value.uses()) > 1:
            port.read(self._editor.constant(f"{value.name}_scaled", adjusted))
            drop_unread([value])
        else:
            set_constant(value, adjusted)

    def adjusted(self, tensor: ir.Value, kind: str, by: NDArray[np.float32]) -> ir.Value:
        """The result of a new node, which reads a constant."""
        name = self._editor.fresh(f"{SCALE}_{tensor.name}")
        read = [tensor, self._editor.constant(f"{name}_by", by)]
        out = self._editor.op(
            KINDS[kind], read, name=name, dtype=tensor.dtype, shape=tensor.shape
        )
        for node in self._editor.made:
            node.metadata_props[MARK] = ""
        self._editor.place_after(tensor)
        return out

    # Roundings that switch.

    def constant(self, array: NDArray[np.float32]) -> ir.Value:
        """A constant of these numbers."""
        return self._editor.constant("finecast_constant", array)

    def rounded_constant(self, value: int, how: Reading) -> ir.Value:
        """A constant that is rounded when it is written."""
        tensor = self.binding.constant(self.binding.values[value])
        assert tensor is not None

        def rounded(numbers: NDArray[np.generic]) -> NDArray[np.float32]:
            return how.round(numbers.astype(np.float32))

        return self._editor.constant("finecast_constant", ComputedTensor(tensor, rounded))

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> ir.Value:
        """The result of a node, which is placed after what it reads."""
        kept = {"keepdims": 1} if attributes.get("keep_dims") else {}
        bounds = [attributes[n] for n in ("min_value", "max_value") if n in attributes]
        given = [*inputs, *bounds]
        if kind == "reduce_mean" and opset_of(self.binding.model) < _AXES_ARE_INPUTS:
            kept["axes"] = given.pop()
        values = [x for x in inputs if isinstance(x, ir.Value)]
        last = max(values, key=self._age)
        out = self._editor.op(
            KINDS[kind],
            [self._as_input(x) for x in given],
            kept,
            name=self._editor.fresh(f"{last.name}_{kind}"),
            dtype=ir.DataType.BOOL if kind == "is_inf" else ir.DataType.FLOAT,
            shape=values[-1].shape if kind in _ELEMENTWISE else None,
        )
        return self._placed(out, last)

    def _age(self, value: ir.Value) -> int:
        """How many ops were made before the one that gives ``value``; -1 for others."""
        return self._made.get(value, -1)

    def _as_input(self, x: ir.Value | float | list[int]) -> ir.Value:
        if isinstance(x, ir.Value):
            return x
        dtype = np.float32 if isinstance(x, float) else np.int64
        return self._editor.constant("finecast_number", np.array(x, dtype))

    def rounded(self, tensor: ir.Value, how: Rounder) -> ir.Value:
        """``tensor`` rounded, in fp32: as a conversion states it, or as a device does it."""
        if not (self._emulates or isinstance(how.encoding, Dynamic)):
            out = rounding(self._maker, tensor, how.encoding or how.format)
            return self._placed(out, tensor)
        label = self._editor.fresh(f"{tensor.name}_view_{how.format.label}")
        made, out = self._maker.rounding.round(tensor, how, label)
        self._editor.made += made
        return self._placed(out, tensor)

    def switched(self, k: int, on: ir.Value, off: ir.Value) -> ir.Value:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        if (k, 0) not in self._elements:
            index = self._editor.constant(f"{SWITCH}_index_{k}", np.array(k, np.int64))
            read, name = [self.switch_in(0), index], f"{SWITCH}_{k}"
            dtype = ir.DataType.BOOL
            self._elements[k, 0] = self._editor.op("Gather", read, name=name, dtype=dtype)
            self._gathers += self._editor.take()
        choice = [self._elements[k, 0], on, off]
        name = self._editor.fresh(f"{off.name}_switched")
        out = self._editor.op("Where", choice, name=name, shape=off.shape)
        return self._placed(out, max((off, on), key=self._age))

    def _placed(self, out: ir.Value, value: ir.Value) -> ir.Value:
        """``out``; the nodes that were made for it, which read ``value``, are put after it."""
        self._made[out] = len(self._made)
        producer = value.producer()
        if producer is not None and producer.graph is None:  # itself in the prologue
            self._prologue += self._editor.take()
        else:
            place_after(value, self._editor.take(), self._main, self._prologue)
        return out

    def add_switch(self) -> ir.Value:
        """An extra input, whose length is stated at the end."""
        return self._input(SWITCH, ir.DataType.BOOL, ())

    def add_input(self, name: str, shape: tuple[int, ...]) -> ir.Value:
        """An extra input in fp32."""
        return self._input(name, ir.DataType.FLOAT, shape)

    def _offset(self) -> ir.Value:
        return self._inputs.get(OFFSET) or self._input(OFFSET, ir.DataType.INT64, ())

    def _input(self, name: str, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
        self._inputs[name] = ir.val(name, dtype, ir.Shape(shape))
        self._main.inputs.append(self._inputs[name])
        return self._inputs[name]

    def retyped(self, tensor: ir.Value, was: Format, to: Format) -> ir.Value:
        """The result of a Cast."""
        del was
        return self._placed(self._maker.cast(tensor, to), tensor)

    def parent_of(self, region: int) -> int:
        """The region that a body's op stands in."""
        return self.binding.bodies[region].parent

    def hand_out(self, region: int, count: ir.Value | None) -> ir.Value:
        """A new output of the op and of its bodies; of a loop the sum over its steps."""
        body, editor = self.binding.bodies[region], self._editor
        owner, shape = body.owner, ir.Shape(())
        for graph in bodies(owner):
            if count is not None and graph is body.graph:
                graph.outputs.append(count)
                continue
            number = {"value": ir.tensor(np.float32(graph is body.graph))}
            name = editor.fresh(RUNS)
            graph.outputs.append(editor.op("Constant", [], number, name=name, shape=shape))
            graph.extend(editor.take())
        owner.resize_outputs(len(owner.outputs) + 1)
        result = owner.outputs[-1]
        result.name, result.type = editor.fresh(RUNS), ir.TensorType(ir.DataType.FLOAT)
        if owner.op_type == "If":
            result.shape = shape
            return result
        for name in ("scan_output_axes", "scan_output_directions"):
            if name in owner.attributes:
                numbers = [*owner.attributes[name].as_ints(), 0]
                owner.attributes[name] = ir.AttrInt64s(name, numbers)
        name = editor.fresh(RUNS)
        total = editor.op("ReduceSum", [result], {"keepdims": 0}, name=name, shape=shape)
        return self._placed(total, result)

    def join(self, other: EditedModel) -> None:
        """Take the nodes and constants of ``other``, under new names."""
        exact, inputs = other.binding.model, {v.name: v for v in self._main.inputs}
        given, taken = (
            [v for v in model.graph.inputs if not v.is_initializer()]
            for model in (self.binding.model, exact)
        )
        own = self.binding.model
        own.ir_version = max(own.ir_version or 0, exact.ir_version or 0)
        for domain, version in exact.graph.opset_imports.items():
            self._main.opset_imports.setdefault(domain, version)
        exact.graph.outputs.clear()
        for value, beside in zip(taken, given, strict=False):
            value.replace_all_uses_with(inputs.get(value.name, beside))
        for value in every_value(exact):
            value.name = f"{_JOINED}{value.name}"
            value.shape = _apart(value.shape)
        for node in exact.graph.all_nodes():
            node.name = f"{_JOINED}{node.name}"
        constants, nodes = [*exact.graph.initializers.values()], [*exact.graph]
        exact.graph.inputs.clear()
        exact.graph.initializers.clear()
        exact.graph.remove(nodes)
        for value in constants:
            self._main.register_initializer(value)
        self._main.extend(nodes)
        self._unsorted = True

    def finish(self, switches: int = 0, outputs: Mapping[str, ir.Value] | None = None) -> Any:
        """The model itself, with what was made; in parts if functions compute some nodes."""
        if switches:
            self.switch_in(0).shape = ir.Shape([switches])
        place_first([*self._gathers, *self._prologue], self._main)
        if outputs is not None:
            self._main.outputs.clear()
            self._main.outputs.extend(outputs.values())
            for name, value in outputs.items():
                value.name = name
        if self._unsorted:
            self._main.sort()
        model = self.binding.model
        functions = self._functions
        return ModelInParts(model=model, functions=functions) if functions else model

    def compute(self, node: int, function: Computed) -> None:
        """Have ``function`` compute the node's result, outside of the engine."""
        native = self.binding.nodes[node]
        assert native is not None
        self._functions[native] = function

    # Edits, which are noted in the model.

    def retype(self, node: int, to: Format) -> None:
        """Have a node compute in ``to``."""
        changed, dtype = self.graph.nodes[node], DATA_TYPES[to]
        for value in self.graph.following_outputs(changed):
            self.binding.values[value.id].type = ir.TensorType(dtype)
        native = self.binding.nodes[node]
        if native is None:
            return
        native.metadata_props[MARK] = changed.format.label if changed.format else ""
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
        native = self.binding.values[value]
        if native.is_graph_input():
            native.type = ir.TensorType(DATA_TYPES[to])

    def insert_cast(self, edit: InsertCast, stored: StoredAs | None) -> None:
        """Cast a value where it is defined; first rounded in fp32 where it is ``stored`` so.

        An output of a body that is a value from outside is cast in the body.
        """
        value = self.binding.values[edit.value]
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
            if stored is not None and edit.to is Format.BF16:
                read = self._maker.rounded(value, edit.to, stored)
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
        value = self.binding.values[edit.value]
        for use in edit.uses:
            port = self._port(use)
            if port is not None and isinstance(port.owner, ir.Graph):
                port.read(self._constant(value, edit.to, port.owner))
                continue
            self.give(edit.value, [use], self._stored(value, edit.to))
        self.replaced.append(value)

    def _stored(self, value: ir.Value, to: Format) -> ir.Value:
        """The constant ``value`` in ``to``, which all readers in that type share.

        A table that some ops read as it is and others transposed is not stored twice: the
        nodes that move its numbers stand behind the converted table again.
        """
        if (value, to) not in self._low:
            node = value.producer()
            if node is None or not self._moves_shared(value, to):
                self._low[value, to] = self._initializer(value, to)
                return self._low[value, to]
            source, *others = node.inputs
            assert source is not None
            self._low[value, to] = self._editor.op(
                node.op_type,
                [self._stored(source, to), *others],
                node.attributes,
                name=self._editor.fresh(f"{value.name}_{to.label}"),
                dtype=DATA_TYPES[to],
                shape=value.shape,
            )
            self._editor.made[-1].metadata_props[MARK] = dtype_label(value.type)
            self._editor.place_after(value)
        return self._low[value, to]

    def _moves_shared(self, value: ir.Value, to: Format) -> bool:
        """Whether ``value`` has a constant's numbers, moved, which others read, too."""
        node = value.producer()
        if value not in self.binding.folded or node is None or len(node.outputs) > 1:
            return False
        source, moves = node.inputs[0], lookup(f"onnx::{node.op_type}").places
        if source is None or not moves or node.op_type == "Concat":
            return False
        shared = (source, to) in self._low or len(source.uses()) > 1
        return shared or self._moves_shared(source, to)

    def _initializer(self, value: ir.Value, to: Encoding) -> ir.Value:
        """A constant of the main graph: the numbers of ``value``, stored in ``to``."""
        tensor = self.binding.constant(value)
        assert tensor is not None
        return self._editor.constant(f"{value.name}_{to.label}", ConvertedTensor(tensor, to))

    def _constant(self, value: ir.Value, to: Format, home: ir.Graph) -> ir.Value:
        """A Constant node in the body ``home``: a body's outputs must be made in it."""
        tensor = self.binding.constant(value)
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

    def insert_roundings(self, edits: Sequence[RoundTrip]) -> None:
        """Put nodes that round after values; constants are rounded when they are written."""
        constants = (e for e in edits if self.graph.values[e.value].constant is not None)
        self._decoded |= {(self.binding.values[e.value], e.to): None for e in constants}
        for edit in edits:
            value, to, made = self.binding.values[edit.value], edit.to, dict[Any, ir.Value]()
            constant = self.graph.values[edit.value].constant is not None
            for port in map(self._port, edit.uses):
                if port is None or isinstance(port.owner, ir.Graph):
                    continue
                seen = port.value()
                if seen not in made:
                    made[seen] = (
                        self._stored_and_read(value, to)
                        if constant
                        else self._noted(rounding(self._maker, seen, to), to, seen)
                    )
                port.read(made[seen])

    def _stored_and_read(self, value: ir.Value, to: Encoding) -> ir.Value:
        """The constant ``value``, stored in ``to``, as it is read.

        A tied table, which a lookup reads as it is and a product transposed, is stored once:
        what decodes it stands in front of the transposition, where OpenVINO's kernels take it.
        """
        decoded = self._decoded.get((value, to))
        if decoded is None:
            self.replaced.append(value)
            source = self._transposed_from(value, to)
            if source in self._decoded:
                decoded = self._transposed(self._stored_and_read(*source), value, to)
            else:
                stored = self._initializer(value, to)
                back = STATEMENTS[to.format].back(self._maker, stored, to)
                decoded = self._noted(back, to, stored)
            self._decoded[value, to] = decoded
        return decoded

    def _transposed_from(self, value: ir.Value, to: Encoding) -> _Coded | None:
        """What ``value`` is the transpose of, with its encoding in equal codes."""
        node = value.producer()
        if value not in self.binding.folded or node is None or node.op_type != "Transpose":
            return None
        source, tensor = node.inputs[0], self.binding.constant(value)
        if source is None or tensor is None or not isinstance(to, Scaled):
            return None
        sizes = tensor.shape.numpy()
        before = to.before(node.attributes.get_ints("perm", [*range(len(sizes))[::-1]]), sizes)
        return None if before is None else (source, before)

    def _transposed(self, read: ir.Value, value: ir.Value, to: Encoding) -> ir.Value:
        """What is ``read``, transposed by a new node as ``value`` is."""
        node = value.producer()
        assert node is not None
        out = self._editor.op(
            "Transpose",
            [read],
            node.attributes,
            name=self._editor.fresh(f"{value.name}_{to.format.label}"),
            dtype=read.dtype,
            shape=value.shape,
        )
        self._editor.made[-1].metadata_props[MARK] = ""
        return self._noted(out, to, read)

    def _noted(self, out: ir.Value, to: Encoding, value: ir.Value) -> ir.Value:
        """``out`` of the nodes that were made, which read ``value``: they are put after it."""
        if not STATEMENTS[to.format].by_casts:
            for node in self._editor.made:
                node.metadata_props[ROUNDING] = f"{to.label} {out.name}"
        self._editor.place_after(value)
        return out
