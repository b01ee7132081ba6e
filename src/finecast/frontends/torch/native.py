"""A captured module as a ``NativeModel``: casts, low constants, codes, roundings.

Laws: run on fake tensors, a module with the edits of a plan gives the types that the plan
states; inputs and outputs of the module keep theirs. Copies that round are run node by node
(``Isolated``): no code is generated for them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from typing import Any, ClassVar, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from finecast.errors import ModelError
from finecast.frontends.native_model import OFFSET, SCALE, NativeModel, adjust, replay
from finecast.frontends.torch.aten import (
    DTYPES,
    EPSILON,
    argument_names,
    is_number,
    named_arguments,
    scalar_names,
)
from finecast.frontends.torch.capture import Captured, port_names, shared_copy
from finecast.frontends.torch.codes import (
    CODES,
    give_bf16,
    read_back,
    round_trip,
    rounded_rows,
    scaled_rows,
    state_by_axis,
    state_rows,
    stored_codes,
)
from finecast.frontends.torch.decoded import decode_products
from finecast.frontends.torch.reader import (
    FxBinding,
    ValueSource,
    as_array,
    attribute,
    forget_unused,
    read,
    register,
    tensor_inputs,
    value_ids,
)
from finecast.frontends.torch.restating import free_of_strides, simplify_casts
from finecast.frontends.torch.runnable import RunnableModule
from finecast.frontends.torch.scaled_products import state_products
from finecast.graph import SCALARS, Graph
from finecast.numbers import roundmodes
from finecast.numbers.encodings import Encoding, Scaled
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_scalar, overflow_limit
from finecast.numbers.roundmodes import Rounder, Rounding
from finecast.planning.adjustments import Adjustment, AdjustOperand, edits_by
from finecast.planning.edits import ConvertConstant, Edit, KernelRounding, RoundTrip, Use
from finecast.planning.points import SWITCH

# Makes a node that converts another's result to a type: one of the two functions below.
Converter = Callable[[torch.fx.Graph, FxNode, torch.dtype], FxNode]


def to_copy(graph: torch.fx.Graph, value: FxNode, dtype: torch.dtype) -> FxNode:
    """A conversion for eager PyTorch and export."""
    return graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})


def convert_element_type(graph: torch.fx.Graph, value: FxNode, dtype: torch.dtype) -> FxNode:
    """A conversion for Inductor, whose passes merge and fuse this op."""
    return graph.call_function(torch.ops.prims.convert_element_type.default, (value, dtype))


def adjusted(captured: Captured, adjustments: Sequence[Adjustment]) -> Captured:
    """A copy of a captured module with adjusted operands; it is read anew.

    Tensors are shared, but for constants that are adjusted. Its graph has the digest of the
    module's: plans are made for that.
    """
    if not adjustments:
        return captured
    model = TorchNative.of(captured)
    adjust(model, edits_by(adjustments, captured.graph))
    return _read_anew(captured, model.binding.module)


def decoded(captured: Captured) -> Captured:
    """A copy with each linear layer on codes as one of decoded numbers; itself without any."""
    module = TorchNative.of(captured).binding.module
    return _read_anew(captured, module) if decode_products(module) else captured


def _read_anew(captured: Captured, module: GraphModule) -> Captured:
    """``captured`` with its changed ``module``."""
    module.graph.eliminate_dead_code()
    forget_unused(module)
    module.graph.lint()
    module.recompile()
    ports = port_names(captured.program)
    graph, binding = read(module, inputs=ports["inputs"], outputs=ports["outputs"])
    return replace(
        captured,
        module=module,
        graph=replace(graph, digest=captured.graph.digest),
        binding=binding,
    )


def apply_edits(model: TorchNative, edits: Sequence[Edit]) -> None:
    """Make ``edits`` in the module of ``model``, and drop what they leave unused.

    Raises:
        ModelError: If an edit changes the type of an input or output, which FX modules do not
            declare, or rounds to a type that PyTorch does not compute in.
    """
    replay(model, edits)
    module = model.binding.module
    module.graph.eliminate_dead_code()
    if any(isinstance(edit, KernelRounding | RoundTrip) for edit in edits):
        state_products(module)
    if edits:
        simplify_casts(module)
        if any(isinstance(edit, RoundTrip) for edit in edits):
            give_bf16(module)
            state_by_axis(module)
            state_rows(module)
        free_of_strides(module)
    if any(isinstance(edit, ConvertConstant | RoundTrip) for edit in edits):
        forget_unused(module)
    module.graph.lint()
    module.recompile()


@final
class TorchNative(NativeModel):
    """A module that is changed in place; its tensors are FX nodes.

    Attributes:
        binding: What the ids of the graph stand for, in the module.
        for_gpu: Whether the module is for a GPU, though its tensors may be on a CPU here.
    """

    library: ClassVar[str] = "PyTorch"
    states: ClassVar[Collection[Format]] = (Format.BF16, Format.FP16, *CODES)
    emulates_all: ClassVar[bool] = True
    computes: ClassVar[bool] = True

    def __init__(
        self,
        graph: Graph,
        binding: FxBinding,
        *,
        program: ExportedProgram | None = None,
        convert: Converter = to_copy,
    ) -> None:
        super().__init__(graph)
        self.binding = binding
        self.for_gpu = False
        self._fx = binding.module.graph
        self._program = program
        self._convert = convert
        (self._end,) = self._fx.find_nodes(op="output")
        ids = value_ids(binding)
        self._outputs = [ids.get(node) for node in tensor_inputs(self._end)]
        # Names of what constants are stored as, by tensor and not by path: tied weights stay
        # one.
        self._stored: dict[tuple[int, Encoding | Adjustment], dict[str, str]] = {}
        self._further: dict[str, FxNode] = {}
        self._streams = 0
        self._unsorted = False  # whether nodes stand before what they read

    @classmethod
    def of(cls, captured: Captured) -> TorchNative:
        """A copy of a captured module, which shares the tensors that it does not write to."""
        binding = captured.binding.on(shared_copy(captured.module))
        return cls(captured.graph, binding, program=captured.program)

    def tensor(self, value: int) -> FxNode:
        """The node whose result is the value; for an element of a tuple its ``getitem``."""
        node, index = self.binding.values[value].node, self.binding.values[value].index
        if index is None:
            return node
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        with self._fx.inserting_after(node):
            element = self._fx.call_function(operator.getitem, (node, index))
        return _mark(element, node, node.meta["val"][index])

    def read_at(self, node: int, index: int) -> FxNode:
        """The node that input ``index`` of ``node`` reads after the changes so far."""
        return tensor_inputs(self.binding.nodes[node])[index]

    def give(self, value: int, uses: Iterable[Use], tensor: FxNode) -> None:
        """Have ``uses`` of the value read ``tensor`` instead."""
        for use in uses:
            if use.node is not None:
                _read_instead(self.binding.nodes[use.node], use.index, tensor)
                continue
            for place, shown in enumerate(self._outputs):
                if shown == value:
                    _read_instead(self._end, place, tensor)

    def retype(self, node: int, to: Format) -> None:
        """Let an op compute in ``to``: the type that it names, its numbers, its results."""
        native, own = self.binding.nodes[node], self.graph.nodes[node].format
        assert own is not None

        def converted(arg: Any, *, operand: bool) -> Any:
            if arg is DTYPES[own]:
                return DTYPES[to]
            return convert_scalar(arg, to) if operand and is_number(arg) else arg

        _change_arguments(native, converted)
        for value in self.graph.following_outputs(self.graph.nodes[node]):
            self._set_type(value.id, DTYPES[to])

    def _set_type(self, value: int, dtype: torch.dtype) -> None:
        """Give the fake result that is the value another type."""
        node, index = self.binding.values[value].node, self.binding.values[value].index
        val = node.meta["val"]
        if index is None:
            node.meta["val"] = val.to(dtype)
            return
        low = val[index].to(dtype)
        node.meta["val"] = type(val)((*val[:index], low, *val[index + 1 :]))
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == index:
                user.meta["val"] = low

    def declare(self, value: int, to: Format) -> None:
        """Refuse: the module declares no types."""
        del to
        raise ModelError(
            "a PyTorch module declares no types of inputs and outputs",
            where=self.graph.values[value].name,
            fix="leave io out of the policy, or convert the tensors yourself",
        )

    def cast(self, value: int, to: Format, *, exact: bool = False) -> FxNode:
        """The new node that casts the value."""
        del exact  # PyTorch rounds right
        origin = self.tensor(value)
        with self._after(origin):
            low = self._convert(self._fx, origin, DTYPES[to])
        return _mark(low, origin, origin.meta["val"].to(DTYPES[to]))

    def stored(self, value: int, to: Format) -> FxNode:
        """The node that reads the low copy of a constant."""
        (low,) = self._kept(value, to, lambda tensor: {"": _converted(tensor, to)}).values()
        low.meta["val"] = self.tensor(value).meta["val"].to(DTYPES[to])
        return low

    def stored_and_read(self, value: int, to: Encoding) -> FxNode:
        """The node that decodes a constant, which is stored as codes."""
        assert isinstance(to, Scaled)
        parts = self._kept(value, to, lambda tensor: stored_codes(tensor, to))
        source = self.tensor(value)
        with self._fx.inserting_before([*parts.values()][-1].next):
            back = read_back(self._fx, parts, to, for_gpu=self.for_gpu)
        return _mark(back, source, source.meta["val"].to(torch.float32))

    def _kept(
        self,
        value: int,
        to: Encoding,
        store: Callable[[torch.Tensor], Mapping[str, torch.Tensor]],
    ) -> dict[str, FxNode]:
        """Nodes that read what ``store`` makes of a constant, which is stored once."""
        source, module = self.tensor(value), self.binding.module
        path = str(source.target)
        tensor = attribute(module, path)
        key = (id(tensor), to)
        if key not in self._stored:
            number = sum(isinstance(other, Scaled) for _, other in self._stored)
            name = (
                f"{path}_{to.label}_{number}_"
                if isinstance(to, Scaled)
                else f"{path}_{to.label}"
            )
            parts = store(tensor).items()
            self._stored[key] = {p: register(module, f"{name}{p}", t) for p, t in parts}
        nodes: dict[str, FxNode] = {}
        with self._fx.inserting_before(source.next):
            for part, name in self._stored[key].items():
                held = attribute(module, name)
                fake = source.meta["val"].new_empty(held.shape, dtype=held.dtype)
                nodes[part] = _mark(self._fx.get_attr(name), source, fake)
        return nodes

    def round_trip(self, tensor: FxNode, to: Encoding) -> FxNode:
        """``tensor`` encoded with one scale, and decoded to fp32."""
        assert isinstance(to, Scaled)
        fake = tensor.meta["val"].to(torch.float32)
        with self._after(tensor):
            back = round_trip(self._fx, tensor, to)
        return _mark(back, tensor, fake)

    def round_as_read(self, edit: KernelRounding) -> None:
        """Have linear layers read codes of rows, and multiply their results by the scales.

        The bias is added behind that. So a result is the value of another node.
        """
        codes_and_scales: dict[FxNode, tuple[FxNode, FxNode]] = {}
        for use in edit.uses:
            assert use.node is not None
            read, product = self.read_at(use.node, use.index), self.binding.nodes[use.node]
            if read not in codes_and_scales:
                with self._after(read):
                    codes_and_scales[read] = rounded_rows(
                        self._fx, read, edit.to, for_gpu=self.for_gpu
                    )
            _read_instead(product, use.index, codes_and_scales[read][0])
            (value,) = self.graph.following_outputs(self.graph.nodes[use.node])
            result = scaled_rows(product, codes_and_scales[read][1])
            self.binding.values[value.id] = ValueSource(node=result)

    # Adjusted operands.

    def adjust_attribute(self, node: int, what: Adjustment) -> None:
        """Give the op another epsilon, or other numbers as operands."""
        native, (power,) = self.binding.nodes[node], what.exponents
        if what.attribute == SCALARS:

            def multiplied(arg: Any, *, operand: bool) -> Any:
                return math.ldexp(arg, power) if operand and is_number(arg) else arg

            _change_arguments(native, multiplied)
            return
        number = self.graph.nodes[node].attributes[what.attribute]
        assert isinstance(number, int | float)
        _set_argument(native, EPSILON, math.ldexp(number, power))

    def adjust_constant(self, edit: AdjustOperand) -> None:
        """Have the node read a copy of the constant; equal copies of a tensor are one."""
        node, what = self.binding.nodes[edit.node], edit.what
        source, module = self.read_at(edit.node, what.port), self.binding.module
        tensor = attribute(module, str(source.target))
        key = id(tensor), replace(what, node="", port=0)
        if key not in self._stored:
            array = what.of(as_array(tensor).astype(np.float32, copy=False))
            new_tensor = torch.from_numpy(np.asarray(array)).to(tensor.device)
            if isinstance(tensor, torch.nn.Parameter):
                new_tensor = torch.nn.Parameter(new_tensor, requires_grad=tensor.requires_grad)
            self._stored[key] = {"": register(module, f"{source.target}_scaled", new_tensor)}
        with self._fx.inserting_before(source.next):
            copy = self._fx.get_attr(self._stored[key][""])
        _read_instead(node, what.port, _mark(copy, source, source.meta["val"]))

    def adjusted(self, tensor: FxNode, kind: str, by: NDArray[np.float32]) -> FxNode:
        """The new node, whose other operand is one number."""
        aten = torch.ops.aten
        op = {"multiply": aten.mul.Tensor, "add": aten.add.Tensor}[kind]
        with self._after(tensor):
            node = self._fx.create_node(
                "call_function", op, (tensor, float(by)), name=f"{SCALE}_{tensor.name}"
            )
        return _mark(node, tensor, tensor.meta["val"])

    # Copies that round, and are run without the metadata of nodes.

    def constant(self, array: NDArray[np.float32]) -> FxNode:
        """A new node that reads a constant of these numbers."""
        module = self.binding.module
        held = next(iter((*module.parameters(), *module.buffers())), None)
        tensor = torch.from_numpy(np.array(array))
        tensor = tensor if held is None else tensor.to(held.device)
        name = register(module, "finecast_constant", tensor)
        with self._after():
            return self._fx.get_attr(name)

    def rounded(self, tensor: FxNode, how: Rounder) -> FxNode:
        """``tensor`` rounded, in fp32; at random by draws that belong to samples."""
        options: dict[str, Any] = {"how": how}
        if how.rounding is Rounding.STOCHASTIC:
            self._streams += 1
            options |= {"stream": self._streams, "first": self._input(OFFSET)}
        return self.call(_rounded, (tensor,), options)

    def round_numbers(self, node: int, how: Rounder) -> None:
        """Round operands of a node that are numbers of its own."""

        def converted(arg: Any, *, operand: bool) -> Any:
            if not operand or not is_number(arg):
                return arg
            exact = np.float32(arg)
            number = float(roundmodes.convert(np.asarray(exact), how))
            return arg if number == float(exact) else number

        _change_arguments(self.binding.nodes[node], converted)

    def op(self, kind: str, *inputs: Any, **attributes: Any) -> FxNode:
        """The result of a function of PyTorch's."""
        options = {_ATTRIBUTES[name]: setting for name, setting in attributes.items()}
        return self.call(_FUNCTIONS[kind], inputs, options)

    def switched(self, k: int, on: FxNode, off: FxNode) -> FxNode:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        options = {"switch": self.switch_in(0), "element": k}
        if on.target is _rounded and on.args == (off,):
            # Rounded only where it is switched on: a run has most of the switches off.
            return self.call(_rounded, (off,), {**on.kwargs, **options})
        return self.call(_selected, (on, off), options)

    def compute(self, node: int, function: Callable[..., Any]) -> None:
        """Have the node call ``function`` with the arrays of its tensors."""
        native = self.binding.nodes[node]
        native.args, native.kwargs = tuple(tensor_inputs(native)), {}
        native.target = partial(_computed, function)

    def retyped(self, tensor: FxNode, was: Format, to: Format) -> FxNode:
        """The node that casts a tensor."""
        del was
        with self._after(tensor):
            return to_copy(self._fx, tensor, DTYPES[to])

    def join(self, other: TorchNative) -> None:
        """Copy the nodes of ``other``, and share its tensors."""
        module, theirs = self.binding.module, other.binding.module
        copied: dict[FxNode, FxNode] = {}
        placeholders = iter(self._fx.find_nodes(op="placeholder"))
        for node in theirs.graph.nodes:
            if node.op == "placeholder":
                copied[node] = next(placeholders)
            elif node.op == "get_attr":
                held: Any = attribute(theirs, str(node.target))
                if not isinstance(held, torch.Tensor):
                    raise ModelError(
                        "the program has control flow, and cannot be joined with another",
                        where=node.name,
                        fix="export the module without torch.cond, while_loop and the like",
                    )
                with self._after():
                    copied[node] = self._fx.get_attr(register(module, "joined", held))
            elif node.op != "output":
                with self._fx.inserting_before(self._end):
                    copied[node] = self._fx.node_copy(node, copied.__getitem__)
        other.binding = FxBinding(
            module=module,
            nodes=[copied[node] for node in other.binding.nodes],
            values=[replace(s, node=copied[s.node]) for s in other.binding.values],
        )
        other._fx = self._fx
        self._unsorted = True

    def add_switch(self) -> FxNode:
        """The new input ``SWITCH``, after all others."""
        return self._input(SWITCH)

    def finish(
        self, switches: int = 0, outputs: Mapping[str, FxNode] | None = None
    ) -> RunnableModule:
        """The changed module."""
        del switches  # PyTorch's graphs do not state the size of an input
        assert self._program is not None
        if outputs is not None:
            self._end.args = (tuple(outputs.values()),)
        return RunnableModule(
            module=self.changed(),
            program=self._program,
            outputs=None if outputs is None else tuple(outputs),
            further=tuple(self._further),
            is_copy=True,
        )

    def changed(self) -> GraphModule:
        """The changed module, whose ops stand in an order in which they can run."""
        if self._unsorted:
            sort_nodes(self._fx)
        self._fx.eliminate_dead_code()
        return self.binding.module

    def _input(self, name: str) -> FxNode:
        """A further input of the module, after all others; made once."""
        if name not in self._further:
            with self._after():
                self._further[name] = self._fx.placeholder(name)
        return self._further[name]

    def call(
        self, function: Callable[..., Any], inputs: Sequence[Any], options: dict[str, Any]
    ) -> FxNode:
        """The result of a function of tensors, of which some may be among the options."""
        read = [x for x in (*inputs, *options.values()) if isinstance(x, FxNode)]
        with self._after(*read):
            return self._fx.call_function(function, tuple(inputs), options)

    def _after(self, *nodes: FxNode) -> Any:
        """A block whose new nodes stand after the last of ``nodes`` and of the inputs."""
        last = max((*nodes, *self._fx.find_nodes(op="placeholder")), default=None)
        if last is None:
            return self._fx.inserting_before(next(iter(self._fx.nodes)))
        # Before the next one: of several that are inserted after a node the last stands first.
        return self._fx.inserting_before(last.next)


