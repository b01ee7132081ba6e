"""Regions of a model, as graphs with shapes; what states an op's type; values of one type.

Regions are the model itself and each body in it. An input of an op with bodies has the type of
the bodies' argument, and of a loop's result and output; a branch's result has that of the op's
output. All elements of a TensorList have one type. The list itself is a handle, of the
type ``variant``, which ops and bodies pass on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scipy.cluster.hierarchy import DisjointSet

from finecast import Format
from finecast_tensorflow.frontend.functions import (
    LOOPS,
    bodies,
    count_of,
    flattened,
    library_of,
)
from finecast_tensorflow.frontend.library import FLOATS, Operation, Tensor, definitions, tf
from finecast_tensorflow.frontend.model import FrozenModel, base_name, imported_graph


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
    graph_regions: list[GraphRegion] = []
    _add_region(
        graph_regions, GraphRegion(number=0, model=model, graph=imported_graph(model.graph))
    )
    return graph_regions


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


ELEMENT: Final = "element_dtype"
_RESULTS: Final = ""
"""In place of an input's node: the input is a result of a body."""
_LIST_OP: Final = ("TensorList", "EmptyTensorList", "Identity")
"""Prefixes of the kinds of ops that make, read, write or pass on lists."""

Place = tuple[int, str]  # a tensor: the number of its region, and its name


@dataclass(frozen=True, slots=True, kw_only=True)
class InputPort:
    """Where a value is read: input ``index`` of a node, or result ``index`` of a body."""

    region: int
    node: str
    index: int

    @property
    def is_result(self) -> bool:
        """Whether it is a result of the region's body."""
        return self.node == _RESULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An attribute of a node that states a type, or element ``index`` of a list attribute."""

    region: int
    node: str
    attribute: str
    index: int | None = None


@dataclass(slots=True, kw_only=True)
class TypeTie:
    """Values that must have one type; the graph joins them by a phi.

    Attributes:
        of: The op that joins them: one with bodies, or the first of a list.
        region: The number of the region that the phi stands in.
        after: The region and name of the operation after which the phi stands.
        inputs: Where the values are read.
        inner: Tensors inside of bodies that the values come out as.
        outer: Tensors that they come out as in the region of the phi.
        slots: The attributes that state the type.
        fixed: Whether the type cannot change.
    """

    of: Operation
    region: int
    after: Place
    inputs: list[InputPort] = field(default_factory=list[InputPort])
    inner: list[Place] = field(default_factory=list[Place])
    outer: list[Place] = field(default_factory=list[Place])
    slots: list[Slot] = field(default_factory=list[Slot])
    fixed: bool = False


def ties(found: Sequence[GraphRegion]) -> list[TypeTie]:
    """The ties in a model's regions."""
    lists = _Lists()
    made: list[TypeTie] = []
    inner = {(r.parent, r.owner, r.role): r for r in found if r.owner}
    for region, op in every_operation(found):
        own = {role: inner[region.number, op.name, role] for role in bodies(op.node_def)}
        if own and op.type in LOOPS:
            made += _loop_ties(region.number, op, own, lists)
        elif own:
            made += _branch_ties(region.number, op, list(own.values()), lists)
        else:
            lists.visit(region.number, op)
    return [*made, *lists.ties()]


def _loop_ties(
    region: int, op: Operation, own: dict[str, GraphRegion], lists: _Lists
) -> Iterator[TypeTie]:
    """One tie for each variable of a loop; those that are lists are joined in ``lists``."""
    body = own["body"]
    after = [port.tensor for port in body.model.outputs]
    for index, given in enumerate(op.inputs):
        arguments = [(r.number, r.arguments[index]) for r in own.values()]
        next_one = (body.number, after[index])
        if given.dtype == tf.variant:
            lists.join(
                (region, given.name), (region, op.outputs[index].name), next_one, *arguments
            )
            continue
        tie = TypeTie(of=op, region=region, after=(region, op.name), inner=arguments)
        tie.inputs.append(InputPort(region=region, node=op.name, index=index))
        if next_one not in arguments:
            tie.inputs.append(InputPort(region=body.number, node=_RESULTS, index=index))
        tie.outer.append((region, op.outputs[index].name))
        tie.slots += [_dtype_of(place) for place in arguments]
        tie.slots.append(Slot(region=region, node=op.name, attribute="T", index=index))
        yield tie


def _branch_ties(
    region: int, op: Operation, own: Sequence[GraphRegion], lists: _Lists
) -> Iterator[TypeTie]:
    """One tie for each argument and each result of branches; lists are joined in ``lists``."""
    for index, given in enumerate(list(op.inputs)[1:]):
        arguments = [(r.number, r.arguments[index]) for r in own]
        if given.dtype == tf.variant:
            lists.join((region, given.name), *arguments)
            continue
        tie = TypeTie(of=op, region=region, after=(region, op.name), inner=arguments)
        tie.inputs.append(InputPort(region=region, node=op.name, index=index + 1))
        tie.slots += [_dtype_of(place) for place in arguments]
        tie.slots.append(Slot(region=region, node=op.name, attribute="Tin", index=index))
        yield tie
    for index, result in enumerate(op.outputs):
        if result.dtype == tf.variant:
            ends = [(r.number, r.model.outputs[index].tensor) for r in own]
            lists.join((region, result.name), *ends)
            continue
        tie = TypeTie(of=op, region=region, after=(region, op.name))
        tie.inputs += [InputPort(region=r.number, node=_RESULTS, index=index) for r in own]
        tie.outer.append((region, result.name))
        tie.slots.append(Slot(region=region, node=op.name, attribute="Tout", index=index))
        yield tie


