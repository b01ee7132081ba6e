"""Reads an FX graph of ATen ops, and its regions, into the neutral graph."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch._ops import OpOverload
from torch.amp.autocast_mode import (  # torch has no public names for these
    _enter_autocast,  # pyright: ignore[reportPrivateUsage]
    _exit_autocast,  # pyright: ignore[reportPrivateUsage]
)
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta
from torch.utils._pytree import tree_leaves

from finecast import ops
from finecast.frontends.native_model import SCALE
from finecast.frontends.torch.aten import (
    ADMITTED,
    CONVERSIONS,
    EPSILON,
    FIXED,
    WRITERS,
    epsilon,
    is_layout,
    is_number,
    named_arguments,
    native_name,
    port_names,
    scalar_names,
    type_label,
)
from finecast.graph import SCALARS, STATED, Attribute, ConstantStats, Dim, Graph, Node, Value
from finecast.graph.builder import GraphBuilder, source_line
from finecast.numbers.formats import Format

_FLOATS: Final = frozenset({"fp32", "bf16", "fp16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSource:
    """Where a value comes from: an FX node, or one element of its tuple."""

    node: FxNode
    index: int | None = None


@dataclass(slots=True, kw_only=True)
class FxBinding:
    """Which FX objects the ids of a Graph stand for.

    Attributes:
        module: The module that was read.
        nodes: FX nodes by node id.
        values: Sources by value id.
    """

    module: GraphModule
    nodes: list[FxNode] = field(default_factory=list[FxNode])
    values: list[ValueSource] = field(default_factory=list[ValueSource])

    def on(self, copy: GraphModule) -> FxBinding:
        """What the ids stand for in a copy of the module, whose nodes have the same names."""
        copies = {node.name: node for node in copy.graph.nodes}
        return FxBinding(
            module=copy,
            nodes=[copies[node.name] for node in self.nodes],
            values=[ValueSource(node=copies[s.node.name], index=s.index) for s in self.values],
        )


def read(
    module: GraphModule,
    *,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    weights: bytes = b"",
) -> tuple[Graph, FxBinding]:
    """Build the neutral graph of ``module``; every FX node needs ``meta["val"]``.

    What the module takes and gives is called by ``inputs`` and ``outputs``, if they are given;
    all other values by their FX nodes. The graph's digest is of its ops and of ``weights``, a
    digest of the numbers that the module came with.

    Law: every tensor is a Value, every call of an ATen op a Node. The module's attributes are
    constants, unless the graph writes to them; a plan converts constants ahead of time.
    (Parameters that are trained are inputs of a training graph, and no attributes.)
    """
    reader = _Reader(module)
    for node in module.graph.nodes:
        reader.visit(node)
    return reader.finish(inputs, outputs, weights), reader.binding


def value_ids(binding: FxBinding) -> dict[FxNode, int]:
    """Value ids by FX node; those of a tuple's elements by their ``getitem`` nodes."""
    ids = {(s.node, s.index): number for number, s in enumerate(binding.values)}
    ids_by_node = {node: number for (node, index), number in ids.items() if index is None}
    for node in binding.module.graph.find_nodes(op="call_function", target=operator.getitem):
        key = cast("tuple[FxNode, int]", node.args)
        if key in ids:
            ids_by_node[node] = ids[key]
    return ids_by_node


def hinted_shapes(binding: FxBinding) -> dict[int, tuple[int, ...]]:
    """Shapes by value id; symbolic dimensions have their sizes in the example inputs."""
    return {i: tuple(hint(d) for d in shape) for i, shape in _shapes(binding)}


def decided_by_data(binding: FxBinding) -> set[int]:
    """The values, by id, whose sizes follow from numbers: those of an expert's tokens."""
    return {
        i
        for i, shape in _shapes(binding)
        if any(not isinstance(d, int) and d.node.hint is None for d in shape)
    }


def _shapes(binding: FxBinding) -> Iterator[tuple[int, Sequence[int | torch.SymInt]]]:
    for number, source in enumerate(binding.values):
        val = source.node.meta["val"]
        tensor = val if source.index is None else val[source.index]
        yield number, tensor.shape


