"""Replays edits on an FX graph: casts, low copies of parameters, types of results.

Law: run on fake tensors, the edited graph gives the types that the plan states; inputs and
outputs of the module keep theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from finecast.errors import ModelError
from finecast.frontends.torch.aten import DTYPES, is_number, named_arguments, scalar_names
from finecast.frontends.torch.casts import simplify_casts
from finecast.frontends.torch.codes import (
    give_bf16,
    read_back,
    round_trip,
    state_by_axis,
    state_rows,
    stored_codes,
)
from finecast.frontends.torch.layout import free_of_strides
from finecast.frontends.torch.reader import (
    FxBinding,
    ValueSource,
    attribute,
    forget_unused,
    register,
    tensor_inputs,
)
from finecast.graph import Graph
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_scalar, overflow_limit
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)

# Makes a node that converts another's result to a type: one of the two functions below.
Converter = Callable[[torch.fx.Graph, FxNode, torch.dtype], FxNode]


def to_copy(graph: torch.fx.Graph, value: FxNode, dtype: torch.dtype) -> FxNode:
    """A conversion for eager PyTorch and export."""
    return graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})


def convert_element_type(graph: torch.fx.Graph, value: FxNode, dtype: torch.dtype) -> FxNode:
    """A conversion for Inductor, whose passes merge and fuse this op."""
    return graph.call_function(torch.ops.prims.convert_element_type.default, (value, dtype))


def apply_edits(
    graph: Graph,
    binding: FxBinding,
    edits: Sequence[Edit],
    *,
    convert: Converter = to_copy,
) -> None:
    """Make ``edits`` in ``binding.module``.

    Raises:
        ModelError: If an edit changes the type of an input or output, which FX modules do not
            declare, or rounds to a type that PyTorch does not compute in.
    """
    writer = _Writer(graph=graph, binding=binding, convert=convert)
    for edit in edits:
        writer.apply(edit)
    module = binding.module
    module.graph.eliminate_dead_code()
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


@dataclass(slots=True, kw_only=True)
class _Writer:
    graph: Graph
    binding: FxBinding
    convert: Converter
    # Names of low copies of constants, by tensor and not by path: tied weights stay one.
    low_names: dict[tuple[int, Format], str] = field(
        default_factory=dict[tuple[int, Format], str]
    )
    code_names: dict[tuple[int, Scaled], dict[str, str]] = field(
        default_factory=dict[tuple[int, Scaled], dict[str, str]]
    )

    def apply(self, edit: Edit) -> None:
        match edit:
            case SetFormat():
                self._set_format(edit.node, edit.to)
            case InsertCast():
                self._rewire(edit.value, edit.uses, self._cast(edit))
            case ConvertConstant():
                self._rewire(edit.value, edit.uses, self._constant(edit))
            case RoundTrip(to=Scaled() as to) if self._is_constant(edit.value):
                self._rewire(edit.value, edit.uses, self._coded(edit.value, to))
            case RoundTrip(to=Scaled() as to):
                self._round_trips(edit, to)
            case RoundTrip():
                raise ModelError(
                    f"{edit.to.label} is no type that PyTorch computes in",
                    where=self.graph.values[edit.value].name,
                    fix="use bf16 or fp16",
                )
            case SetPort():
                raise ModelError(
                    "a PyTorch module declares no types of inputs and outputs",
                    where=self.graph.values[edit.value].name,
                    fix="leave io out of the policy, or convert the tensors yourself",
                )

    def _set_format(self, node_id: int, fmt: Format) -> None:
        """Let an op compute in ``fmt``: change the type it names, and round its scalars."""
        node, own = self.binding.nodes[node_id], self.graph.nodes[node_id].format
        assert own is not None
        operands = scalar_names(node.target)

        def converted(name: str, arg: Any) -> Any:
            if arg is DTYPES[own]:
                return DTYPES[fmt]
            return convert_scalar(arg, fmt) if name in operands and is_number(arg) else arg

        names = list(named_arguments(node))
        node.args = tuple(converted(n, a) for n, a in zip(names, node.args, strict=False))
        node.kwargs = {name: converted(name, arg) for name, arg in node.kwargs.items()}
        for value in self.graph.following_outputs(self.graph.nodes[node_id]):
            self._set_type(self.binding.values[value.id], DTYPES[fmt])

    def _set_type(self, source: ValueSource, dtype: torch.dtype) -> None:
        """Give the fake result of ``source`` another type."""
        node, index = source.node, source.index
        val = node.meta["val"]
        if index is None:
            node.meta["val"] = val.to(dtype)
            return
        low = val[index].to(dtype)
        node.meta["val"] = type(val)((*val[:index], low, *val[index + 1 :]))
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == index:
                user.meta["val"] = low

    def _cast(self, edit: InsertCast) -> FxNode:
        """The new node that casts the value."""
        origin = origin_of(self.binding, edit.value)
        with self.binding.module.graph.inserting_after(_last_placeholder(origin)):
            cast = self.convert(self.binding.module.graph, origin, DTYPES[edit.to])
        _mark(cast, origin, self._fake(edit.value, edit.to))
        return cast

    def _is_constant(self, value_id: int) -> bool:
        return self.graph.values[value_id].constant is not None

    def _round_trips(self, edit: RoundTrip, to: Scaled) -> None:
        """Let the uses read what they read now, a value or a cast of it, through codes."""
        made: dict[FxNode, FxNode] = {}
        for use in edit.uses:
            assert use.node is not None  # outputs of modules are never codes
            node = self.binding.nodes[use.node]
            read = tensor_inputs(node)[use.index]
            if read not in made:
                made[read] = self._round_trip(read, self._fake(edit.value, Format.FP32), to)
            _replace(node, use.index, lambda n, read=read: n is read, made[read])

    def _round_trip(self, read: FxNode, fake: Any, to: Scaled) -> FxNode:
        with self.binding.module.graph.inserting_after(_last_placeholder(read)):
            # Each node is inserted right after ``read``, the second before the first: reorder.
            codes, back = round_trip(self.binding.module.graph, read, to)
            codes.append(back)
        _mark(codes, read, fake.to(getattr(torch, to.dtype.name)))
        _mark(back, read, fake)
        return back

    def _coded(self, value_id: int, to: Scaled) -> FxNode:
        """The node that decodes a constant, which is stored as codes."""
        source = self.binding.values[value_id].node
        module, fx = self.binding.module, self.binding.module.graph
        path = str(source.target)
        tensor = attribute(module, path)
        key = (id(tensor), to)
        if key not in self.code_names:
            known = f"{path}_{to.label}_{len(self.code_names)}"
            self.code_names[key] = {
                part: register(module, f"{known}_{part}", array)
                for part, array in stored_codes(tensor, to).items()
            }
        stored: dict[str, FxNode] = {}
        with fx.inserting_before(source.next):
            for part, name in self.code_names[key].items():
                stored[part] = fx.get_attr(name)
                _mark(stored[part], source, _faked(source, attribute(module, name)))
            back = read_back(fx, stored, to)
        _mark(back, source, self._fake(value_id, Format.FP32))
        return back

    def _constant(self, edit: ConvertConstant) -> FxNode:
        """The node that reads the low copy of a constant."""
        source = self.binding.values[edit.value].node
        module, fx = self.binding.module, self.binding.module.graph
        path = str(source.target)
        tensor = attribute(module, path)
        key = (id(tensor), edit.to)
        if key not in self.low_names:
            low_tensor = _converted(tensor, edit.to)
            self.low_names[key] = register(module, f"{path}_{edit.to.label}", low_tensor)
        with fx.inserting_after(source):
            low = fx.get_attr(self.low_names[key])
        _mark(low, source, self._fake(edit.value, edit.to))
        return low

    def _fake(self, value_id: int, fmt: Format) -> Any:
        """The value's fake result in ``fmt``."""
        source = self.binding.values[value_id]
        val = source.node.meta["val"]
        return (val if source.index is None else val[source.index]).to(DTYPES[fmt])

    def _rewire(self, value_id: int, uses: Sequence[Use], new: FxNode) -> None:
        """Let ``uses`` of a value read ``new``."""
        source = self.binding.values[value_id]
        for use in uses:
            if use.node is None:
                for end in self.binding.module.graph.find_nodes(op="output"):
                    _replace(end, None, lambda n: _is(n, source), new)
            else:
                node = self.binding.nodes[use.node]
                _replace(node, use.index, lambda n: _is(n, source), new)


