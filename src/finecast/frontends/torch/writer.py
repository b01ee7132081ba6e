"""Replays edits on an FX graph: casts, low copies of parameters, types of results.

Law: after ``apply_edits`` the types that a fake run of the graph gives are those that the
plan states; outputs and inputs of the module keep theirs.
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
    state_places,
    state_rows,
    stored_codes,
)
from finecast.frontends.torch.layout import free_of_strides
from finecast.frontends.torch.reader import FxBinding, ValueSource, attribute, forget_unused
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.rounding import convert_scalar, overflow_limit
from finecast.numbers.scaled import Scaled
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)

# Makes the node that converts its argument: ``aten._to_copy`` or the prims' op.
Converter = Callable[[torch.fx.Graph, FxNode, torch.dtype], FxNode]


def to_copy(graph: torch.fx.Graph, value: FxNode, dtype: torch.dtype) -> FxNode:
    """A conversion as eager PyTorch and export know it."""
    return graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": dtype})


def convert_element_type(graph: torch.fx.Graph, value: FxNode, dtype: torch.dtype) -> FxNode:
    """A conversion as Inductor's passes know it: they merge and fuse it."""
    return graph.call_function(torch.ops.prims.convert_element_type.default, (value, dtype))


def apply_edits(
    graph: Graph,
    binding: FxBinding,
    edits: Sequence[Edit],
    *,
    convert: Converter = to_copy,
) -> None:
    """Change ``binding.module`` as ``edits`` say.

    Raises:
        ModelError: If an edit changes a port's type, which FX modules do not declare.
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
            state_places(module)
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
    low_paths: dict[tuple[int, Format], str] = field(
        default_factory=dict[tuple[int, Format], str]
    )
    coded: dict[tuple[int, Scaled], str] = field(default_factory=dict[tuple[int, Scaled], str])

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
        """The type of the result that an op names, and its scalars, are those of ``fmt``."""
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
        origin = self._origin(edit.value)
        with self.binding.module.graph.inserting_after(_last_placeholder(origin)):
            cast = self.convert(self.binding.module.graph, origin, DTYPES[edit.to])
        _mark(cast, origin, self._fake(edit.value, edit.to))
        return cast

    def _origin(self, value_id: int) -> FxNode:
        """The FX node that is the value itself; its ``getitem`` where it is in a tuple."""
        source = self.binding.values[value_id]
        if source.index is None:
            return source.node
        for user in source.node.users:
            if user.target is operator.getitem and user.args[1] == source.index:
                return user
        raise ModelError("a tuple's element is used but never taken", where=source.node.name)

    def _is_constant(self, value_id: int) -> bool:
        return self.graph.values[value_id].constant is not None

    def _round_trips(self, edit: RoundTrip, to: Scaled) -> None:
        """The value as it is read back from its codes, or each cast of it that is read."""
        made: dict[FxNode, FxNode] = {}
        for use in edit.uses:
            assert use.node is not None  # outputs of modules are never codes
            node = self.binding.nodes[use.node]
            read = _arguments(node)[use.index]
            if read not in made:
                made[read] = self._round_trip(read, self._fake(edit.value, Format.FP32), to)
            _replace(node, use.index, lambda n, read=read: n is read, made[read])

    def _round_trip(self, read: FxNode, fake: Any, to: Scaled) -> FxNode:
        with self.binding.module.graph.inserting_after(_last_placeholder(read)):
            # Made in order: what is inserted after one node comes before what was.
            codes, back = round_trip(self.binding.module.graph, read, to)
            codes.append(back)
        _mark(codes, read, fake.to(getattr(torch, to.dtype.name)))
        _mark(back, read, fake)
        return back

    def _coded(self, value_id: int, to: Scaled) -> FxNode:
        """The constant as it is read back from stored codes."""
        source = self.binding.values[value_id].node
        module, fx = self.binding.module, self.binding.module.graph
        path = str(source.target)
        tensor = attribute(module, path)
        key = (id(tensor), to)
        known = self.coded.setdefault(key, f"{path}_{to.label}_{len(self.coded)}")
        stored: dict[str, FxNode] = {}
        with fx.inserting_before(source.next):
            for part, array in stored_codes(tensor, to).items():
                name = f"{known}_{part}".replace(".", "_")
                if not hasattr(module, name):
                    module.register_buffer(name, array)
                stored[part] = fx.get_attr(name)
                _mark(stored[part], source, _faked(source, array))
            back = read_back(fx, stored, to)
        _mark(back, source, self._fake(value_id, Format.FP32))
        return back

    def _constant(self, edit: ConvertConstant) -> FxNode:
        source = self.binding.values[edit.value]
        module, fx = self.binding.module, self.binding.module.graph
        path = str(source.node.target)
        tensor = attribute(module, path)
        # By the tensor, not by its path: tied weights stay one.
        low_path = self.low_paths.setdefault(
            (id(tensor), edit.to), f"{path}_{edit.to.label}".replace(".", "_")
        )
        if not hasattr(module, low_path):
            _register(module, low_path, tensor, edit.to)
        with fx.inserting_after(source.node):
            low = fx.get_attr(low_path)
        _mark(low, source.node, self._fake(edit.value, edit.to))
        return low

    def _fake(self, value_id: int, fmt: Format) -> Any:
        source = self.binding.values[value_id]
        val = source.node.meta["val"]
        return (val if source.index is None else val[source.index]).to(DTYPES[fmt])

    def _rewire(self, value_id: int, uses: Sequence[Use], new: FxNode) -> None:
        source = self.binding.values[value_id]
        for use in uses:
            if use.node is None:
                for end in self.binding.module.graph.find_nodes(op="output"):
                    _replace(end, None, lambda n: _is(n, source), new)
            else:
                node = self.binding.nodes[use.node]
                _replace(node, use.index, lambda n: _is(n, source), new)


def _is(node: FxNode, source: ValueSource) -> bool:
    if source.index is None:
        return node is source.node
    return (
        node.target is operator.getitem
        and node.args[0] is source.node
        and bool(node.args[1] == source.index)
    )


def _arguments(node: FxNode) -> list[FxNode]:
    """The nodes that ``node`` reads, one for each port."""
    found: list[FxNode] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def _replace(
    node: FxNode, port: int | None, matches: Callable[[FxNode], bool], new: FxNode
) -> None:
    """Put ``new`` in the argument number ``port`` of ``node``, or in all that match."""
    seen = -1

    def swap(arg: FxNode) -> FxNode:
        nonlocal seen
        seen += 1
        return new if matches(arg) and port in (None, seen) and arg is not new else arg

    args, kwargs = map_arg((node.args, node.kwargs), swap)
    node.args, node.kwargs = args, kwargs


def _faked(beside: FxNode, tensor: torch.Tensor) -> Any:
    """``tensor`` as a fake one, as those of the node ``beside`` are."""
    return beside.meta["val"].new_empty(tensor.shape, dtype=tensor.dtype)


def _last_placeholder(node: FxNode) -> FxNode:
    """``node``, or the last placeholder where it is one: they stay at the graph's top."""
    if node.op != "placeholder":
        return node
    return [n for n in node.graph.nodes if n.op == "placeholder"][-1]


def _mark(new: FxNode, origin: FxNode, val: Any) -> None:
    new.meta = {k: v for k, v in origin.meta.items() if k not in ("val", "tensor_meta")}
    new.meta["val"] = val


def _register(module: torch.nn.Module, name: str, tensor: torch.Tensor, fmt: Format) -> None:
    low = _converted(tensor.detach(), fmt)
    if isinstance(tensor, torch.nn.Parameter):
        low_parameter = torch.nn.Parameter(low, requires_grad=tensor.requires_grad)
        module.register_parameter(name, low_parameter)
    else:
        module.register_buffer(name, low)


def _converted(tensor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """As ``rounding.convert_constant``, on the tensor's device."""
    low = tensor.to(DTYPES[fmt])
    magnitude = tensor.abs()
    barely = (magnitude > fmt.max) & (magnitude < overflow_limit(fmt))
    return torch.where(barely, tensor.sign().to(low.dtype) * fmt.max, low)
