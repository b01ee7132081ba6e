"""An ``ov.Model`` as a ``NativeModel``: what plans, roundings and adjustments change in it.

Law: ops keep their names; inputs and outputs keep names, types and shapes unless the plan says
otherwise; constants are rounded to nearest from their original numbers. (OpenVINO does not
round to nearest when it makes a low constant of fp32 numbers.) All roundings of copies are
arithmetic in fp32. What a conversion inserts or changes is noted (``changes.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.frontends.exact_casts import StoredAs, rounded_by
from finecast.frontends.native_model import NativeModel, replay
from finecast.frontends.openvino.bodies import Entry, hand_in, hand_out
from finecast.frontends.openvino.changes import inserted, note_inserted
from finecast.frontends.openvino.messages import explain
from finecast.frontends.openvino.reader import FreshOpNames, OvBinding, port_name, read
from finecast.frontends.openvino.types import (
    SCALAR_NAMES,
    STATED,
    TYPES,
    element_type,
    new_constant,
    numbers_of,
    port_key,
    replace_op,
    take_names,
)
from finecast.graph import SCALARS, Graph
from finecast.numbers.encodings import Encoding, Scaled, packed
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_constant
from finecast.planning.adjustments import Adjustment, AdjustOperand
from finecast.planning.edits import ConvertConstant, Edit, RoundTrip, Use
from finecast.planning.points import SWITCH

if TYPE_CHECKING:
    import openvino

    from finecast.frontends.openvino.computed import Computed


T = TypeVar("T", Format, Scaled)

# So many ops read one part of the switch. OpenVINO takes long where thousands read one tensor.
_PART: Final = 64
# What it gives nobody reads, and OpenVINO compiles no model that reads it.
_STORES: Final = "openvino::Assign"


def observable(graph: Graph, *, decisions: bool = False) -> dict[str, int]:
    """Names and ids of the float values that can be shown: those computed outside of bodies.

    With ``decisions`` those of integers and bools. A name is ``OP:OUTPUT``, for a tensor may
    have no name of its own, or several.
    """
    ids_by_name: dict[str, int] = {}
    for value in graph.values:
        shown = value.is_decision if decisions else value.format is not None
        if shown and value.constant is None and value.producer is not None:
            maker = graph.nodes[value.producer]
            index = maker.outputs.index(value.id)
            stores = maker.native == _STORES
            if not (maker.region or stores) and value.id in maker.outer_outputs:
                ids_by_name[f"{maker.name}:{index}"] = value.id
    return ids_by_name


def with_outputs(model: openvino.Model, names: Sequence[str]) -> openvino.Model:
    """A copy of ``model`` whose outputs are just the values called ``names``.

    Names are those of ``observable``.
    """
    from openvino import opset13

    copy = model.clone()
    graph, binding = read(copy)
    ids = observable(graph) | observable(graph, decisions=True)
    for result in copy.get_results():
        copy.remove_result(result)
    ports = [binding.values[ids[name]] for name in names]
    for port in binding.values:
        if port.get_node().get_type_name() != "Parameter":
            port.set_names(set())  # so that no name set below is taken
    results: list[Any] = []
    for name, port in zip(names, ports, strict=True):
        port.set_names({name})
        results.append(opset13.result(port, name=name))
    copy.add_results(results)
    copy.validate_nodes_and_infer_types()
    return copy


def apply_edits(
    graph: Graph,
    binding: OvBinding,
    edits: Iterable[Edit],
    rounded: Mapping[int, StoredAs] = MappingProxyType({}),
) -> None:
    """Make ``edits`` in ``binding.model``, and note them there.

    Args:
        graph: The graph that was read from the model.
        binding: What the ids of the graph stand for.
        edits: The edits.
        rounded: Values that are rounded in fp32 before they are cast to bf16, by id.

    Raises:
        ModelError: If OpenVINO refuses the edited model.
    """
    model, edits = OvNative(graph, binding), [*edits]
    model.share_constants(edits)
    model.first_rounded = rounded
    replay(model, edits, rounded)
    note_inserted(binding.model, model.inserted)
    try:
        model.finish()
    except RuntimeError as error:
        raise ModelError(
            f"OpenVINO refuses the model in these types: {explain(error)}",
            fix="keep the op named in fp32 by --exclude or --op NAME=fp32",
        ) from error


@final
class OvNative(NativeModel):
    """An ``ov.Model``, changed in place; its tensors are ports."""

    library: ClassVar[str] = "OpenVINO"
    states: ClassVar[Collection[Format]] = STATED
    computes: ClassVar[bool] = True

    def __init__(self, graph: Graph, binding: OvBinding) -> None:
        super().__init__(graph)
        self.binding = binding
        self.inserted = inserted(binding.model)
        self.first_rounded: Mapping[int, StoredAs] = {}
        self.fresh = FreshOpNames(binding.model)
        ids = {port_key(port): value for value, port in enumerate(binding.values)}
        self._regions = dict(zip(ids, binding.value_regions, strict=True))
        self._results: dict[int, list[openvino.Node]] = {}
        for result in binding.model.get_results():
            self._results.setdefault(ids[port_key(result.input_value(0))], []).append(result)
        self._switch: Any = None
        self._parts: dict[tuple[int, int], openvino.Output] = {}
        self._ids = ids
        # Constants in the encodings that they are stored in; None before they are.
        self._kept: dict[tuple[int, Encoding], openvino.Output | None] = {}

    @classmethod
    def copy_of(cls, model: openvino.Model) -> OvNative:
        """A copy whose values can be rounded: parameters of ops need not be constants."""
        graph, binding = read(model.clone())
        _state_parameters(binding)
        return cls(graph, binding)

    def tensor(self, value: int) -> openvino.Output:
        """The port that gives the value."""
        return self.binding.values[value]

    def read_at(self, node: int, index: int) -> openvino.Output:
        """The port that input ``index`` of ``node`` reads."""
        source: openvino.Output = self.binding.entries[node][index].port.get_source_output()
        return source

    def give(self, value: int, uses: Iterable[Use], tensor: openvino.Output) -> None:
        """Let ``uses`` of a value read ``tensor``; where an output does, so do its names."""
        for use in uses:
            if use.node is not None:
                self.binding.entries[use.node][use.index].port.replace_source_output(tensor)
                continue
            for result in self._results[value]:
                before = result.input_value(0)
                result.input(0).replace_source_output(tensor)
                if before.get_node().get_type_name() != "Parameter" and before.get_names():
                    take_names(before, tensor)

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> openvino.Output:
        """The result of an op of OpenVINO's operation set."""
        from openvino import opset13

        made = getattr(opset13, kind)(*map(_as_input, inputs), **attributes)
        port: openvino.Output = made.output(0)
        return port

    def element(self, k: int, region: int) -> openvino.Output:
        """Element ``k`` of a part of the extra input."""
        number, place = divmod(k, _PART)
        if (number, region) not in self._parts:
            start = number * _PART
            ends = [start], [start + _PART], [1], [0]
            self._parts[number, region] = self.op("slice", self.switch_in(region), *ends)
        return self.op("gather", self._parts[number, region], place, 0)

    def compute(self, node: int, function: Computed) -> None:
        """Put an op in the node's place that calls the function."""
        from finecast.frontends.openvino.computed import ComputedOp

        old, (result,) = self.binding.nodes[node], self.graph.nodes[node].outputs
        assert old is not None
        assert result is not None
        shape = old.get_output_partial_shape(0)
        new = ComputedOp(old.input_values(), function, shape)
        replace_op(old, new)
        self.binding.nodes[node], self.binding.values[result] = new, new.output(0)

    def retyped(self, tensor: openvino.Output, was: Format, to: Format) -> openvino.Output:
        """The result of a Convert."""
        del was
        return _converted(tensor, to).output(0)

    def constant(self, array: NDArray[np.float32]) -> openvino.Output:
        """The port of a new constant."""
        return new_constant(np.asarray(array, dtype=np.float32), Format.FP32).output(0)

    def retype(self, node: int, to: Format) -> None:
        """State the format where OpenVINO does not infer it: Converts and bodies' inputs."""
        old, outputs = self.binding.nodes[node], self.graph.nodes[node].outputs
        if old is None:
            for index in outputs:
                assert index is not None
                self._declare(self.binding.values[index].get_node(), to)
        elif old.get_type_name() == "Convert":
            new = _converted(old.input_value(0), to)
            replace_op(old, new)
            self.binding.nodes[node] = new
            (entry,) = self.binding.entries[node]
            self.binding.entries[node] = (replace(entry, op=new),)
            assert outputs[0] is not None
            self.binding.values[outputs[0]] = new.output(0)

    def declare(self, value: int, to: Format) -> None:
        """Declare an input in another type; an output's type follows from its source."""
        if self.graph.values[value].is_input:
            self._declare(self.binding.values[value].get_node(), to)

    def _declare(self, op: Any, fmt: Format) -> None:
        """Declare ``op`` in ``fmt`` if it is a Parameter; other ops infer their types."""
        if op.get_type_name() == "Parameter":
            op.set_element_type(element_type(fmt))
            op.validate_and_infer_types()

    def cast(self, value: int, to: Format, *, exact: bool = False) -> openvino.Output:
        """The result of a Convert."""
        port = self.binding.values[value]
        name = _name_at(port, f"cast_{to.label}")
        if exact:
            port = self._rounded_first(port, name, self.first_rounded[value])
        return self._added(_converted(port, to), name)

    def _rounded_first(
        self, port: openvino.Output, cast: str, stored: StoredAs
    ) -> openvino.Output:
        """The numbers of ``port`` rounded to bf16, in fp32; ``exact_casts`` explains how."""
        made: list[tuple[str, openvino.Output]] = []

        def step(kind: str, label: str, *inputs: Any) -> openvino.Output:
            made.append((label, self.op(kind, *inputs)))
            return made[-1][1]

        rounded = rounded_by(step, port, stored)
        for label, result in made:
            self._added(result.get_node(), f"{cast}_{label}", Format.BF16.label)
        return rounded

    def share_constants(self, edits: Iterable[Edit]) -> None:
        """Note which constants are stored in what: one of them may be another transposed.

        A tied table, which a lookup reads as it is and a product transposed, is stored once.
        """
        stored = (e for e in edits if isinstance(e, ConvertConstant | RoundTrip))
        constants = (e for e in stored if self.graph.values[e.value].constant is not None)
        self._kept |= {(e.value, e.to): None for e in constants}

    def _shared(
        self, value: int, to: T, store: Callable[[int, T], openvino.Output]
    ) -> openvino.Output:
        """What ``store`` gives for a constant, or for the one that it transposes."""
        output = self._kept.get((value, to))
        if output is None:
            node = self.binding.values[value].get_node()
            source = self._transposed_from(value, to)
            if source in self._kept:
                read = self._shared(*source, store)
                name = f"{node.get_friendly_name()}_{to.label}"
                turned = self.op("transpose", read, node.input_value(1)).get_node()
                output = self._added(turned, name, to.label if isinstance(to, Scaled) else "")
            else:
                output = store(value, to)
            self._kept[value, to] = output
        return output

    def _transposed_from(self, value: int, to: T) -> tuple[int, T] | None:
        """The constant that ``value`` is the transpose of, with its encoding."""
        port = self.binding.values[value]
        node = port.get_node()
        if node.get_type_name() != "Transpose":
            return None
        source = self._ids.get(port_key(node.input_value(0)))
        order = node.input_value(1).get_node()
        if source is None or order.get_type_name() != "Constant":
            return None
        axes = order.get_data().reshape(-1).tolist()
        sizes = [*port.get_shape()]
        axes = axes or [*range(len(sizes))[::-1]]
        before = to.before(axes, sizes) if isinstance(to, Scaled) else to
        return None if before is None else (source, before)

    def stored(self, value: int, to: Format) -> openvino.Output:
        """The port of the new constant."""
        return self._shared(value, to, self._stored)

    def _stored(self, value: int, to: Format) -> openvino.Output:
        constant = self.binding.constants[value]
        new = new_constant(convert_constant(self.binding.numbers(value), to), to)
        return self._added(new, f"{constant.get_friendly_name()}_{to.label}")

    def _added(self, node: Any, name: str, rounds: str = "") -> openvino.Output:
        """The result of ``node``, which is noted as inserted and gets a name like ``name``."""
        fresh = self.fresh(name)
        node.set_friendly_name(fresh)
        self.inserted[fresh] = rounds
        port: openvino.Output = node.output(0)
        return port

    def round_trip(self, tensor: openvino.Output, to: Encoding) -> openvino.Output:
        """The result of a FakeQuantize, or of a Convert and one back."""
        if isinstance(to, Format):
            name = _name_at(tensor, f"cast_{to.label}")
            return self._widened(self._added(_converted(tensor, to), name))
        assert isinstance(to, Scaled)  # models of OpenVINO state no blocks
        name = _name_at(tensor, f"fq_{to.label}")
        return self._added(fake_quantized(tensor, to), name, to.label)

    def stored_and_read(self, value: int, to: Encoding) -> openvino.Output:
        """A constant in a low type, read as fp32, or as codes, and the ops that decode it."""
        if isinstance(to, Format):
            return self._widened(self.stored(value, to))
        assert isinstance(to, Scaled)
        return self._shared(value, to, self._decoded)

    def _decoded(self, value: int, to: Scaled) -> openvino.Output:
        constant = self.binding.constants[value]
        nodes = stored_codes(self.binding.numbers(value), to)
        back = nodes.pop("_back")
        base = f"{constant.get_friendly_name()}_{to.label}"
        for suffix, node in nodes.items():
            node.set_friendly_name(self.fresh(f"{base}{suffix}"))
        return self._added(back, f"{base}_back", to.label)

    def _widened(self, low: openvino.Output) -> openvino.Output:
        name = low.get_node().get_friendly_name()
        return self._added(_converted(low, Format.FP32), f"{name}_back")

    def adjust_attribute(self, node: int, what: Adjustment) -> None:
        """Give the op other numbers in an attribute."""
        op: Any = self.binding.nodes[node]
        known: Mapping[str, Any] = op.get_attributes()
        own = ("eps" if "eps" in known else what.attribute,)  # some ops call their epsilon so
        for name in SCALAR_NAMES[op.get_type_name()] if what.attribute == SCALARS else own:
            op.set_attribute(name, float(what.of(np.array(known[name], np.float32))))

    def adjust_constant(self, edit: AdjustOperand) -> None:
        """Give the constant other numbers; a compressed constant becomes fp32.

        Where other ops read it, too, the op gets a copy by another name.
        """
        what = edit.what
        assert edit.value is not None
        port = self.binding.entries[edit.node][what.port].port
        # It is one that this method made if the constant was adjusted along another axis, too.
        source = port.get_source_output()
        before = source.get_node()
        own = before.get_type_name() == "Constant"
        array = numbers_of(before) if own else self.binding.numbers(edit.value)
        array = array.astype(np.float32)
        name = before.get_friendly_name()
        if len(source.get_target_inputs()) > 1:
            name = self.fresh(f"{name}_scaled")
        else:
            before.set_friendly_name(self.fresh(f"{name}_before"))
        after = new_constant(what.of(array), Format.FP32)
        after.set_friendly_name(name)
        port.replace_source_output(after.output(0))

    def adjusted(
        self, tensor: openvino.Output, kind: str, by: NDArray[np.float32]
    ) -> openvino.Output:
        """The port of the new op, which is noted as inserted."""
        made = self.op(kind, tensor, self.constant(by))
        return self._added(made.get_node(), f"{tensor.get_node().get_friendly_name()}/scaled")

    def add_switch(self) -> openvino.Output:
        """The port of a new Parameter, whose length is stated at the end."""
        from openvino import Type, opset13

        self._switch = opset13.parameter([-1], Type.boolean, name=SWITCH)
        port: openvino.Output = self._switch.output(0)
        port.set_names({SWITCH})
        return port

    def region_of(self, tensor: openvino.Output) -> int:
        """The region of the op that gives the tensor of a value; 0 of a new op's."""
        return self._regions.get(port_key(tensor), 0)

    def parent_of(self, region: int) -> int:
        """The region that a body's op stands in."""
        body = self.binding.regions[region]
        return 0 if body is None else body.parent

    def hand_in(self, region: int, tensor: openvino.Output) -> Mapping[int, openvino.Output]:
        """A new input of the one body."""
        body = self.binding.regions[region]
        assert body is not None
        return {region: hand_in(body, tensor)}

    def hand_out(self, region: int, count: openvino.Output | None) -> openvino.Output:
        """A new output of the op and of its bodies."""
        body = self.binding.regions[region]
        assert body is not None
        return hand_out(body, count)

    def join(self, other: OvNative) -> None:
        """Let ops of ``other`` read this model's inputs, and drop its names of tensors."""
        model, joined = self.binding.model, other.binding.model
        if joined.get_sinks():
            raise ModelError("a model that keeps a state cannot be joined with another")
        own = {port_name(p.output(0)): p.output(0) for p in model.get_parameters()}
        pairs = zip(joined.get_parameters(), model.get_parameters(), strict=True)
        for taken, beside in pairs:
            given = own.get(port_name(taken.output(0)), beside.output(0))
            for target in list(taken.output(0).get_target_inputs()):
                target.replace_source_output(given)
        for op in joined.get_ordered_ops():
            if op.get_type_name() != "Parameter":
                for port in op.outputs():
                    port.set_names(set())

    def finish(
        self, switches: int = 0, outputs: Mapping[str, openvino.Output] | None = None
    ) -> openvino.Model:
        """The model itself, or a new one with these outputs."""
        import openvino

        model = self.binding.model
        if switches:
            self.switch_in(0)
            self._switch.set_partial_shape(openvino.PartialShape([switches]))
            model.add_parameters([self._switch])
        if outputs is not None:
            for name, port in outputs.items():
                port.set_names({name})
            make: Any = openvino.Model
            kept = model.get_sinks(), model.get_parameters()
            model = make([*outputs.values()], *kept, model.get_friendly_name())
        model.validate_nodes_and_infer_types()
        return model


