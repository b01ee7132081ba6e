"""A TensorFlow graph as a ``NativeModel``: casts, low constants, type attributes, roundings.

Law: inputs and outputs keep names, types and shapes unless an edit changes their types; what
no edit names does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from finecast import Format
from finecast.errors import ModelError
from finecast.frontends import RUNS, SCALE, NativeModel
from finecast.graph import Graph
from finecast.numbers import Rounder, convert_constant
from finecast.planning import SWITCH, Adjustment, AdjustOperand, Use
from finecast_tensorflow.frontend.functions import (
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
from finecast_tensorflow.frontend.library import (
    DTYPES,
    NodeDef,
    dtype_label,
    tf,
    type_number,
)
from finecast_tensorflow.frontend.model import (
    FrozenModel,
    SignaturePort,
    base_name,
    imported_graph,
    reachable,
    with_nodes,
)
from finecast_tensorflow.frontend.reader import GraphBinding
from finecast_tensorflow.frontend.regions import GraphRegion

CAST: Final = "tf::Cast"
_JOINED: Final = "finecast_joined"
"""The scope of the nodes that another model brought."""


def observable(
    graph: Graph, binding: GraphBinding, *, decisions: bool = False
) -> dict[str, int]:
    """Tensors and ids of the float values that can be shown: those made outside of bodies.

    With ``decisions`` those of integers and bools.
    """
    return {
        binding.values[value.id]: value.id
        for value in graph.values
        if (value.is_decision if decisions else value.format is not None)
        and value.constant is None
        and value.producer is not None
        and not binding.value_regions[value.id]
    }


def with_outputs(model: FrozenModel, tensors: Sequence[str]) -> FrozenModel:
    """``model`` with the given tensors as outputs, each under its own name."""
    graph = imported_graph(model.graph)
    shown = tuple(
        SignaturePort(
            name=name,
            tensor=name,
            dtype=dtype_label(graph.get_tensor_by_name(name).dtype),
            shape=None,
        )
        for name in tensors
    )
    return replace(model, outputs=shown)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """Numbers that become a constant's node in the region that reads them."""

    array: NDArray[np.float32]


