"""A model as the frontend reads and writes it: one function, a graph without variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from finecast.errors import ModelError
from finecast.frontends import SERVING
from finecast.graph import Dim
from finecast_tensorflow.frontend.library import GraphDef, NodeDef, tf

PLACEHOLDERS: Final = frozenset({"Placeholder", "PlaceholderWithDefault"})
"""Kinds of ops that are inputs of a graph."""
_MOST_BYTES: Final = 1 << 31
"""Protobuf's limit for one message; a graph with its constants is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignaturePort:
    """An input or output.

    Attributes:
        name: Its name in the signature.
        tensor: Its tensor, ``NODE:INDEX``.
        dtype: A format's label or another type's name.
        shape: None if its rank is open; open dimensions of inputs are called ``INPUT.AXIS``.
    """

    name: str
    tensor: str
    dtype: str
    shape: tuple[Dim, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenModel:
    """A GraphDef whose weights are constants, with its signature.

    Attributes:
        graph: Nodes, and the functions of control flow. Never changed in place.
        inputs: In the order in which the signature has them.
        outputs: Likewise.
        signatures: All names that the function is saved under.
        listed: Whether a caller gets the outputs as a list; else as a dict by their names.
        notes: What its conversion noted, as in ``Provenance``; empty if there was none.
        computed: Graphs that hold the Python functions which nodes call.
    """

    graph: GraphDef = field(repr=False)
    inputs: tuple[SignaturePort, ...]
    outputs: tuple[SignaturePort, ...]
    signatures: tuple[str, ...] = (SERVING,)
    listed: bool = False
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    computed: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    @property
    def size_bytes(self) -> int:
        """Bytes of the graph, weights and all."""
        size: int = self.graph.ByteSize()
        return size

    def imported(self) -> tuple[Any, dict[str, Any]]:
        """The graph as a ``tf.Graph``, which a session runs, and its ports' tensors by name.

        Raises:
            ModelError: If an op is unknown to this TensorFlow, or the graph is not valid.
        """
        graph = imported_graph(self.graph)
        names = (port.tensor for port in (*self.inputs, *self.outputs))
        return graph, {name: graph.get_tensor_by_name(name) for name in names}


def with_sizes(model: FrozenModel, sizes: Mapping[str, Sequence[int]]) -> FrozenModel:
    """A copy whose inputs are declared with the shapes ``sizes``, by name."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(model.graph)
    nodes = {node.name: node for node in graph.node}
    for port in model.inputs:
        shape = tf.TensorShape(sizes[port.name]).as_proto()
        nodes[base_name(port.tensor)].attr["shape"].shape.CopyFrom(shape)
    inputs = tuple(replace(p, shape=tuple(sizes[p.name])) for p in model.inputs)
    return replace(model, graph=graph, inputs=inputs)


def import_graph(graph_def: GraphDef) -> None:
    """Add the nodes to TensorFlow's current default graph, under their own names.

    Raises:
        ModelError: If an op is unknown to this TensorFlow, or the graph is not valid.
    """
    try:
        tf.import_graph_def(graph_def, name="")
    except (ValueError, tf.errors.OpError) as error:
        raise unreadable(error) from error


def imported_graph(graph_def: GraphDef) -> Any:
    """A new ``tf.Graph`` of the nodes, with the shapes that TensorFlow infers.

    Raises:
        ModelError: If an op is unknown to this TensorFlow, or the graph is not valid.
    """
    graph = tf.Graph()
    with graph.as_default():
        import_graph(graph_def)
    return graph


def unreadable(error: Exception, where: str = "") -> ModelError:
    """The error for a model that TensorFlow cannot read, with its message in one line."""
    text = " ".join(str(error).split())
    unknown = text.partition("Op type not registered '")[2].partition("'")[0]
    if unknown:
        return ModelError(
            f"the custom op {unknown!r} is not known to this TensorFlow",
            where=where,
            fix="in Python, tf.load_op_library its library first, and give finecast.tensorflow"
            " the model",
        )
    return ModelError(
        f"TensorFlow cannot read the model: {text[:240]}", where=where, fix="save it again"
    )


def check_size(size_bytes: int, where: str) -> None:
    """Check that weights of so many bytes can be constants of a graph.

    Raises:
        ModelError: If they cannot.
    """
    if size_bytes >= _MOST_BYTES:
        raise ModelError(
            f"the model has weights of {size_bytes / 1e9:.1f} GB, and a graph of TensorFlow's"
            " holds 2 GB of constants",
            where=where,
            fix="write OpenVINO's IR, which has no such limit: -o NAME.xml",
        )


def with_nodes(
    graph: GraphDef, nodes: Iterable[NodeDef], functions: Iterable[Any] = ()
) -> GraphDef:
    """A new graph of the version of ``graph``, with copies of these nodes and functions."""
    made = tf.compat.v1.GraphDef()
    made.versions.CopyFrom(graph.versions)
    made.node.extend(nodes)
    made.library.function.extend(functions)
    return made


def reachable(nodes: Mapping[str, NodeDef], ends: Iterable[str]) -> set[str]:
    """Names of the nodes that those called ``ends`` depend on, and ``ends`` themselves."""
    names: set[str] = set()
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            waiting += [base_name(read) for read in nodes[name].input]
    return names


def base_name(reference: str) -> str:
    """The name of the node that a tensor or an input is of: ``a`` of ``a:1`` and of ``^a``."""
    return reference.removeprefix("^").partition(":")[0]
