"""Functions of a graph, such as bodies of control flow: as graphs of their own, and back.

A function names what its nodes read ``NODE:ARGUMENT:INDEX``, a graph ``NODE:INDEX``. As a
graph its arguments are placeholders.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from finecast.errors import ModelError
from finecast.frontends.tensorflow.library import (
    GraphDef,
    NodeDef,
    definitions,
    dtype_label,
    tf,
)
from finecast.frontends.tensorflow.model import FrozenModel, SignaturePort

FunctionDef: TypeAlias = Any

_ROLES: Final[Mapping[str, Mapping[str, str]]] = {
    "While": {"cond": "cond", "body": "body"},
    "If": {"then_branch": "then", "else_branch": "else"},
    "Case": {"branches": "branch"},
}
"""Attributes that name bodies, and what the nodes of a body are called after its op's name
where TensorFlow runs it: ``while/body/_12/...``; branches of a Case have numbers."""
_RUN: Final = re.compile(r"/(cond|body|then|else|branch\d+)/_\d+/")
STATELESS: Final = {kind: f"Stateless{kind}" for kind in _ROLES}
"""Ops with bodies, and what such an op is called where its bodies only compute."""
LOOPS: Final = frozenset({"While", "StatelessWhile"})
_NUMBERS: Final = itertools.count()
CALLS: Final = frozenset({"PartitionedCall", "StatefulPartitionedCall"})


def bodies(node: NodeDef) -> dict[str, str]:
    """Names of functions that are bodies of ``node``, by role; none of other ops."""
    found: dict[str, str] = {}
    for attribute, role in _ROLES.get(node.op.removeprefix("Stateless"), {}).items():
        value = node.attr[attribute]
        if value.WhichOneof("value") == "func":
            found[role] = value.func.name
        else:
            found |= {f"{role}{i}": f.name for i, f in enumerate(value.list.func)}
    return found


def set_bodies(node: NodeDef, names: Mapping[str, str]) -> None:
    """Have ``node`` run other functions, by the roles of ``bodies``."""
    for attribute, role in _ROLES[node.op.removeprefix("Stateless")].items():
        value = node.attr[attribute]
        if value.WhichOneof("value") == "func":
            value.func.name = names[role]
        else:
            for index, function in enumerate(value.list.func):
                function.name = names[f"{role}{index}"]


def plain_name(kernel: str) -> str:
    """The name of the node that TensorFlow runs as ``kernel``, in a body or outside."""
    return _RUN.sub(r"/\1/", kernel)


def library_of(graph: GraphDef) -> dict[str, FunctionDef]:
    """The functions of a graph by name."""
    return {f.signature.name: f for f in graph.library.function}


def has_effects(function: FunctionDef, library: Mapping[str, FunctionDef]) -> bool:
    """Whether some op of it, or of what it calls, does more than compute."""
    for node in function.node_def:
        called = called_by(node)
        if called:
            if any(has_effects(library[name], library) for name in called):
                return True
        elif (definition := definitions.get(node.op)) is None or definition.is_stateful:
            return True
    return False


def called_by(node: NodeDef) -> list[str]:
    """The functions that a node runs: bodies, or one that is called."""
    return [node.attr["f"].func.name] if node.op in CALLS else list(bodies(node).values())


def needed(nodes: Iterable[NodeDef], library: Mapping[str, FunctionDef]) -> list[FunctionDef]:
    """The functions that ``nodes`` refer to, by any attribute, and those that these do."""
    found: dict[str, FunctionDef] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        for name in (*(named.name for named in _named_by(node)), node.op):
            if name in library and name not in found:
                found[name] = library[name]
                waiting += library[name].node_def
    return list(found.values())


def _named_by(node: NodeDef) -> Iterator[Any]:
    """The functions that attributes of ``node`` name."""
    for value in node.attr.values():
        if value.WhichOneof("value") == "func":
            yield value.func
        else:
            yield from value.list.func


def flattened(function: FunctionDef, library: Mapping[str, FunctionDef]) -> FrozenModel:
    """A function as a graph, with the functions that it needs itself.

    What it does beside computing is done before its results are there: they wait for it.
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
        node.attr.pop("_class", None)  # where it was placed beside
        node.input[:] = [_plain(flat, name) for name in node.input]
    outputs: list[SignaturePort] = []
    waits = [f"^{name}" for name in function.control_ret.values()]
    for result in function.signature.output_arg:
        tensor = flat[function.ret[result.name]]
        if waits:
            end = graph.node.add(
                name=fresh(f"{result.name}_done", {n.name for n in graph.node}),
                op="Identity", input=[tensor.removesuffix(":0"), *waits],
            )  # fmt: skip
            end.attr["T"].type = result.type
            tensor = f"{end.name}:0"
        outputs.append(_port(result.name, tensor, result.type))
    graph.library.function.extend(needed(graph.node, library))
    return FrozenModel(graph=graph, inputs=tuple(inputs), outputs=tuple(outputs))


