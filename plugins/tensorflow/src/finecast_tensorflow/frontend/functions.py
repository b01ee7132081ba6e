"""Converts functions of a graph, such as bodies of control flow, to graphs and back.

Nodes of a function name their inputs ``NODE:ARGUMENT:INDEX``, those of a graph ``NODE:INDEX``.
In a graph the function's arguments are placeholders.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from finecast.errors import ModelError
from finecast_tensorflow.frontend.library import (
    GraphDef,
    NodeDef,
    definitions,
    dtype_label,
    tf,
)
from finecast_tensorflow.frontend.model import FrozenModel, SignaturePort

FunctionDef: TypeAlias = Any

_ROLES: Final[Mapping[str, Mapping[str, str]]] = {
    "While": {"cond": "cond", "body": "body"},
    "If": {"then_branch": "then", "else_branch": "else"},
    "Case": {"branches": "branch"},
}
"""For each op with bodies the attributes that name them, and the roles of these bodies.
TensorFlow calls a body's nodes by the role when it runs them, ``while/body/_12/...``; branches
of a Case have numbers behind it."""
_RUN: Final = re.compile(r"/(cond|body|then|else|branch\d+)/_\d+/")
STATELESS: Final = {kind: f"Stateless{kind}" for kind in _ROLES}
"""Ops with bodies, and the name of the same op for bodies that do nothing but compute."""
LOOPS: Final = frozenset({"While", "StatelessWhile"})
_NUMBERS: Final = itertools.count()
CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


def bodies(node: NodeDef) -> dict[str, str]:
    """Names of the functions that are bodies of ``node``, by role; empty for other ops."""
    body_names: dict[str, str] = {}
    for attribute, role in _ROLES.get(node.op.removeprefix("Stateless"), {}).items():
        value = node.attr[attribute]
        if value.WhichOneof("value") == "func":
            body_names[role] = value.func.name
        else:
            body_names |= {f"{role}{i}": f.name for i, f in enumerate(value.list.func)}
    return body_names


def set_bodies(node: NodeDef, names: Mapping[str, str]) -> None:
    """Let ``node`` run other functions, whose names are given by role."""
    for attribute, role in _ROLES[node.op.removeprefix("Stateless")].items():
        value = node.attr[attribute]
        if value.WhichOneof("value") == "func":
            value.func.name = names[role]
        else:
            for index, function in enumerate(value.list.func):
                function.name = names[f"{role}{index}"]


def plain_name(kernel: str) -> str:
    """The name that a node has in its graph, of the name that it has when it runs."""
    return _RUN.sub(r"/\1/", kernel)


def library_of(graph: GraphDef) -> dict[str, FunctionDef]:
    """The functions of a graph by name."""
    return {f.signature.name: f for f in graph.library.function}


def has_effects(function: FunctionDef, library: Mapping[str, FunctionDef]) -> bool:
    """Whether an op of the function, or of those it calls, does more than compute."""
    for node in function.node_def:
        called = called_by(node)
        if called:
            if any(has_effects(library[name], library) for name in called):
                return True
        elif is_stateful(node):
            return True
    return False


def is_stateful(node: NodeDef) -> bool:
    """Whether the op of ``node`` may do more than compute its results, or is unknown."""
    definition = definitions.get(node.op)
    return definition is None or bool(definition.is_stateful)


def called_by(node: NodeDef) -> list[str]:
    """Names of the functions that a node runs: its bodies, or the one that it calls."""
    return [node.attr["f"].func.name] if node.op in CALLS else list(bodies(node).values())


def needed(nodes: Iterable[NodeDef], library: Mapping[str, FunctionDef]) -> list[FunctionDef]:
    """The functions that ``nodes`` name, as ops or in attributes, and that these name."""
    functions: dict[str, FunctionDef] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        for name in (*(named.name for named in _named_by(node)), node.op):
            if name in library and name not in functions:
                functions[name] = library[name]
                waiting += library[name].node_def
    return list(functions.values())


def _named_by(node: NodeDef) -> Iterator[Any]:
    """The attribute values of ``node`` that name functions."""
    for value in node.attr.values():
        if value.WhichOneof("value") == "func":
            yield value.func
        else:
            yield from value.list.func


def flattened(function: FunctionDef, library: Mapping[str, FunctionDef]) -> FrozenModel:
    """A function as a graph, with the functions that it names itself.

    Results wait for the function's side effects.
    """
    graph = tf.compat.v1.GraphDef()
    graph.versions.producer = tf.version.GRAPH_DEF_VERSION
    flat: dict[str, str] = {}
    inputs: list[SignaturePort] = []
    for index, argument in enumerate(function.signature.input_arg):
        _add_argument(graph, argument, function.arg_attr[index].attr)
        flat[argument.name] = f"{argument.name}:0"
        inputs.append(_port(argument.name, f"{argument.name}:0", argument.type))
    for node in function.node_def:
        flat |= dict(zip(_nested_names(node, library), _flat_names(node.name), strict=False))
        graph.node.add().CopyFrom(node)
    for node in graph.node:
        node.attr.pop("_class", None)  # names ops to be placed beside, in the function's form
        node.input[:] = [_plain(flat, name) for name in node.input]
    outputs: list[SignaturePort] = []
    waits = [f"^{name}" for name in function.control_ret.values()]
    for result in function.signature.output_arg:
        tensor = flat[function.ret[result.name]]
        if waits:
            end = graph.node.add(
                name=fresh(f"{result.name}_done", {n.name for n in graph.node}),
                op="Identity", input=[reference(tensor), *waits],
            )  # fmt: skip
            end.attr["T"].type = result.type
            tensor = f"{end.name}:0"
        outputs.append(_port(result.name, tensor, result.type))
    graph.library.function.extend(needed(graph.node, library))
    return FrozenModel(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs))


def opened(model: FrozenModel, prefix: str = "") -> Iterator[tuple[str, FrozenModel]]:
    """A model and all bodies in it as graphs, each with the prefix of its nodes' names."""
    yield prefix, model
    library = library_of(model.graph)
    for node in model.graph.node:
        for role, name in bodies(node).items():
            body = flattened(library[name], library)
            yield from opened(body, f"{prefix}{node.name}/{role}/")