def origin_of(binding: FxBinding, value_id: int) -> FxNode:
    """The FX node whose result is the value; for an element of a tuple its ``getitem``.

    Raises:
        ModelError: If no node takes the element.
    """
    source = binding.values[value_id]
    if source.index is None:
        return source.node
    for user in source.node.users:
        if user.target is operator.getitem and user.args[1] == source.index:
            return user
    raise ModelError(
        f"element {source.index} of a tuple is to be cast, and no getitem takes it",
        where=source.node.name,
    )


def replace_input(node: FxNode, port: int, new: FxNode) -> None:
    """Let ``node`` read ``new`` at ``port``, whatever it reads there now."""
    _replace(node, port, lambda _: True, new)


def _is(node: FxNode, source: ValueSource) -> bool:
    """Whether the node's result is the value from ``source``."""
    if source.index is None:
        return node is source.node
    return (
        node.target is operator.getitem
        and node.args[0] is source.node
        and bool(node.args[1] == source.index)
    )


def _replace(
    node: FxNode, port: int | None, matches: Callable[[FxNode], bool], new: FxNode
) -> None:
    """Replace the tensor that ``node`` reads at ``port`` by ``new``, if it matches.

    Where ``port`` is None all matching ones are replaced. Ports are as in ``tensor_inputs``.
    """
    seen = -1

    def swap(arg: FxNode) -> FxNode:
        nonlocal seen
        seen += 1
        return new if matches(arg) and port in (None, seen) and arg is not new else arg

    args, kwargs = map_arg((node.args, node.kwargs), swap)
    node.args, node.kwargs = args, kwargs


def _faked(beside: FxNode, tensor: torch.Tensor) -> Any:
    """A fake tensor like ``tensor``, in the fake mode of the node ``beside``."""
    return beside.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)


def _last_placeholder(node: FxNode) -> FxNode:
    """``node``, or the last placeholder if it is one: nothing stands between placeholders."""
    if node.op != "placeholder":
        return node
    return [n for n in node.graph.nodes if n.op == "placeholder"][-1]


def _mark(new: FxNode, origin: FxNode, val: Any) -> None:
    """Give ``new`` the metadata of ``origin`` and the fake result ``val``."""
    new.meta = {k: v for k, v in origin.meta.items() if k not in ("val", "tensor_meta")}
    new.meta["val"] = val


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
