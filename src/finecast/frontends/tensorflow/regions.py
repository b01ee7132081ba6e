"""Regions of a graph: the model itself, and each body in it, with the shapes in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finecast.frontends.tensorflow.functions import LOOPS, bodies, flattened, library_of
from finecast.frontends.tensorflow.library import FLOATS, Operation, tf
from finecast.frontends.tensorflow.model import FrozenModel, import_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRegion:
    """The model itself, number 0, or a body.

    Attributes:
        number: Its number in the graph.
        model: Its nodes.
        graph: The same, imported, with shapes.
        owner: The node that it is a body of, in the region ``parent``.
        role: Which body.
        prefix: What names of its nodes begin with in the neutral graph.
    """

    number: int
    model: FrozenModel
    graph: Any
    owner: str = ""
    role: str = ""
    parent: int = 0
    prefix: str = ""

    @property
    def arguments(self) -> list[str]:
        """Tensors that the body is handed."""
        return [port.tensor for port in self.model.inputs] if self.owner else []


def regions(model: FrozenModel) -> list[GraphRegion]:
    """The regions of a model, those of bodies behind the one that their op is in."""
    found: list[GraphRegion] = []
    _add_region(found, GraphRegion(number=0, model=model, graph=_imported(model)))
    return found


def _add_region(found: list[GraphRegion], region: GraphRegion) -> None:
    found.append(region)
    library = library_of(region.model.graph)
    for node in region.model.graph.node:
        for role, name in bodies(node).items():
            body = flattened(library[name], library)
            _declare(body, _argument_shapes(region.graph.get_operation_by_name(node.name)))
            _add_region(
                found,
                GraphRegion(
                    number=len(found),
                    model=body,
                    graph=_imported(body),
                    owner=node.name,
                    role=role,
                    parent=region.number,
                    prefix=f"{region.prefix}{node.name}/{role}/",
                ),
            )


def _imported(model: FrozenModel) -> Any:
    graph = tf.Graph()
    with graph.as_default():
        import_graph(model.graph)
    return graph


def _argument_shapes(op: Operation) -> list[Any]:
    """Shapes of what bodies are handed: in a loop those that hold in every step."""
    return [t.shape for t in (op.outputs if op.type in LOOPS else list(op.inputs)[1:])]


def _declare(body: FrozenModel, shapes: Sequence[Any]) -> None:
    nodes = {node.name: node for node in body.graph.node}
    for port, shape in zip(body.inputs, shapes, strict=True):
        given = nodes[port.tensor.removesuffix(":0")]
        given.attr["shape"].shape.CopyFrom(shape.as_proto())


def unopened(found: Sequence[GraphRegion]) -> list[str]:
    """Names of functions with floats that are no bodies: those of ops of other kinds."""
    read = {name for r in found for n in r.model.graph.node for name in bodies(n).values()}
    return [
        function.signature.name
        for function in found[0].model.graph.library.function
        if function.signature.name not in read
        and any(a.type in FLOATS for n in function.node_def for a in n.attr.values())
    ]


def every_operation(found: Sequence[GraphRegion]) -> Iterator[tuple[GraphRegion, Operation]]:
    """The operations of all regions, bodies before the op that they are of."""
    inner: dict[tuple[int, str], list[GraphRegion]] = {}
    for region in found:
        if region.owner:
            inner.setdefault((region.parent, region.owner), []).append(region)

    def within(region: GraphRegion) -> Iterator[tuple[GraphRegion, Operation]]:
        for op in region.graph.get_operations():
            for body in inner.get((region.number, op.name), ()):
                yield from within(body)
            yield region, op

    return within(found[0])
