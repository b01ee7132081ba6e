"""Regions of a model: the model itself and each body in it, as graphs with shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finecast.frontends.tensorflow.functions import LOOPS, bodies, flattened, library_of
from finecast.frontends.tensorflow.library import FLOATS, Operation
from finecast.frontends.tensorflow.model import FrozenModel, base_name, imported_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRegion:
    """The model itself or a body in it.

    Attributes:
        number: The region's number in the neutral graph; that of the model itself is 0.
        model: The nodes, inputs and outputs.
        graph: The same as a ``tf.Graph``, with shapes.
        owner: The name of the node that it is a body of; empty for the model itself.
        role: Which body of the owner it is, such as ``cond``.
        parent: The number of the region that the owner is in.
        prefix: The prefix of its nodes' names in the neutral graph.
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
        """Tensors that are the body's arguments; none of the model itself."""
        return [port.tensor for port in self.model.inputs] if self.owner else []


def regions(model: FrozenModel) -> list[GraphRegion]:
    """The regions of a model by number; bodies come after the region that their op is in."""
    found: list[GraphRegion] = []
    _add_region(found, GraphRegion(number=0, model=model, graph=imported_graph(model.graph)))
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
                    graph=imported_graph(body.graph),
                    owner=node.name,
                    role=role,
                    parent=region.number,
                    prefix=f"{region.prefix}{node.name}/{role}/",
                ),
            )


def _argument_shapes(op: Operation) -> list[Any]:
    """Shapes of the arguments of an op's bodies; in a loop those that hold in every step."""
    return [t.shape for t in (op.outputs if op.type in LOOPS else list(op.inputs)[1:])]


def _declare(body: FrozenModel, shapes: Sequence[Any]) -> None:
    """Declare the arguments of a body with ``shapes``."""
    nodes = {node.name: node for node in body.graph.node}
    for port, shape in zip(body.inputs, shapes, strict=True):
        nodes[base_name(port.tensor)].attr["shape"].shape.CopyFrom(shape.as_proto())


def unopened(found: Sequence[GraphRegion]) -> list[str]:
    """Names of functions that use floats and are no bodies; no region has their ops."""
    read = {name for r in found for n in r.model.graph.node for name in bodies(n).values()}
    return [
        function.signature.name
        for function in found[0].model.graph.library.function
        if function.signature.name not in read
        and any(a.type in FLOATS for n in function.node_def for a in n.attr.values())
    ]


def every_operation(found: Sequence[GraphRegion]) -> Iterator[tuple[GraphRegion, Operation]]:
    """The operations of all regions, each after those of its bodies."""
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
