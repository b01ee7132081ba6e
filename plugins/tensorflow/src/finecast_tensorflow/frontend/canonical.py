"""The canonical form of a model, which is planned: calls inlined and constants folded.

Laws: outputs are the same numbers; the canonical form of a canonical model is itself, but for
names. Each op with bodies has functions that no other op uses, and nodes in them are named
relative to the op. Constants that bodies read and never change, such as weights, are inside of
them, but for large ones that are read elsewhere, too; no argument is passed in that no body
reads. What is computed from constants alone is a constant, and there are no identities: so
what a plan converts is what ops read, and a weight that went through a reshape is rounded
once, from its original numbers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from os.path import commonpath
from typing import Any, Final

from finecast_tensorflow.frontend.functions import (
    CALLS,
    LOOPS,
    STATELESS,
    as_function,
    bodies,
    called_by,
    flattened,
    fresh,
    has_effects,
    is_stateful,
    library_of,
    needed,
    redirect,
    result_types,
    set_bodies,
    tensor_of,
)
from finecast_tensorflow.frontend.library import GraphDef, NodeDef, Operation, Tensor, tf
from finecast_tensorflow.frontend.model import (
    PLACEHOLDERS,
    FrozenModel,
    base_name,
    imported_graph,
    reachable,
    with_nodes,
)

_SHARED_BYTES: Final = 1 << 16
"""A larger constant that is read in several places is not copied into bodies."""
_RUN_IN_GRAPH: Final = "_lower_using_switch_merge"
"""The attribute by which ops in bodies are run like those outside, and not in function calls.
TensorFlow sets it when models are built, and freezing removes it."""


def canonical(model: FrozenModel, path: str = "", scope: str = "") -> FrozenModel:
    """The canonical form of ``model``.

    Args:
        model: A model, or a body as a graph.
        path: The prefix of the names of functions in it.
        scope: The prefix of its nodes' names before they were shortened.

    Raises:
        ModelError: If the graph is not valid.
    """
    model = folded(inlined(model))
    library = library_of(model.graph)
    if not any(bodies(node) for node in model.graph.node):
        return model
    graph = tf.compat.v1.GraphDef()
    graph.node.extend(model.graph.node)
    nodes = {node.name: node for node in graph.node}
    opened = [_Op(node, library, path, scope) for node in graph.node if bodies(node)]
    outputs = [port.tensor for port in model.outputs]
    shared = _shared(nodes, opened)
    for op in opened:
        op.sink(nodes, shared)
        moved = op.drop_unread()
        redirect(graph.node, moved)
        outputs = [moved.get(tensor, tensor) for tensor in outputs]
    ends = [base_name(t) for t in (*outputs, *(p.tensor for p in model.inputs))]
    kept = reachable(nodes, ends)
    own = [f for op in opened if op.node.name in kept for f in op.functions()]
    left = [node for node in graph.node if node.name in kept]
    every = library | {f.signature.name: f for f in own}
    result = with_nodes(model.graph, left, needed(left, every))
    ports = zip(model.outputs, outputs, strict=True)
    return replace(
        model, graph=result, outputs=tuple(replace(port, tensor=t) for port, t in ports)
    )


class _Op:
    """An op with bodies, which are graphs here while their arguments change."""

    def __init__(
        self, node: NodeDef, library: Mapping[str, Any], path: str, scope: str
    ) -> None:
        self.node = node
        self.loop = node.op in LOOPS
        self.path = f"{path}{node.name}/"
        self.scope = f"{scope}{node.name}/"
        flat = {r: flattened(library[name], library) for r, name in bodies(node).items()}
        self.bodies = {r: self._canonical(r, _renamed(b, self.scope)) for r, b in flat.items()}

    def _canonical(self, role: str, body: FrozenModel) -> FrozenModel:
        return canonical(body, f"{self.path}{role}/", self.scope)

    @property
    def given(self) -> list[str]:
        """The inputs that are arguments of the bodies: all but the condition of branches."""
        data = [name for name in self.node.input if not name.startswith("^")]
        return data if self.loop else data[1:]

    @property
    def unchanged(self) -> list[int]:
        """Indices of the arguments that bodies never change; those of branches are all."""
        if not self.loop:
            return list(range(len(self.given)))
        body = self.bodies["body"]
        pairs = enumerate(zip(body.inputs, body.outputs, strict=True))
        return [k for k, (before, after) in pairs if before.tensor == after.tensor]

    def readers(self, index: int) -> list[str]:
        """The bodies that read argument ``index``, by role."""
        return [role for role in self.bodies if self._reads(role, index)]

    def _reads(self, role: str, index: int) -> bool:
        """Whether a body does more with argument ``index`` than pass it to the next step."""
        body = self.bodies[role]
        argument = body.inputs[index].tensor
        handed_on = index if self._is_next(role) else None
        if any(p.tensor == argument for k, p in enumerate(body.outputs) if k != handed_on):
            return True
        name = base_name(argument)
        return any(base_name(read) == name for n in body.graph.node for read in n.input)

    def _is_next(self, role: str) -> bool:
        """Whether the body's results are its arguments in the next iteration."""
        return self.loop and role == "body"

    def sink(self, nodes: Mapping[str, NodeDef], shared: Collection[str]) -> None:
        """Copy constants that are arguments into the bodies, but for those in ``shared``."""
        sunk: dict[int, NodeDef] = {}
        for index in self.unchanged:
            source = nodes[base_name(self.given[index])]
            if source.op == "Const" and not source.input and source.name not in shared:
                sunk[index] = source
        for role, body in self.bodies.items():
            here = {k: c for k, c in sunk.items() if self._reads(role, k)}
            if here:
                same = self.unchanged if self._is_next(role) else ()
                constant = _with_constants(body, here, self.scope, kept=same)
                self.bodies[role] = self._canonical(role, constant)

    def drop_unread(self) -> dict[str, str]:
        """Drop arguments that no body reads; returns the new tensors of the op's outputs.

        Readers of a loop's output that the loop never changes read its input in its place.
        """
        name, arguments, same = self.node.name, self.given, set(self.unchanged)
        unread = {k for k in same if not self.readers(k)}
        kept = [k for k in range(len(arguments)) if k not in unread]
        first = [] if self.loop else [self.node.input[0]]
        waits = [i for i in self.node.input if i.startswith("^")]
        self.node.input[:] = [*first, *(arguments[k] for k in kept), *waits]
        types = self.node.attr["T" if self.loop else "Tin"].list
        types.type[:] = [types.type[k] for k in kept]
        for role, body in self.bodies.items():
            self.bodies[role] = _with_ports(body, kept, ends=self._is_next(role))
        if not self.loop:
            return {}
        shapes = self.node.attr["output_shapes"].list
        if shapes.shape:
            left = [shapes.shape[k] for k in kept]
            del shapes.shape[:]
            shapes.shape.extend(left)
        moved = {f"{name}:{k}": f"{name}:{index}" for index, k in enumerate(kept)}
        return moved | {f"{name}:{k}": tensor_of(arguments[k]) for k in same}

    def functions(self) -> Iterator[Any]:
        """The bodies as functions that only this op uses, and those that they call."""
        names = {role: f"{self.path}{role}" for role in self.bodies}
        set_bodies(self.node, names)
        for key in [key for key in self.node.attr if key.startswith("_")]:
            del self.node.attr[key]
        self.node.attr[_RUN_IN_GRAPH].b = True
        for role, body in self.bodies.items():
            library = library_of(body.graph)
            yield from library.values()
            tensors = [port.tensor for port in body.outputs]
            yield as_function(
                names[role],
                body.graph.node,
                [base_name(port.tensor) for port in body.inputs],
                list(zip(tensors, result_types(self.node, role), strict=True)),
                library,
            )