def as_function(
    name: str,
    nodes: Sequence[NodeDef],
    arguments: Sequence[str],
    results: Sequence[tuple[str, int]],
    library: Mapping[str, FunctionDef],
) -> FunctionDef:
    """A graph as a function: the inverse of ``flattened``.

    Args:
        name: The function's name.
        nodes: The nodes of the graph.
        arguments: Names of the placeholders that become arguments.
        results: The tensors that the function returns, with the numbers of their types.
        library: Functions by name, for nodes whose op is one of them.
    """
    function = tf.compat.v1.GraphDef().library.function.add()
    function.signature.name = name
    by_name = {node.name: node for node in nodes}
    nested = {f"{argument}:0": argument for argument in arguments}
    for index, argument in enumerate(arguments):
        placeholder = by_name.pop(argument)
        function.signature.input_arg.add(name=argument, type=placeholder.attr["dtype"].type)
        shapes = function.arg_attr[index].attr["_output_shapes"].list.shape
        shapes.add().CopyFrom(placeholder.attr["shape"].shape)
    for node in by_name.values():
        names = zip(_flat_names(node.name), _nested_names(node, library), strict=False)
        nested |= dict(names)
    for node in by_name.values():
        copy = function.node_def.add()
        copy.CopyFrom(node)
        copy.input[:] = [
            read if read.startswith("^") else nested[tensor_of(read)] for read in node.input
        ]
    for index, (tensor, kind) in enumerate(results):
        function.signature.output_arg.add(name=f"result_{index}", type=kind)
        function.ret[f"result_{index}"] = nested[tensor]
    function.signature.is_stateful = has_effects(function, library)
    return function