def _as_input(given: Any) -> Any:
    """A number, or a list of integers, as a constant; ports as they are."""
    from openvino import opset13

    if isinstance(given, float):
        return opset13.constant(np.float32(given))
    return opset13.constant(np.array(given)) if isinstance(given, int | list) else given


def _name_at(port: openvino.Output, what: str) -> str:
    """A name for an op that does ``what`` behind ``port``."""
    node = port.get_node()
    index = f".{port.get_index()}" if node.get_output_size() > 1 else ""
    return f"{node.get_friendly_name()}{index}/{what}"


def _converted(port: openvino.Output, fmt: Format) -> openvino.Node:
    from openvino import opset13

    return opset13.convert(port, TYPES[fmt])


# Ops whose parameters OpenVINO takes from constants alone, stated by ops that take any. Where
# roundings are tried a parameter is no constant: an input of the model switches its rounding
# on and off. The same holds for parameters of ops that OpenVINO makes by fusion.

# What each input of an op is read by, and the op that gives its result.
_Stated = tuple[tuple[tuple[Any, int], ...], Any]


def _state_parameters(binding: OvBinding) -> None:
    """Replace such ops in place; in ``binding`` the new ones stand for them."""
    for number, op in enumerate(binding.nodes):
        if op is None or (state := _PARAMETERS.get(op.get_type_name())) is None:
            continue
        read_by, result = state(*op.input_values())
        key = port_key(op.output(0))
        binding.values = [
            result.output(0) if port_key(v) == key else v for v in binding.values
        ]
        replace_op(op, result)
        region = binding.entries[number][0].region
        binding.entries[number] = tuple(
            Entry(op=made, index=index, region=region) for made, index in read_by
        )
        binding.nodes[number] = result