def hint(extent: int | torch.SymInt) -> int:
    """A size; of a symbolic one that in the example inputs, or 1 where that is not known."""
    if isinstance(extent, int):
        return extent
    known = extent.node.hint
    return int(known) if known is not None else 1


def device_kind(module: GraphModule) -> str:
    """The kind of device that a graph computes on, such as ``cuda``.

    It is ``cpu`` if all tensors are there: a graph for another device may have some there,
    such as numbers.
    """
    fakes = (node.meta.get("val") for node in module.graph.nodes)
    kinds = (f.device.type for f in fakes if isinstance(f, torch.Tensor))
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


def tensor_inputs(node: FxNode) -> tuple[FxNode, ...]:
    """The FX nodes that ``node`` reads, one for each port: in order, with repetitions."""
    sources: list[FxNode] = []
    map_arg((node.args, node.kwargs), lambda n: sources.append(n))
    return tuple(sources)


_NO_MODULE: Final = "_empty_nn_module_stack_from_metadata_hook"


def module_path(node: FxNode) -> str:
    """The dotted path of the module that the call was written in; empty where unknown."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    # PyTorch adds such an entry to what it computes of sizes.
    paths = [str(path) for path, _ in stack.values() if path != _NO_MODULE]
    return _clean(paths[-1]) if paths else ""


def _clean(path: str) -> str:
    """Dynamo writes ``L['self']._modules['l']._modules['0']``; the user wrote ``l.0``."""
    if "[" not in path:
        return path
    for junk in ("L['self'].", "L['self']", "_modules", "['", "']"):
        path = path.replace(junk, "." if junk == "']" else "")
    return ".".join(part for part in path.split(".") if part)


class _Reader:
    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self.binding = FxBinding(module=module)
        self.builder: GraphBuilder[tuple[FxNode, int | None]] = GraphBuilder()
        self.constants: dict[int, torch.Tensor] = {}
        self.inputs: set[int] = set()
        self.outputs: set[int] = set()
        self.written = written(module)

    def visit(self, node: FxNode) -> None:
        match node.op:
            case "placeholder":
                self._add(node, self.inputs)
            case "get_attr":
                self._add(node, set())
                tensor = attribute(self.module, str(node.target))
                if node not in self.written:
                    self.constants.update(dict.fromkeys(self._all(node), tensor))
            case "output":
                for source in tensor_inputs(node):
                    self.outputs.update(self._all(source))
            case _:
                self._call(node)

    def _add(self, node: FxNode, into: set[int]) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor):
            into.add(self._value(node, None))

    def _value(self, node: FxNode, index: int | None) -> int:
        value_id = self.builder.value((node, index))
        if value_id == len(self.binding.values):
            self.binding.values.append(ValueSource(node=node, index=index))
        return value_id

    def _all(self, node: FxNode) -> list[int]:
        """Ids of the tensors that ``node`` stands for: one, or each of its tuple."""
        keys: list[tuple[FxNode, int | None]] = [(node, None)]
        if node.target is operator.getitem:
            keys = [cast("tuple[FxNode, int]", node.args)]
        elif isinstance(node.meta.get("val"), tuple | list):
            keys = [(node, index) for index in range(len(node.meta["val"]))]
        ids = (self.builder.known(key) for key in keys)
        return [index for index in ids if index is not None]

    def _call(self, node: FxNode) -> None:
        if node.target is operator.getitem:
            return
        # The core knows all conversions by one name.
        native = native_name(node)
        native = "aten::_to_copy" if native in CONVERSIONS else native
        inputs = tuple(self._one(n) for n in tensor_inputs(node))
        outputs = tuple(self._outputs(node))
        info = ops.lookup(native)
        fmt = self._format(node, inputs, outputs)
        fixed, kept_out = FIXED.get(native, ((), ()))
        kept_in = (
            [k for k, name in enumerate(port_names(node)) if name in fixed] if fixed else []
        )
        self.binding.nodes.append(node)
        self.builder.add(
            Node(
                id=len(self.builder.nodes),
                name=_name(node),
                op=info.name,
                native=native,
                inputs=inputs,
                outputs=outputs,
                follows_in=self._follow(inputs, kept_in, fmt),
                follows_out=self._follow(outputs, kept_out, fmt),
                format=fmt,
                admits=self._admitted(fmt, inputs, kept_in),
                attributes=dict(_attributes(node)),
                scope=module_path(node),
                source=source_line(node.stack_trace or ""),
            )
        )

    def _one(self, node: FxNode) -> int | None:
        ids = self._all(node)
        return ids[0] if len(ids) == 1 else None

    def _outputs(self, node: FxNode) -> Iterator[int | None]:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            yield self._value(node, None)
        elif isinstance(val, tuple | list):
            for index, tensor in enumerate(val):
                yield self._value(node, index) if isinstance(tensor, torch.Tensor) else None

    def _format(
        self, node: FxNode, inputs: tuple[int | None, ...], outputs: tuple[int | None, ...]
    ) -> Format | None:
        native = native_name(node)
        if native in CONVERSIONS or native in WRITERS or node.name.startswith(SCALE):
            return None
        labels = {self._label(i) for i in (*inputs, *outputs) if i is not None}
        floats = labels & _FLOATS
        if not floats or "fp64" in labels or any(map(is_layout, labels)):
            return None
        read = {self._label(i) for i in inputs if i is not None}
        if not read & floats and not _names_type(node):
            return None  # it makes floats of integers, always in the default type
        for index in (*outputs, *inputs):
            if index is not None and self._label(index) in floats:
                return Format.parse(self._label(index))
        return None

    def _admitted(
        self, fmt: Format | None, ids: tuple[int | None, ...], kept: Collection[int]
    ) -> frozenset[Format]:
        """The formats that an op of the format ``fmt`` admits.

        ATen computes inputs that differ in the wider format, or fp16 and bf16 in fp32. The op
        then admits its own format, and that of its other inputs if they all have one.
        """
        if fmt is None:
            return frozenset()
        labels = {self._label(i) for k, i in enumerate(ids) if i is not None and k not in kept}
        others = (labels & _FLOATS) - {fmt.label}
        if not others:
            return ADMITTED
        return frozenset({fmt, *(Format.parse(o) for o in others if len(others) == 1)})

    def _follow(
        self, ids: tuple[int | None, ...], kept: Collection[int], fmt: Format | None
    ) -> tuple[bool, ...]:
        return tuple(
            fmt is not None and i is not None and k not in kept and self._label(i) == fmt.label
            for k, i in enumerate(ids)
        )

    def _label(self, value_id: int) -> str:
        return type_label(self._tensor(value_id))

    def _tensor(self, value_id: int) -> torch.Tensor:
        source = self.binding.values[value_id]
        val = source.node.meta["val"]
        tensor: torch.Tensor = val if source.index is None else val[source.index]
        return tensor

    def finish(self, inputs: Sequence[str], outputs: Sequence[str], weights: bytes) -> Graph:
        values: list[Value] = []
        names = self._port_names(inputs, outputs)
        for number, source in enumerate(self.binding.values):
            tensor = self._tensor(number)
            suffix = "" if source.index is None else f".{source.index}"
            values.append(
                Value(
                    id=number,
                    name=names.get(number, f"{source.node.name}{suffix}"),
                    dtype=self._label(number),
                    shape=tuple(_dim(d) for d in tensor.shape),
                    producer=self.builder.producer(number),
                    uses=self.builder.uses(number),
                    constant=_stats(self.constants.get(number)),
                    is_input=number in self.inputs,
                    is_output=number in self.outputs,
                )
            )
        return self.builder.finish(values, self._digest(weights))

    def _port_names(self, inputs: Sequence[str], outputs: Sequence[str]) -> dict[int, str]:
        """Names by value id of the inputs, and of the outputs that are computed."""
        graph = self.module.graph
        (end,) = graph.find_nodes(op="output")
        taken, output_nodes = graph.find_nodes(op="placeholder"), tree_leaves(end.args[0])
        names_by_value: dict[int, str] = {}
        for nodes, names in ((output_nodes, outputs), (taken, inputs)):
            if len(nodes) == len(names):
                pairs = zip(nodes, names, strict=True)
                names_by_value |= {i: n for node, n in pairs for i in self._port(node)}
        return names_by_value

    def _port(self, node: object) -> list[int]:
        """The id of the one tensor that is an input, or an output that is computed."""
        ids = self._all(node) if isinstance(node, FxNode) else []
        is_port = len(ids) == 1 and (
            ids[0] in self.inputs or self.builder.producer(ids[0]) is not None
        )
        return ids if is_port else []

    def _digest(self, weights: bytes) -> str:
        text = hashlib.sha256(weights)
        for node, fx in zip(self.builder.nodes, self.binding.nodes, strict=True):
            text.update(f"{node.name} {node.native} {node.inputs} {fx.args!r}\n".encode())
        for source in self.binding.values:
            text.update(f"{source.node.name} {source.node.target}\n".encode())
        return text.hexdigest()[:16]


def register(module: torch.nn.Module, path: str, tensor: torch.Tensor) -> str:
    """Add a parameter or buffer to ``module`` itself; returns its name, made of ``path``."""
    name = path.replace(".", "_")
    while hasattr(module, name):
        name += "_"
    if isinstance(tensor, torch.nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)
    return name


def attribute(module: torch.nn.Module, path: str) -> torch.Tensor:
    """The parameter, buffer or constant at a dotted ``path``."""
    *parents, last = path.split(".")
    for part in parents:
        module = getattr(module, part)
    tensor: torch.Tensor = getattr(module, last)
    return tensor


def forget_unused(module: GraphModule) -> None:
    """Remove parameters and buffers that the graph no longer reads."""
    used = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    names = [name for name, _ in (*parameters, *buffers)]
    for path in set(names) - used:
        *parents, last = path.split(".")
        owner: torch.nn.Module = module
        for part in parents:
            owner = getattr(owner, part)
        delattr(owner, last)


def written(module: GraphModule) -> set[FxNode]:
    """Inputs and attributes that the graph writes to, such as running statistics."""
    return {
        source
        for node in module.graph.nodes
        if node.op == "call_function" and native_name(node).endswith("_")
        for source in tensor_inputs(node)[:1]
        if source.op in ("get_attr", "placeholder")
    }


def _names_type(node: FxNode) -> bool:
    """Whether an argument states the type of the result."""
    return any(isinstance(a, torch.dtype) for a in (*node.args, *node.kwargs.values()))


def _name(node: FxNode) -> str:
    path = module_path(node)
    return f"{path}/{node.name}" if path else node.name


def _dim(extent: int | torch.SymInt) -> Dim:
    return extent if isinstance(extent, int) else str(extent)


def _stats(tensor: torch.Tensor | None) -> ConstantStats | None:
    if tensor is None or is_layout(type_label(tensor)):
        return None
    return ConstantStats(size=tensor.numel(), read=partial(as_array, tensor))


def as_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    """The tensor's numbers; those of all float types as fp32."""
    plain = tensor.detach().cpu()
    widened = plain.float() if plain.is_floating_point() else plain
    array: NDArray[np.generic] = widened.numpy()
    return array