@final
class TensorFlowNative(NativeModel):
    """A copy of a model, to be changed; its tensors are ``At``s, or ``Constant``s.

    Attributes:
        binding: What the ids of the graph stand for.
        sections: Copies of the model's regions, by number.
        stored_in: The format that each float value has after the changes so far, by id.
    """

    library: ClassVar[str] = "TensorFlow"
    states: ClassVar[Collection[Format]] = DTYPES
    computes: ClassVar[bool] = True

    def __init__(self, graph: Graph, binding: GraphBinding) -> None:
        super().__init__(graph)
        self.binding = binding
        self.sections = [Section.of(region) for region in binding.regions]
        self.stored_in = {v.id: v.format for v in graph.values if v.format is not None}
        self._outputs: dict[str, str] = {}
        self._ports: dict[str, Format] = {}
        self._traced: dict[Any, tuple[list[Any], str]] = {}
        self._grafts = 0
        self._computed: list[Any] = []

    def tensor(self, value: int) -> At:
        """The tensor that a value is, and its region."""
        return At(self.binding.value_regions[value], self.binding.values[value])

    def nodes(self, region: int) -> dict[str, NodeDef]:
        """The nodes of a region, by name."""
        return self.sections[region].nodes

    def read_at(self, node: int, index: int) -> At:
        """The tensor that input ``index`` of a node reads after the changes so far."""
        entry = self.binding.entries[node][index]
        section = self.sections[entry.region]
        if entry.is_result:
            return At(entry.region, section.results[entry.index])
        return At(entry.region, tensor_of(section.nodes[entry.node].input[entry.index]))

    def give(self, value: int, uses: Iterable[Use], tensor: At | Constant) -> None:
        """Let ``uses`` of a value read ``tensor``, which is in the same region."""
        name = self._placed(tensor, self.binding.value_regions[value])
        for use in uses:
            if use.node is None:
                self._outputs[self.binding.values[value]] = name
                continue
            entry = self.binding.entries[use.node][use.index]
            section = self.sections[entry.region]
            if entry.is_result:
                section.results[entry.index] = name
            else:
                section.nodes[entry.node].input[entry.index] = reference(name)

    def constant(self, array: NDArray[np.float32]) -> Constant:
        """A new constant; its node is made where it is read."""
        return Constant(array=array)

    def _placed(self, tensor: At | Constant, region: int) -> str:
        """The name of a tensor in a region; a constant's node is added there."""
        if isinstance(tensor, At):
            return tensor.tensor
        return self.add_constant(region, "finecast_constant", tensor.array, tf.float32).tensor

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> At:
        """The result of a function of TensorFlow's on fp32 tensors.

        The function is traced once for its numbers and attributes; nodes of the trace are
        copied.
        """
        tensors = [x for x in inputs if isinstance(x, At | Constant)]
        numbers = tuple(None if isinstance(x, At | Constant) else str(x) for x in inputs)
        key = (kind, numbers, *attributes.items())
        if key not in self._traced:
            self._traced[key] = _traced(kind, inputs, attributes)
        nodes, end = self._traced[key]
        first = next(x for x in tensors if isinstance(x, At))
        self._grafts += 1
        prefix = f"{base_name(first.tensor)}/finecast_{self._grafts}"
        names = [self._placed(x, first.region) for x in tensors]
        inside = {node.name for node in nodes}

        def joined(source: str) -> str:
            name, _, index = tensor_of(source).partition(":")
            if name in inside:
                return reference(f"{prefix}/{name}:{index}")
            return reference(names[int(name.removeprefix("p"))])

        for node in nodes:
            copy = self.add_node(first.region, f"{prefix}/{node.name}", node.op)
            name = copy.name
            copy.CopyFrom(node)
            copy.name = name
            copy.input[:] = [joined(source) for source in node.input]
        return At(first.region, f"{prefix}/{end}")

    @cached_property
    def _as_read(self) -> Any:
        """The model before any change, with the types of all tensors."""
        return self.binding.model.imported()[0]

    def compute(self, node: int, function: Callable[..., NDArray[np.float32]]) -> None:
        """Have the node call the function, which is known to this process alone."""
        own = self.nodes(self.graph.nodes[node].region)[self.binding.nodes[node]]
        read = self._as_read.get_operation_by_name(own.name).inputs
        with tf.Graph().as_default() as traced:
            inputs = [tf.compat.v1.placeholder(x.dtype) for x in read]
            call = tf.numpy_function(function, inputs, tf.float32).op.node_def
        own.op = call.op
        own.attr.clear()
        for name, value in call.attr.items():
            own.attr[name].CopyFrom(value)
        self._computed.append(traced)

    def rounded(self, tensor: At, how: Rounder) -> At:
        """``tensor`` cast to a type and back; by arithmetic where a Cast would not do."""
        if how.saturate or how.flush_subnormals or how.format not in DTYPES:
            return super().rounded(tensor, how)
        return self.op("round_trip", tensor, low=how.format)

    def retype(self, node: int, to: Format) -> None:
        """Set the attributes that state the type."""
        for slot in self.binding.slots[node]:
            attribute = self.nodes(slot.region)[slot.node].attr[slot.attribute]
            if slot.index is None:
                attribute.type = type_number(to)
            else:
                attribute.list.type[slot.index] = type_number(to)
        for value in self.graph.following_outputs(self.graph.nodes[node]):
            self.stored_in[value.id] = to

    def declare(self, value: int, to: Format) -> None:
        """Declare an input or output; an output's tensor must have that type."""
        tensor = self.binding.values[value]
        self._ports[tensor] = to
        if self.graph.values[value].is_input:
            self.nodes(0)[base_name(tensor)].attr["dtype"].type = type_number(to)
            self.stored_in[value] = to

    def cast(self, value: int, to: Format, *, exact: bool = False) -> At:
        """The result of a new Cast of a value; it casts from the format in ``stored_in``."""
        del exact  # TensorFlow rounds right
        return self.retyped(self.tensor(value), self.stored_in[value], to)

    def retyped(self, tensor: At, was: Format, to: Format) -> At:
        """The result of a new Cast."""
        name = f"{base_name(tensor.tensor)}/cast_{to.label}"
        node = self.add_node(tensor.region, name, "Cast")
        node.input.append(reference(tensor.tensor))
        node.attr["SrcT"].type = type_number(was)
        node.attr["DstT"].type = type_number(to)
        node.attr["Truncate"].b = False
        return At(tensor.region, f"{node.name}:0")

    def stored(self, value: int, to: Format) -> At:
        """A new constant, which waits for what the constant ``value`` waits for."""
        stats = self.graph.values[value].constant
        assert stats is not None
        region, tensor = self.tensor(value)
        name = base_name(tensor)
        array = convert_constant(stats.read(), to)
        low = self.add_constant(region, f"{name}/{to.label}", array, DTYPES[to])
        nodes = self.nodes(region)
        waits_for = [i for i in nodes[name].input if i.startswith("^")]
        nodes[base_name(low.tensor)].input.extend(waits_for)
        return low

    def adjust_attribute(self, node: int, what: Adjustment) -> None:
        """Multiply a float attribute, as an epsilon."""
        op = self.nodes(self.graph.nodes[node].region)[self.binding.nodes[node]]
        number = op.attr[what.attribute]
        number.f = float(what.of(np.array(number.f, np.float32)))

    def adjust_constant(self, edit: AdjustOperand) -> None:
        """Have the node read a new constant."""
        assert edit.value is not None
        use = Use(node=edit.node, index=edit.what.port)
        region, tensor = self.tensor(edit.value)
        stats = self.graph.values[edit.value].constant
        assert stats is not None
        array = edit.what.of(stats.read().astype(np.float32))
        name = f"{base_name(tensor)}/scaled"
        self.give(edit.value, [use], self.add_constant(region, name, array, tf.float32))

    def adjusted(self, tensor: At, kind: str, by: NDArray[np.float32]) -> At:
        """The result of a new op that reads a constant."""
        region, name = tensor
        op = {"multiply": "Mul", "add": "AddV2"}[kind]
        node = self.add_node(region, f"{SCALE}/{base_name(name)}", op)
        other = self.add_constant(region, f"{node.name}/by", by, tf.float32)
        node.attr["T"].type = type_number(Format.FP32)
        node.input.extend((reference(name), reference(other.tensor)))
        return At(region, f"{node.name}:0")

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

    def add_switch(self) -> At:
        """A new placeholder."""
        node = self.add_node(0, SWITCH, "Placeholder")
        node.attr["dtype"].type = tf.bool.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape([None]).as_proto())
        return At(0, f"{SWITCH}:0")

    def region_of(self, tensor: At) -> int:
        """The region that the tensor is in."""
        return tensor.region

    def parent_of(self, region: int) -> int:
        """The region that a body's op stands in."""
        return self.binding.regions[region].parent

    def hand_in(self, region: int, tensor: At) -> Mapping[int, At]:
        """A new argument of all bodies of the op; a loop passes it on unchanged."""
        regions, own = self.binding.regions, self.binding.regions[region]
        outside = self.nodes(own.parent)
        op, source = outside[own.owner], outside[base_name(tensor.tensor)].attr
        loop, attributes = op.op in LOOPS, op.attr
        data = sum(not read.startswith("^") for read in op.input)
        op.input.insert(data, reference(tensor.tensor))
        attributes["T" if loop else "Tin"].list.type.append(source["dtype"].type)
        shape = source["shape"].shape if "shape" in source else tf.TensorShape([]).as_proto()
        if loop and attributes["output_shapes"].list.shape:
            attributes["output_shapes"].list.shape.add().CopyFrom(shape)
        arguments: dict[int, At] = {}
        for body in regions:
            if (body.parent, body.owner) != (own.parent, own.owner):
                continue
            given = self.add_node(body.number, SWITCH, "Placeholder")
            given.attr["dtype"].CopyFrom(source["dtype"])
            given.attr["shape"].shape.CopyFrom(shape)
            arguments[body.number] = At(body.number, f"{given.name}:0")
            self.sections[body.number].arguments.append(given.name)
            if loop and body.role == "body":
                self.sections[body.number].results.append(f"{given.name}:0")
        return arguments

    def hand_out(self, region: int, count: At | None) -> At:
        """A new output of the op and of its bodies; a loop adds the number to a variable.

        What decides whether a loop goes on runs whenever the loop does, and gives that alone:
        bodies within it count as those that never run.
        """
        own = self.binding.regions[region]
        op = self.nodes(own.parent)[own.owner]
        if own.role == "cond":
            return self._number(own.parent, float(count is None))
        loop = op.op in LOOPS
        types = op.attr["T" if loop else "Tout"].list.type
        output = At(own.parent, f"{own.owner}:{len(types)}")
        if loop:
            argument = self.hand_in(region, self._number(own.parent, 0.0))[region]
            last = self.op("add", argument, count or self._number(region, 1.0))
            self.sections[region].results[-1] = last.tensor
            return output
        types.append(type_number(Format.FP32))
        if op.attr["output_shapes"].list.shape:
            op.attr["output_shapes"].list.shape.add()
        for body in self.binding.regions:
            if (body.parent, body.owner) == (own.parent, own.owner):
                chosen = body.number == region
                number = (
                    count if chosen and count else self._number(body.number, float(chosen))
                )
                self.sections[body.number].results.append(number.tensor)
        return output

    def _number(self, region: int, number: float) -> At:
        return self.add_constant(region, RUNS, np.array(number, np.float32), tf.float32)

    def join(self, other: TensorFlowNative) -> None:
        """Copy the nodes of ``other``, each under a new name."""
        theirs = other.binding
        if len(theirs.regions) > 1:
            raise ModelError(
                "a model with control flow in functions cannot be joined with another",
                fix="leave loops and branches out, or give both models as ONNX",
            )
        places = zip(theirs.model.inputs, self.binding.model.inputs, strict=True)
        inputs = {base_name(port.tensor): base_name(own.tensor) for port, own in places}
        names = {n: inputs.get(n, f"{_JOINED}/{n}") for n in other.nodes(0)}

        def renamed(tensor: str) -> str:
            name, colon, index = tensor.partition(":")
            wait = "^" if name.startswith("^") else ""
            return f"{wait}{names[name.removeprefix('^')]}{colon}{index}"

        for name, node in other.nodes(0).items():
            if name not in inputs:
                node.name = names[name]
                node.input[:] = map(renamed, node.input)
                self.nodes(0)[node.name] = node
        other.sections = self.sections
        other.binding = replace(
            theirs,
            nodes=[names.get(name, name) for name in theirs.nodes],
            slots=[tuple(replace(s, node=names[s.node]) for s in of) for of in theirs.slots],
            entries=[
                tuple(replace(p, node=names[p.node]) for p in of) for of in theirs.entries
            ],
            values=[renamed(tensor) for tensor in theirs.values],
        )

    def finish(
        self, switches: int = 0, outputs: Mapping[str, At] | None = None
    ) -> FrozenModel:
        """The changed model, of the nodes that its outputs need."""
        self._restate_casts()
        model = self.binding.model
        inputs = tuple(map(self._declared, model.inputs))
        if switches:
            name = self.switch_in(0).tensor
            switch = SignaturePort(name=SWITCH, tensor=name, dtype="bool", shape=(switches,))
            inputs = (*inputs, switch)
        ends = tuple(self._moved(self._declared(port)) for port in model.outputs)
        if outputs is not None:
            ends = tuple(
                SignaturePort(name=name, tensor=at.tensor, dtype="fp32", shape=None)
                for name, at in outputs.items()
            )
        nodes = self.sections[0].kept([base_name(p.tensor) for p in (*ends, *inputs)])
        library = library_of(model.graph) | self._functions()
        result = with_nodes(model.graph, nodes, needed(nodes, library))
        computed = (*model.computed, *self._computed)
        return replace(model, graph=result, inputs=inputs, outputs=ends, computed=computed)

    def _restate_casts(self) -> None:
        """State in the model's own Casts the formats that their inputs have now."""
        for node in self.graph.nodes:
            source = node.inputs[0] if node.native == CAST else None
            if source is not None and source in self.stored_in:
                cast = self.nodes(node.region)[self.binding.nodes[node.id]]
                cast.attr["SrcT"].type = type_number(self.stored_in[source])

    def _functions(self) -> dict[str, Any]:
        """The bodies as functions by name, with the names that their ops refer to."""
        library = library_of(self.binding.model.graph)
        functions: dict[str, Any] = {}
        for region in self.binding.regions[1:]:
            section = self.sections[region.number]
            ends = [*section.arguments, *(base_name(t) for t in section.results)]
            owner = self.nodes(region.parent)[region.owner]
            name = bodies(owner)[region.role]
            functions[name] = as_function(
                name,
                section.kept(ends),
                section.arguments,
                list(zip(section.results, result_types(owner, region.role), strict=True)),
                library,
            )
        return functions

    def _declared(self, port: SignaturePort) -> SignaturePort:
        fmt = self._ports.get(port.tensor)
        return port if fmt is None else replace(port, dtype=fmt.label)

    def _moved(self, port: SignaturePort) -> SignaturePort:
        return replace(port, tensor=self._outputs.get(port.tensor, port.tensor))