def opened(model: FrozenModel, prefix: str = "") -> Iterator[tuple[str, FrozenModel]]:
    """A model, and all bodies in it as graphs, with what names of their nodes begin with."""
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
    """The function that ``flattened`` makes such a graph of.

    Args:
        name: What it is called.
        nodes: Those of the graph.
        arguments: Names of the placeholders of its arguments.
        results: The tensors that it gives, with the numbers of their types.
        library: The functions that nodes call by their names.
    """
    function = tf.compat.v1.GraphDef().library.function.add()
    function.signature.name = name
    by_name = {node.name: node for node in nodes}
    nested = {f"{argument}:0": argument for argument in arguments}
    for index, argument in enumerate(arguments):
        given = by_name.pop(argument)
        function.signature.input_arg.add(name=argument, type=given.attr["dtype"].type)
        shapes = function.arg_attr[index].attr["_output_shapes"].list.shape
        shapes.add().CopyFrom(given.attr["shape"].shape)
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
    """Numbers of the types that a body of ``owner`` gives."""
    if role == "cond":
        return [tf.bool.as_datatype_enum]
    return list(owner.attr["T" if owner.op in LOOPS else "Tout"].list.type)


def tensor_of(read: str) -> str:
    """The tensor that an input of a NodeDef names: ``a:0`` of ``a``."""
    return read if ":" in read else f"{read}:0"


def every_node(graph: GraphDef) -> Iterator[NodeDef]:
    """The nodes of a graph, and of its functions."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def with_own_names(graph: GraphDef) -> GraphDef:
    """A copy whose functions have names that no other has in this process.

    Functions that are called from Python are known by their names alone.
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
    """Have ``nodes`` read other tensors in place of those that are keys of ``moved``."""
    for node in nodes:
        node.input[:] = [
            read
            if read.startswith("^")
            else moved.get(tensor_of(read), tensor_of(read)).removesuffix(":0")
            for read in node.input
        ]


def fresh(name: str, taken: Container[str]) -> str:
    """A name that is not taken."""
    while name in taken:
        name += "_"
    return name


def _add_argument(graph: GraphDef, argument: Any, attributes: Any) -> None:
    given = graph.node.add(name=argument.name, op="Placeholder")
    given.attr["dtype"].type = argument.type
    shapes = attributes["_output_shapes"].list.shape if "_output_shapes" in attributes else ()
    if shapes:
        given.attr["shape"].shape.CopyFrom(shapes[0])
    else:
        given.attr["shape"].shape.unknown_rank = True


def _port(name: str, tensor: str, kind: int) -> SignaturePort:
    return SignaturePort(
        name=name, tensor=tensor, dtype=dtype_label(tf.as_dtype(kind)), shape=None
    )


def _plain(flat: Mapping[str, str], name: str) -> str:
    return name if name.startswith("^") else flat[name].removesuffix(":0")


def _flat_names(node: str) -> Iterator[str]:
    """``NODE:0``, ``NODE:1``... without end."""
    return (f"{node}:{index}" for index in itertools.count())


def _nested_names(node: NodeDef, library: Mapping[str, FunctionDef]) -> Iterator[str]:
    """What functions call the results of ``node``, in order."""
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