def _shared(nodes: Mapping[str, NodeDef], opened: Sequence[_Op]) -> set[str]:
    """Names of the large constants that are read in several places."""
    within = {op.node.name for op in opened}
    places = Counter(
        name
        for node in nodes.values()
        if node.name not in within
        for name in {base_name(read) for read in node.input}
    )
    for op in opened:
        for index in op.unchanged:
            places[base_name(op.given[index])] += len(op.readers(index))
    return {
        name
        for name, count in places.items()
        if count > 1 and nodes[name].ByteSize() > _SHARED_BYTES
    }


def _renamed(body: FrozenModel, scope: str) -> FrozenModel:
    """``body`` with arguments called by their numbers, and nodes without the op's prefix."""
    arguments = {base_name(p.tensor): k for k, p in enumerate(body.inputs)}
    names: dict[str, str] = {}
    taken: set[str] = set()
    for node in body.graph.node:
        index = arguments.get(node.name)
        short = _shortened(node.name, scope) if index is None else f"input_{index}"
        names[node.name] = fresh(short, taken)
        taken.add(names[node.name])
    return _with_names(body, names)


def _with_names(model: FrozenModel, names: Mapping[str, str]) -> FrozenModel:
    """``model`` with other names of its nodes, which are changed in place."""

    def moved(read: str) -> str:
        return read.replace(base_name(read), names[base_name(read)], 1)

    for node in model.graph.node:
        node.name = names[node.name]
        node.input[:] = list(map(moved, node.input))
    inputs, outputs = (
        tuple(replace(p, tensor=moved(p.tensor)) for p in ports)
        for ports in (model.inputs, model.outputs)
    )
    return replace(model, inputs=inputs, outputs=outputs)