def result_types(owner: NodeDef, role: str) -> Sequence[int]:
    """Numbers of the types of the results of a body of ``owner``."""
    if role == "cond":
        return [tf.bool.as_datatype_enum]
    return list(owner.attr["T" if owner.op in LOOPS else "Tout"].list.type)


def tensor_of(read: str) -> str:
    """The tensor that an input of a NodeDef names: ``a:0`` for ``a``."""
    return read if ":" in read else f"{read}:0"


def reference(tensor: str) -> str:
    """A tensor as inputs of NodeDefs name it: ``a`` for ``a:0``, ``a:1`` for ``a:1``."""
    return tensor.removesuffix(":0")


def every_node(graph: GraphDef) -> Iterator[NodeDef]:
    """The nodes of a graph, and of its functions."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def with_own_names(graph: GraphDef) -> GraphDef:
    """A copy of ``graph`` whose functions' names are unique in this process.

    TensorFlow tells functions that are called from Python apart by name alone.
    """
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(graph)
    suffix = next(_NUMBERS)
    names = {name: f"{name}_{suffix}" for name in library_of(graph)}
    for function in copy.library.function:
        function.signature.name = names[function.signature.name]
    for node in every_node(copy):
        node.op = names.get(node.op, node.op)
        for named in _named_by(node):
            named.name = names.get(named.name, named.name)
    return copy


def redirect(nodes: Iterable[NodeDef], moved: Mapping[str, str]) -> None:
    """Let ``nodes`` read other tensors in place of those that are keys of ``moved``."""
    for node in nodes:
        node.input[:] = [
            read
            if read.startswith("^")
            else reference(moved.get(tensor_of(read), tensor_of(read)))
            for read in node.input
        ]


def fresh(name: str, taken: Container[str]) -> str:
    """``name``, with underscores behind it while it is taken."""
    while name in taken:
        name += "_"
    return name


def _add_argument(graph: GraphDef, argument: Any, attributes: Any) -> None:
    """Add the placeholder of a function's argument."""
    placeholder = graph.node.add(name=argument.name, op="Placeholder")
    placeholder.attr["dtype"].type = argument.type
    shapes = attributes["_output_shapes"].list.shape if "_output_shapes" in attributes else ()
    if shapes:
        placeholder.attr["shape"].shape.CopyFrom(shapes[0])
    else:
        placeholder.attr["shape"].shape.unknown_rank = True


def _port(name: str, tensor: str, kind: int) -> SignaturePort:
    return SignaturePort(
        name=name, tensor=tensor, dtype=dtype_label(tf.as_dtype(kind)), shape=None
    )


def _plain(flat: Mapping[str, str], name: str) -> str:
    """An input of a function's node as one of a graph's; ``flat`` has a graph's tensors."""
    return name if name.startswith("^") else reference(flat[name])


def _flat_names(node: str) -> Iterator[str]:
    """The names of a node's tensors in a graph: ``NODE:0``, ``NODE:1``, without end."""
    return (f"{node}:{index}" for index in itertools.count())


def _nested_names(node: NodeDef, library: Mapping[str, FunctionDef]) -> Iterator[str]:
    """The names of a node's tensors in a function, in order."""
    called = library.get(node.op)
    definition = definitions.get(node.op) if called is None else called.signature
    if definition is None:
        raise ModelError(
            f"the custom op {node.op!r} is not known to this TensorFlow",
            fix="in Python, tf.load_op_library its library first, and give finecast.tensorflow"
            " the model",
        )
    for argument in definition.output_arg:
        for index in range(count_of(argument, node)):
            yield f"{node.name}:{argument.name}:{index}"


def count_of(argument: Any, node: NodeDef) -> int:
    """How many tensors of ``node`` are one argument of its op's definition."""
    if argument.number_attr:
        return int(node.attr[argument.number_attr].i)
    if argument.type_list_attr:
        return len(node.attr[argument.type_list_attr].list.type)
    return 1