def _hard_sigmoid(x: Any, alpha: Any, beta: Any) -> _Stated:
    """max(0, min(1, alpha * x + beta))."""
    from openvino import opset13

    scaled = opset13.multiply(x, alpha)
    moved = opset13.add(scaled, beta)
    return ((scaled, 0), (scaled, 1), (moved, 1)), opset13.clamp(moved, 0.0, 1.0)


def _selu(x: Any, alpha: Any, scale: Any) -> _Stated:
    """Scale * (x where x > 0, else alpha * (exp(x) - 1))."""
    from openvino import opset13

    elu = opset13.elu(x, 1.0)
    low = opset13.multiply(opset13.minimum(elu, opset13.constant(np.float32(0))), alpha)
    result = opset13.multiply(opset13.add(opset13.relu(elu), low), scale)
    return ((elu, 0), (low, 1), (result, 1)), result


def _sigmoid(x: Any) -> _Stated:
    """A Sigmoid whose result OpenVINO does not see, as Relu changes nothing above 0.

    OpenVINO fuses x * sigmoid(x * beta) to a Swish, and does not load that if beta is no
    constant and has a rank: Keras's Swish behind a convolution has a beta of shape
    [1, 1, 1, 1].
    """
    from openvino import opset13

    result = opset13.sigmoid(x)
    return ((result, 0),), opset13.relu(result)