def tensors_digest(held: Mapping[str, object]) -> bytes:
    """Identifies names, types, shapes and numbers of all tensors among what is held."""
    state = hashlib.blake2b(digest_size=16)
    tensors = {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu()
        dense = plain if plain.layout is torch.strided else plain.to_dense()
        state.update(f"{name}:{plain.dtype}:{tuple(plain.shape)};".encode())
        state.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.digest()


def _attributes(node: FxNode) -> Iterator[tuple[str, Attribute]]:
    """Arguments that are plain numbers or strings, by their name in the op's schema."""
    if states_fp32(node):
        yield STATED, 1
    if not isinstance(node.target, OpOverload):
        return
    operands = scalar_names(node.target)
    scalars: list[float] = []
    if (number := epsilon(node)) is not None:
        yield "epsilon", number
    for name, value in named_arguments(node).items():
        if isinstance(value, int | float | str) and name != EPSILON:
            yield name, value
        elif isinstance(value, list | tuple) and all(isinstance(v, int) for v in value):
            yield name, cast("tuple[int, ...]", tuple(value))
        if name in operands and is_number(value):
            scalars.append(value)
    if scalars:
        yield SCALARS, tuple(scalars)


# ----------------------------------- regions under ``torch.autocast``, and those run as one op
#
# Law: their ops have the scopes of the modules that they were written in, and those for which
# the module turns autocast off say so: ``states_fp32``.

_AUTOCAST: Final = torch.ops.higher_order.wrap_with_autocast
_REGIONS: Final = (_AUTOCAST, torch.ops.higher_order.wrap_with_set_grad_enabled)
_ENABLED: Final = 2
"""Index of the argument that turns autocast on or off."""
_KEPT: Final = "custom"
"""The key of what torch hands on from a node to those that are traced of it."""
_MARK: Final = "finecast_fp32"


def states_fp32(node: FxNode) -> bool:
    """Whether the op was written where the module turns autocast off."""
    return bool((node.meta.get(_KEPT) or {}).get(_MARK))


@contextmanager
def told_apart(module: GraphModule) -> Generator[None]:
    """Inside, tracing ``module`` gives ops of its regions their own metadata, and marks them.

    Torch calls the body of a region, and every op in it would have the metadata of that call.
    """
    with ExitStack() as stack:
        for body in _off(module):
            stack.enter_context(_marked(body))
        for body in _bodies(module):
            stack.enter_context(_interpreted(body))
        yield


def _off(module: GraphModule, *, off: bool = False) -> Iterator[GraphModule]:
    """The bodies in which autocast is off; ``off`` says how it is around the module."""
    for node in module.graph.nodes:
        inside = not node.args[_ENABLED] if node.target is _AUTOCAST else off
        for body in _called(module, node):
            if inside:
                yield body
            yield from _off(body, off=inside)


def _bodies(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies of all regions of a module; those within others, too."""
    for node in module.graph.nodes:
        for body in _called(module, node):
            if node.target in _REGIONS:
                yield body
            yield from _bodies(body)


def _called(module: GraphModule, node: FxNode) -> Iterator[GraphModule]:
    """The graphs among what ``node`` is called with."""
    for arg in node.all_input_nodes:
        if arg.op == "get_attr" and "." not in str(arg.target):
            body = getattr(module, str(arg.target), None)
            if isinstance(body, GraphModule):
                yield body


@contextmanager
def _interpreted(body: GraphModule) -> Generator[None]:
    """Inside, a call of ``body`` runs node by node, each with its metadata."""

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return Interpreter(body).run(*args)

    body.forward = run
    try:
        yield
    finally:
        del body.__dict__["forward"]


@contextmanager
def _marked(body: GraphModule) -> Generator[None]:
    """Inside, the ops of ``body`` are marked; the graph may be the user's own."""
    before = [(node, node.meta.get(_KEPT)) for node in body.graph.nodes]
    for node, _ in before:
        _mark(node)
    try:
        yield
    finally:
        for node, was in before:
            node.meta[_KEPT] = was
            if was is None:
                del node.meta[_KEPT]


def _mark(node: FxNode) -> None:
    node.meta[_KEPT] = {**(node.meta.get(_KEPT) or {}), _MARK: True}


def mark_regions(module: GraphModule, *, off: bool = False) -> None:
    """Mark ops where autocast is off in a graph as Dynamo captures it, and in its bodies.

    ``off`` says how it is around the graph.
    """
    states = [off]
    for node in module.graph.nodes:
        if node.target is _enter_autocast:
            states.append(not node.args[_ENABLED])
        elif node.target is _exit_autocast:
            states.pop()
        else:
            if states[-1]:
                _mark(node)
            for body in _called(module, node):
                mark_regions(body, off=states[-1])