def _dtype_of(place: Place) -> Slot:
    region, tensor = place
    return Slot(region=region, node=tensor.removesuffix(":0"), attribute="dtype")


class _Lists:
    """The lists of a model: groups of handles that stand for one list, and their ops."""

    def __init__(self) -> None:
        self._groups = DisjointSet()
        self._ops: dict[Place, list[tuple[int, Operation]]] = {}

    def join(self, *handles: Place) -> None:
        """Merge the groups of ``handles``: they stand for one list, or states of it."""
        for handle in handles:
            self._groups.add(handle)
            self._groups.merge(handles[0], handle)

    def visit(self, region: int, op: Operation) -> None:
        """Add an op to the list whose handles it reads or gives, if it does."""
        handles = [
            (region, t.name) for t in (*op.inputs, *op.outputs) if t.dtype == tf.variant
        ]
        if handles and op.type != "Placeholder":
            self.join(*handles)
            self._ops.setdefault(handles[0], []).append((region, op))

    def ties(self) -> Iterator[TypeTie]:
        """One tie for the elements of each list."""
        members: dict[Place, list[tuple[int, Operation]]] = {}
        for handle, ops in self._ops.items():
            members.setdefault(self._groups[handle], []).extend(ops)
        yield from map(_list_tie, members.values())


def _list_tie(ops: Sequence[tuple[int, Operation]]) -> TypeTie:
    """The tie of the elements of one list, which ``ops`` read and write."""
    writers = [(r, op) for r, op in ops if any(p == ELEMENT for p in _inputs(op))]
    last_region, last = (writers or ops[:1])[-1]
    region, first = min(ops, key=lambda found: found[0])
    tie = TypeTie(of=first, region=region, after=(last_region, last.name))
    for number, op in ops:
        tie.fixed |= not op.type.startswith(_LIST_OP)
        if not any(a.name == ELEMENT for a in op.op_def.attr):
            continue
        tie.slots.append(Slot(region=number, node=op.name, attribute=ELEMENT))
        tie.inputs += [
            InputPort(region=number, node=op.name, index=i)
            for i, attribute in enumerate(_inputs(op))
            if attribute == ELEMENT
        ]
        places = tie.inner if number != region else tie.outer
        made = zip(op.outputs, port_attributes(op, op.op_def.output_arg), strict=True)
        places += [(number, tensor.name) for tensor, a in made if a == ELEMENT]
    return tie


def _inputs(op: Operation) -> list[str]:
    return list(port_attributes(op, op.op_def.input_arg))


def is_handle(tensor: Tensor) -> bool:
    """Whether a tensor is a handle, of a list for example, and so no value of the graph."""
    handle: bool = tensor.dtype == tf.variant
    return handle


# ------------------------------------------------- the attribute that states an op's precision

# Ops whose type attributes are no precision: they convert, or pass on values of any type.
_NO_PRECISION: Final = frozenset(
    {"Cast", "Bitcast", "Print", "Assert", "FakeParam", "If", "StatelessIf"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeAttribute:
    """The attribute that names the float type an op computes in, and which ports have it.

    ``attribute`` is empty, and ``format`` None, for an op whose type cannot change.
    """

    attribute: str
    format: Format | None
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    admits: frozenset[Format]


def op_types(op: Operation) -> TypeAttribute:
    """The precision of ``op`` by its definition.

    Law: TensorFlow accepts ``op`` with ``attribute`` set to another of ``admits``, if the
    marked ports are of that type. Where several attributes name floats, as those of a batch
    norm's values and statistics do, it is the one of the first input.
    """
    ports_in = list(port_attributes(op, op.op_def.input_arg))
    ports_out = list(port_attributes(op, op.op_def.output_arg))
    names = (n for n in (*ports_in, *ports_out) if n)
    main = next((n for n in names if op.node_def.attr[n].type in FLOATS), "")
    if op.type in _NO_PRECISION or not main:
        return fixed_types(len(ports_in), len(ports_out))
    return TypeAttribute(
        attribute=main,
        format=FLOATS[op.node_def.attr[main].type],
        inputs=tuple(name == main for name in ports_in),
        outputs=tuple(name == main for name in ports_out),
        admits=_admitted(op, main),
    )


def fixed_types(inputs: int, outputs: int) -> TypeAttribute:
    """The types of an op with so many ports, none of which can change its type."""
    return TypeAttribute(
        attribute="",
        format=None,
        inputs=(False,) * inputs,
        outputs=(False,) * outputs,
        admits=frozenset(),
    )


def precision_attribute(op: str) -> str:
    """The attribute of an op's first float port, by the registry; empty if there is none."""
    definition = definitions.get(op)
    if definition is None or op in _NO_PRECISION:
        return ""
    allowed = {a.name: set(a.allowed_values.list.type) for a in definition.attr}
    ports = (a.type_attr for a in (*definition.input_arg, *definition.output_arg))
    float_ports = (n for n in ports if n and (not allowed[n] or allowed[n] & set(FLOATS)))
    return next(float_ports, "")


def port_attributes(op: Operation, arguments: Any) -> Iterator[str]:
    """For each tensor of the arguments, the attribute that is its type; empty without one."""
    for argument in arguments:
        yield from [argument.type_attr] * count_of(argument, op.node_def)


def _admitted(op: Operation, name: str) -> frozenset[Format]:
    """Formats that the attribute allows; without a restriction in the definition, all."""
    (definition,) = (a for a in op.op_def.attr if a.name == name)
    allowed = definition.allowed_values.list.type
    return frozenset(FLOATS[n] for n in allowed if n in FLOATS) or frozenset(FLOATS.values())
