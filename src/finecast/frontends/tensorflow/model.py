"""What the frontend reads and writes: one function of a model as a graph without variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from finecast.errors import ModelError
from finecast.frontends.signatures import SERVING
from finecast.frontends.tensorflow.library import GraphDef, NodeDef, tf
from finecast.graph import Dim

_MOST_BYTES: Final = 1 << 31
"""What protobuf writes as one message, which the constants of a graph are a part of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignaturePort:
    """An input or output.

    Attributes:
        name: In the signature.
        tensor: Its tensor, ``NODE:INDEX``.
        dtype: A format's label or another type's name.
        shape: None for an unknown one; free sizes of inputs are called ``INPUT.AXIS``.
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
        listed: Whether a caller gets the outputs as a list; else by their names.
        notes: What a conversion left in it, for the next one.
    """

    graph: GraphDef = field(repr=False)
    inputs: tuple[SignaturePort, ...]
    outputs: tuple[SignaturePort, ...]
    signatures: tuple[str, ...] = (SERVING,)
    listed: bool = False
    notes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def size_bytes(self) -> int:
        """Bytes of the graph, weights and all."""
        size: int = self.graph.ByteSize()
        return size

    def imported(self) -> tuple[Any, dict[str, Any]]:
        """The graph in TensorFlow, and its tensors by name: what a session runs.

        Raises:
            ModelError: If an op is unknown to this TensorFlow, or the graph is not valid.
        """
        graph = tf.Graph()
        with graph.as_default():
            import_graph(self.graph)
        names = (port.tensor for port in (*self.inputs, *self.outputs))
        return graph, {name: graph.get_tensor_by_name(name) for name in names}


def with_sizes(model: FrozenModel, sizes: Mapping[str, Sequence[int]]) -> FrozenModel:
    """A copy whose inputs, by name, are declared in these sizes."""
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(model.graph)
    nodes = {node.name: node for node in graph.node}
    for port in model.inputs:
        shape = tf.TensorShape(sizes[port.name]).as_proto()
        nodes[port.tensor.partition(":")[0]].attr["shape"].shape.CopyFrom(shape)
    inputs = tuple(replace(p, shape=tuple(sizes[p.name])) for p in model.inputs)
    return replace(model, graph=graph, inputs=inputs)


def import_graph(graph_def: GraphDef) -> None:
    """Put the nodes into the graph that is open, under their own names.

    Raises:
        ModelError: If an op is unknown to this TensorFlow, or the graph is not valid.
    """
    try:
        tf.import_graph_def(graph_def, name="")
    except (ValueError, tf.errors.OpError) as error:
        raise unreadable(error) from error


def unreadable(error: Exception, where: str = "") -> ModelError:
    """What TensorFlow says of a model that it cannot read, in one line."""
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
    """Return if weights of so many bytes can be constants of a graph.

    Raises:
        ModelError: If not.
    """
    if size_bytes >= _MOST_BYTES:
        raise ModelError(
            f"the model has weights of {size_bytes / 1e9:.1f} GB, and a graph of TensorFlow's"
            " holds 2 GB of constants",
            where=where,
            fix="write OpenVINO's IR, which has no such limit: -o NAME.xml",
        )


def reachable(nodes: Mapping[str, NodeDef], ends: Iterable[str]) -> set[str]:
    """Names of the nodes that those called ``ends`` need, these among them."""
    found: set[str] = set()
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [base_name(read) for read in nodes[name].input]
    return found


def base_name(reference: str) -> str:
    """The node of an input of a NodeDef: ``a`` of ``a:1`` and of ``^a``."""
    return reference.removeprefix("^").partition(":")[0]