_PARAMETERS: Final[dict[str, Callable[..., _Stated]]] = {
    "HardSigmoid": _hard_sigmoid,
    "Selu": _selu,
    "Sigmoid": _sigmoid,
}


# -------------------------------------------- how an ``ov.Model`` states encodings with scales
#
# A value goes through a FakeQuantize, which gives the numbers that its codes stand for. A
# constant is stored as codes, which ops after it decode. OpenVINO turns these forms, which
# NNCF writes too, into kernels on integers.


def fake_quantized(port: openvino.Output, encoding: Scaled) -> openvino.Node:
    """A FakeQuantize: each number of ``port`` becomes the one that its code stands for."""
    from openvino import opset13

    grid = encoding.grid
    low, high = (opset13.constant(np.float32(end.item())) for end in encoding.range)
    levels = grid.highest - grid.lowest + 1
    return opset13.fake_quantize(port, low, high, low, high, levels)


def stored_codes(array: NDArray[np.generic], encoding: Scaled) -> dict[str, openvino.Node]:
    """The ops that store ``array`` as codes and decode them, by suffixes for their names.

    ``_back`` is the last one: a Multiply, or with groups a Reshape behind it. OpenVINO
    recognises this form as compressed weights, which its kernels read as codes. A zero point
    is subtracted from each code; that of 0 is left out.
    """
    from openvino import opset13

    codes = _constant(encoding.encode(array).reshape(encoding.split(array.shape)))
    scales = encoding.spread(array.shape)
    low = encoding.format.result
    scale = new_constant(low.encode(scales), low)
    wide = steps = _converted(codes.output(0), low)
    stored: dict[str, openvino.Node] = {"": codes, "_scale": scale, "_wide": wide}
    if encoding.zero_point:
        zero = _constant(np.full(scales.shape, encoding.zero_point, encoding.dtype))
        zeros = _converted(zero.output(0), low)
        steps = opset13.subtract(wide, zeros)
        stored |= {"_zero": zero, "_zero_wide": zeros, "_steps": steps}
    decoded = opset13.multiply(steps, scale)
    if encoding.group is None:
        return stored | {"_back": decoded}
    shape = opset13.constant(np.array(array.shape, np.int64))
    whole = opset13.reshape(decoded, shape, special_zero=False)
    return stored | {"_decoded": decoded, "_shape": shape, "_back": whole}


def _constant(codes: NDArray[np.generic]) -> openvino.Node:
    """A constant of codes, which is copied; numpy has no type for 4 bits, ml_dtypes has."""
    import openvino
    from openvino import opset13

    if codes.dtype != ml_dtypes.int4:
        return opset13.constant(codes)
    tensor = openvino.Tensor(openvino.Type.i4, openvino.Shape(codes.shape))
    tensor.data.reshape(-1).view(np.uint8)[...] = packed(codes, 4)
    return openvino.op.Constant(tensor)