def _shortened(name: str, scope: str) -> str:
    """A node's name without the prefix ``scope``; else without the scope around that.

    For the scope ``a/while/`` both ``a/while/kernel`` and ``a/kernel`` become ``kernel``.
    """
    around = scope[: scope.rstrip("/").rfind("/") + 1]
    return name.removeprefix(scope if name.startswith(scope) else around)


def _with_constants(
    body: FrozenModel, constants: Mapping[int, NodeDef], scope: str, *, kept: Collection[int]
) -> FrozenModel:
    """``body`` with constants in place of arguments, by index, but not in results ``kept``."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(body.graph)
    taken = {node.name for node in graph.node}
    moved: dict[str, str] = {}
    for index, constant in constants.items():
        copy = graph.node.add()
        copy.CopyFrom(constant)
        copy.name = fresh(_shortened(constant.name, scope), taken)
        taken.add(copy.name)
        moved[body.inputs[index].tensor] = f"{copy.name}:0"
    redirect(graph.node, moved)
    outputs = tuple(
        p if k in kept else replace(p, tensor=moved.get(p.tensor, p.tensor))
        for k, p in enumerate(body.outputs)
    )
    return replace(body, graph=graph, outputs=outputs)


def _with_ports(body: FrozenModel, kept: Sequence[int], *, ends: bool) -> FrozenModel:
    """``body`` with only the arguments ``kept``, and if ``ends`` only those results."""
    dropped = {base_name(p.tensor) for k, p in enumerate(body.inputs) if k not in kept}
    left = [n for n in body.graph.node if n.name not in dropped]
    graph = with_nodes(body.graph, left, body.graph.library.function)
    outputs = tuple(body.outputs[k] for k in kept) if ends else body.outputs
    return replace(
        body, graph=graph, inputs=tuple(body.inputs[k] for k in kept), outputs=outputs
    )


# Inlines calls of functions.
#
# Law: the graph computes the same. A function that is marked to be compiled by XLA then runs
# op by op.


def inlined(model: FrozenModel) -> FrozenModel:
    """``model`` without calls; control-flow ops whose bodies only compute become stateless."""
    library = library_of(model.graph)
    graph = tf.compat.v1.GraphDef()
    graph.versions.CopyFrom(model.graph.versions)
    moved: dict[str, str] = {}
    for node in model.graph.node:
        if node.op in CALLS:
            body = inlined(flattened(library[node.attr["f"].func.name], library))
            moved |= _insert(graph, node, body)
            continue
        copy = graph.node.add()
        copy.CopyFrom(node)
        if node.op in STATELESS and not any(
            has_effects(library[name], library) for name in called_by(node)
        ):
            copy.op = STATELESS[node.op]
    redirect(graph.node, moved)
    graph.library.function.extend(needed(graph.node, library))
    outputs = tuple(replace(p, tensor=moved.get(p.tensor, p.tensor)) for p in model.outputs)
    return replace(model, graph=graph, outputs=outputs)


def _insert(graph: GraphDef, call: NodeDef, body: FrozenModel) -> dict[str, str]:
    """Add the nodes of ``body`` under the call's name; returns the tensors of its results.

    Nodes that wait for the call now wait for a NoOp of its name, which waits for its results.
    """
    data = [name for name in call.input if not name.startswith("^")]
    before = [name for name in call.input if name.startswith("^")]
    arguments = dict(zip((base_name(p.tensor) for p in body.inputs), data, strict=True))
    for node in body.graph.node:
        copy = graph.node.add()
        copy.CopyFrom(node)
        copy.name = f"{call.name}/{node.name}"
        copy.input[:] = list(_under(call.name, node.input))
        if node.name in arguments:
            kind = node.attr["dtype"].type
            copy.Clear()
            copy.name, copy.op = f"{call.name}/{node.name}", "Identity"
            copy.attr["T"].type = kind
            copy.input.append(arguments[node.name])
        elif is_stateful(node):
            copy.input.extend(before)
    ends = [f"{call.name}/{port.tensor}" for port in body.outputs]
    done = graph.node.add(name=call.name, op="NoOp")
    done.input.extend(dict.fromkeys(f"^{base_name(end)}" for end in ends))
    done.input.extend(before)
    return {f"{call.name}:{index}": end for index, end in enumerate(ends)}


def _under(scope: str, names: Sequence[str]) -> Iterator[str]:
    """Inputs of nodes, with ``scope`` before the names in them."""
    for name in names:
        mark = "^" if name.startswith("^") else ""
        yield f"{mark}{scope}/{name.removeprefix('^')}"


_LARGEST_BYTES: Final = 10 << 20
"""A result that is larger than this, and than what it is computed from, is not folded; it is
the limit of Grappler's own constant folding."""
_CALLS: Final = re.compile(r"^((Stateful)?PartitionedCall/|Func/)+")
_PASSES_ON: Final = frozenset(
    {"Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot"}
)