def _rounded(
    x: torch.Tensor,
    *,
    how: Rounder,
    stream: int = 0,
    first: torch.Tensor | None = None,
    switch: torch.Tensor | None = None,
    element: int = 0,
) -> torch.Tensor:
    """``x`` rounded, if there is no ``switch`` or its ``element`` is on.

    The first row is sample number ``first`` of the numbers that ``stream`` draws.
    """
    if switch is not None and not switch[element]:
        return x
    rows = x.shape[0] if x.dim() else 1
    offset = 0 if first is None else int(first) * (x.numel() // max(rows, 1))
    return rounded_to(x, how, offset=offset, stream=stream)


def _selected(
    on: torch.Tensor, off: torch.Tensor, *, switch: torch.Tensor, element: int
) -> torch.Tensor:
    """The first tensor if an element of a switch is on, else the second."""
    return on if switch[element] else off


def _computed(
    function: Callable[..., NDArray[np.float32]], *tensors: torch.Tensor
) -> torch.Tensor:
    """What a function of arrays gives, as a tensor."""
    numbers = function(*(tensor.detach().cpu().numpy() for tensor in tensors))
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(tensors[0].device)


# The ops that emulated devices need: ``engines/emulator/session.py`` has the infinities of
# transposes of them. Roundings are PyTorch's own casts, and numpy's.
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": torch.add,
    "clamp": torch.clamp,
    "is_inf": torch.isinf,
    "multiply": torch.mul,
    "reduce_sum": torch.sum,
    "select": torch.where,
}
_ATTRIBUTES: Final = {"min_value": "min", "max_value": "max", "keep_dims": "keepdim"}