def _traced(
    kind: str, inputs: Sequence[Any], attributes: Mapping[str, Any]
) -> tuple[list[Any], str]:
    """The nodes that a function adds to a graph, and the tensor that it gives.

    Tensors among ``inputs`` are placeholders ``p0``, ``p1``..., which are not among the nodes.
    """
    graph = tf.Graph()
    with graph.as_default():
        given: list[Any] = []
        count = 0
        for index, x in enumerate(inputs):
            if not isinstance(x, At | Constant):
                given.append(x)
                continue
            dtype = tf.bool if kind in _BOOL_FIRST and index == 0 else tf.float32
            given.append(tf.compat.v1.placeholder(dtype, None, name=f"p{count}"))
            count += 1
        end: str = _FUNCTIONS[kind](*given, **attributes).name
    return [n for n in graph.as_graph_def().node if n.op != "Placeholder"], end


def _clamp(x: Any, *, min_value: float, max_value: float) -> Any:
    return tf.minimum(tf.maximum(x, min_value), max_value)


def _round(x: Any, *, mode: str) -> Any:
    """To the nearest integer, ties to even, which is the only ``mode`` asked for."""
    del mode
    return tf.round(x)


def _reduce_sum(x: Any, axes: Any, *, keep_dims: bool) -> Any:
    return tf.reduce_sum(x, axes, keepdims=keep_dims)


def _round_trip(x: Any, *, low: Format) -> Any:
    return tf.cast(tf.cast(x, DTYPES[low]), tf.float32)


_BOOL_FIRST: Final = frozenset({"select", "gather"})
"""The kinds of ops whose first input is bool."""
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": tf.abs,
    "add": tf.add,
    "clamp": _clamp,
    "divide": tf.divide,
    "gather": lambda x, k, axis: tf.gather(x, k, axis=axis),
    "greater": tf.greater,
    "is_finite": tf.math.is_finite,
    "is_inf": tf.math.is_inf,
    "is_nan": tf.math.is_nan,
    "less": tf.less,
    "less_equal": tf.less_equal,
    "multiply": tf.multiply,
    "reduce_sum": _reduce_sum,
    "round": _round,
    "round_trip": _round_trip,
    "select": tf.where,
    "sign": tf.sign,
    "subtract": tf.subtract,
}