def folded(model: FrozenModel) -> FrozenModel:
    """``model`` without identities, ops on constants alone, and nodes that nothing reads.

    Raises:
        ModelError: If the graph is not valid.
    """
    return _with_short_names(_Folder(imported_graph(model.graph), model).finish())


def _with_short_names(model: FrozenModel) -> FrozenModel:
    """``model`` with the names of inlined calls left out of its nodes' names, where it can be.

    Saving a model wraps it in one more call; so its ops keep their names all the same.
    """
    inputs = {base_name(port.tensor) for port in model.inputs}
    ops = [n.name for n in model.graph.node if n.op != "Const" and n.name not in inputs]
    calls = [name.removesuffix(_CALLS.sub("", name)) for name in ops]
    around = f"{commonpath(calls)}/" if calls else ""
    short = {node.name: _CALLS.sub("", node.name) for node in model.graph.node}
    count = Counter(short.values())
    names: dict[str, str] = {}
    taken: set[str] = set()
    for name, shortest in short.items():
        wanted = shortest if count[shortest] == 1 else name.removeprefix(around)
        names[name] = fresh(wanted, taken)
        taken.add(names[name])
    return _with_names(model, names)


class _Folder:
    def __init__(self, graph: Any, model: FrozenModel) -> None:
        self.graph = graph
        self.model = model
        self.operations: list[Operation] = graph.get_operations()
        self.fed = {p.tensor for p in model.inputs}
        self.constant = self._constants()
        self.effects = self._with_effects()
        self.values = self._evaluated()
        self.made = {_folded_name(tensor): tensor for tensor in self.values}

    def _constants(self) -> set[str]:
        """Names of the ops whose results can be computed before the model runs."""
        constants: set[str] = set()
        for op in self.operations:
            if op.control_inputs:
                continue  # its results must wait for another op
            if op.type == "Const" or (op.inputs and self._foldable(op, constants)):
                constants.add(op.name)
        return constants

    def _foldable(self, op: Operation, known: set[str]) -> bool:
        if _is_stateful(op) or op.type in PLACEHOLDERS:
            return False
        if any(t.op.name not in known for t in op.inputs):
            return False
        if any(t.dtype in (tf.string, tf.resource, tf.variant) for t in op.outputs):
            return False
        output_bytes = sum(_bytes(t) for t in op.outputs)
        input_bytes = sum(_bytes(t) for t in op.inputs)
        return output_bytes < math.inf and output_bytes <= max(_LARGEST_BYTES, input_bytes)

    def _with_effects(self) -> set[str]:
        """Names of the ops that may do more than compute, as an assertion, or wait for one."""
        op_names: set[str] = set()
        for op in self.operations:
            before = (*op.control_inputs, *(t.op for t in op.inputs))
            if _is_stateful(op) or any(b.name in op_names for b in before):
                op_names.add(op.name)
        return op_names

    def _evaluated(self) -> dict[str, Any]:
        """Arrays of the folded tensors that other ops or the outputs read, by name."""
        ends = {self._source(p.tensor) for p in self.model.outputs}
        read = {
            t.name
            for op in self.operations
            if op.name not in self.constant
            for t in map(self._through, op.inputs)
        }
        wanted = [
            name
            for name in sorted(read | ends)
            if (op := self.graph.get_tensor_by_name(name).op).type != "Const"
            and op.name in self.constant
        ]
        if not wanted:
            return {}
        with tf.compat.v1.Session(graph=self.graph) as session:
            return dict(zip(wanted, session.run(wanted), strict=True))

    def _source(self, name: str) -> str:
        source: str = self._through(self.graph.get_tensor_by_name(name)).name
        return source

    def _through(self, tensor: Tensor) -> Tensor:
        """The tensor that ``tensor`` is a copy of, through identities."""
        while tensor.op.type in _PASSES_ON and tensor.name not in self.fed:
            if any(c.name in self.effects for c in tensor.op.control_inputs):
                break
            tensor = tensor.op.inputs[tensor.value_index]
        return tensor

    def finish(self) -> FrozenModel:
        nodes: dict[str, NodeDef] = {}
        outputs = tuple(
            replace(p, tensor=self._canonical(self._source(p.tensor)))
            for p in self.model.outputs
        )
        waiting = [base_name(p.tensor) for p in (*outputs, *self.model.inputs)]
        while waiting:
            name = waiting.pop()
            if name in nodes:
                continue
            nodes[name] = self._node(name)
            waiting += [base_name(i) for i in nodes[name].input]
        order = [n for op in self.operations for n in self._names(op) if n in nodes]
        graph = self.model.graph
        result = with_nodes(graph, [nodes[name] for name in order], graph.library.function)
        return replace(self.model, graph=result, outputs=outputs)

    def _names(self, op: Operation) -> Iterator[str]:
        yield op.name
        for tensor in op.outputs[1:]:
            if tensor.name in self.values:
                yield _folded_name(tensor.name)

    def _canonical(self, name: str) -> str:
        return f"{_folded_name(name)}:0" if name in self.values else name

    def _node(self, name: str) -> NodeDef:
        if name in self.made:
            tensor = self.made[name]
            dtype = self.graph.get_tensor_by_name(tensor).dtype
            return _constant(name, self.values[tensor], dtype)
        op = self.graph.get_operation_by_name(name)
        node = tf.compat.v1.NodeDef()
        node.CopyFrom(op.node_def)
        del node.input[:]
        node.input.extend(
            self._canonical(self._through(t).name).removesuffix(":0") for t in op.inputs
        )
        node.input.extend(f"^{c.name}" for c in op.control_inputs if c.name in self.effects)
        node.attr.pop("_class", None)  # names ops that may be folded, to be placed beside
        node.attr.pop("_output_shapes", None)
        return node


def _folded_name(tensor: str) -> str:
    name, _, index = tensor.partition(":")
    return name if index == "0" else f"{name}/output_{index}"


def _constant(name: str, value: Any, dtype: Any) -> NodeDef:
    node = tf.compat.v1.NodeDef(name=name, op="Const")
    node.attr["dtype"].type = dtype.as_datatype_enum
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return node


def _is_stateful(op: Operation) -> bool:
    """Whether an op may do more than compute its results."""
    stateful = op.op_def is None or op.op_def.is_stateful
    return stateful and op.type not in PLACEHOLDERS


def _bytes(tensor: Tensor) -> float:
    """Bytes of a tensor; infinity where its shape is open."""
    size: int | None = tensor.shape.num_elements()
    return math.inf if size is None else size * tensor.dtype.size