# Types whose conversions round to nearest even and overflow to infinity. Torch's fp8 types are
# not those of accelerators, and whether they saturate depends on the processor.
_CASTS: Final = (Format.BF16, Format.FP16)


def rounded_to(
    x: torch.Tensor, how: Rounder, *, offset: int = 0, stream: int = 0
) -> torch.Tensor:
    """Convert an fp32 tensor; the results are fp32, in the same shape.

    Law: that is ``roundmodes.convert``, bit for bit; by torch where its conversions are exact.
    """
    plain = how.rounding is Rounding.NEAREST_EVEN and not how.saturate and how.encoding is None
    if plain and how.format in (*_CASTS, Format.TF32, Format.FP32):
        out = _nearest(x, how.format)
        return _flushed(out, how.format) if how.flush_subnormals else out
    array = x.detach().cpu().numpy()
    numbers = np.asarray(roundmodes.convert(array, how, offset=offset, stream=stream))
    return torch.from_numpy(numbers.reshape(array.shape)).to(x.device)


def _nearest(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt is Format.FP32:
        return x
    if fmt in _CASTS:
        return x.to(DTYPES[fmt]).to(x.dtype)
    drop = Format.FP32.mantissa_bits - fmt.mantissa_bits
    bits = x.view(torch.int32)
    odd = (bits >> drop) & 1
    rounded = (bits + (1 << (drop - 1)) - 1 + odd) & -(1 << drop)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def _flushed(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    zero = torch.copysign(torch.zeros_like(x), x)
    return torch.where(x.abs() < fmt.smallest_normal, zero, x)


def _change_arguments(node: FxNode, change: Callable[..., Any]) -> None:
    """Replace each argument by ``change(argument, operand=...)``.

    ``operand`` is whether a number would be an operand there, and no setting.
    """
    operands, names = scalar_names(node.target), list(named_arguments(node))
    positional = zip(names, node.args, strict=False)
    node.args = tuple(change(arg, operand=name in operands) for name, arg in positional)
    node.kwargs = {n: change(arg, operand=n in operands) for n, arg in node.kwargs.items()}


def _set_argument(node: FxNode, name: str, given: Any) -> None:
    """Give the node an argument, which may not have been stated before."""
    place = argument_names(node).index(name)
    if place < len(node.args):
        node.args = (*node.args[:place], given, *node.args[place + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: given}


def _read_instead(node: FxNode, port: int, new: FxNode) -> None:
    """Let ``node`` read ``new`` at ``port``, which is counted as in ``tensor_inputs``."""
    seen = -1

    def swap(arg: FxNode) -> FxNode:
        nonlocal seen
        seen += 1
        return new if seen == port else arg

    args, kwargs = map_arg((node.args, node.kwargs), swap)
    node.args, node.kwargs = args, kwargs


def sort_nodes(graph: torch.fx.Graph) -> None:
    """Put each node after those that it reads; nodes that may stay in their order do."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    waits = {node: len({*node.all_input_nodes}) for node in place}
    ready = [(place[node], node) for node, count in waits.items() if not count]
    last: FxNode | None = None
    while ready:
        _, node = heappop(ready)
        if last is not None:
            last.append(node)
        last = node
        for user in node.users:
            waits[user] -= 1
            if not waits[user]:
                heappush(ready, (place[user], user))


def _mark(new: FxNode, origin: FxNode, val: Any) -> FxNode:
    """``new`` with the metadata of ``origin`` and the fake result ``val``."""
    new.meta = {k: v for k, v in origin.meta.items() if k not in ("val", "tensor_meta")}
    new.meta["val"] = val
    return new


def _converted(constant: torch.Tensor, fmt: Format) -> torch.Tensor:
    """``rounding.convert_constant`` on the tensor's device; a parameter if ``constant`` is."""
    tensor = constant.detach()
    low = tensor.to(DTYPES[fmt])
    magnitude = tensor.abs()
    barely_over = (magnitude > fmt.max) & (magnitude < overflow_limit(fmt))
    low = torch.where(barely_over, tensor.sign().to(low.dtype) * fmt.max, low)
    if isinstance(constant, torch.nn.Parameter):
        return torch.nn.Parameter(low, requires_grad=constant.requires_grad)
    return low
