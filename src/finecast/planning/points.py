"""Rounding points: where a plan may round a value, separately for each reader.

A value may be stored in fp32 for one reader and cast for another: a residual stream may stay
exact while a matrix product reads a rounded copy of it. So each input at which an op that
computes reads a value is a point. The point is rounded if any op on the way from the value's
origin to the reader is low: the op that made it, an op that only moved it, or the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from finecast.graph import Graph, Node, Value
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.numbers.encodings import Reading, Scaled
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.rules.scaled_operands import coded_result, origin, reading

# (node, index): input ``index`` of the node; (None, index): the model's output ``index``.
Place = tuple[int | None, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Input ``port`` of node ``reader`` (None: output ``port`` of the model) reads ``value``.

    ``readers`` are the nodes that round it if they read in a low format: the reader, and
    the nodes that only move the value on its way from ``origin``. ``maker`` is the node that
    computes ``origin`` (None for inputs, or if it is never low): it rounds the value if it
    stores its result in a low format.
    """

    reader: int | None
    port: int
    value: int
    readers: tuple[int, ...]
    maker: int | None
    origin: int

    @property
    def path(self) -> tuple[int, ...]:
        """The nodes of which any rounds the value if it is low."""
        return (*self.readers, *(() if self.maker is None else (self.maker,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPoint:
    """Places that are rounded together: if any unit of ``readers`` or ``makers`` is low.

    ``ends`` are the ids of values that are inputs or outputs of the model: declared in a low
    format they round the places, too. ``encoding`` is that of all places if the format has
    parameters.
    """

    places: tuple[Place, ...]
    readers: tuple[int, ...]
    makers: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    encoding: Reading | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingPoints:
    """All that a plan can round.

    ``points`` are for values; ``weights[j]`` maps node ids of unit ``weight_units[j]`` to the
    inputs at which they read constants.
    """

    points: tuple[RoundingPoint, ...]
    weights: tuple[Mapping[int, tuple[int, ...]], ...]
    weight_units: tuple[int, ...]

    @property
    def shared(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Units that round at several points if they are low, each with those points.

        Such a unit's result has several readers, and all of them read the same rounded
        numbers. What that does to the outputs is not the sum of what each reader alone does:
        where two branches are subtracted, the common error cancels.
        """
        points_by_unit: dict[int, list[int]] = {}
        for number, point in enumerate(self.points):
            for unit in point.makers:
                points_by_unit.setdefault(unit, []).append(number)
        return tuple((unit, tuple(at)) for unit, at in points_by_unit.items() if len(at) > 1)


def find_points(graph: Graph, free: frozenset[int]) -> tuple[Point, ...]:
    """All points that a plan can round; ``free`` are the nodes that may be low."""
    points = [p for node in graph.nodes for p in _of_node(graph, node, free)]
    points += [_point(graph, None, k, v, free) for k, v in enumerate(graph.outputs)]
    return tuple(p for p in points if p.path and graph.values[p.value].format is Format.FP32)


def _of_node(graph: Graph, node: Node, free: frozenset[int]) -> Iterator[Point]:
    if node.op in READS_SHAPE_ONLY:
        return
    # The points of its result's readers cover what it moves on.
    carried = {v.id for v in graph.following_inputs(node)} if moves(node) else set[int]()
    for port, index in enumerate(node.inputs):
        if index is None or index in carried:
            continue
        reader = node if node.follows_in[port] else None
        yield _point(graph, reader, port, graph.values[index], free, at=node)


def _point(
    graph: Graph,
    reader: Node | None,
    port: int,
    value: Value,
    free: frozenset[int],
    at: Node | None = None,
) -> Point:
    readers = [reader.id] if reader is not None else []
    current, maker = value, None
    while (producer := graph.maker(current)) is not None:
        if not any(v.id == current.id for v in graph.following_outputs(producer)):
            break
        sources = [v for v in graph.following_inputs(producer) if v.format is Format.FP32]
        if not moves(producer) or len(sources) != 1:
            maker = producer.id
            break
        readers.append(producer.id)
        current = sources[0]
    return Point(
        reader=at.id if at is not None else None,
        port=port,
        value=value.id,
        readers=tuple(n for n in readers if n in free),
        maker=maker if maker in free else None,
        origin=current.id,
    )


def moves(node: Node) -> bool:
    """Whether the node only moves numbers: rounding before it equals rounding after it."""
    floats = sum(node.follows_in)
    return by_name(node.op).exact and floats == 1 and any(node.follows_out)


def rounding_points(
    graph: Graph,
    units: Units,
    fused: Sequence[frozenset[int]] = (),
    *,
    results: bool = True,
) -> RoundingPoints:
    """The points of ``find_points``, where points rounded by the same units are one.

    ``fused`` are the kernels of the low plan: values inside a kernel are not rounded. With
    ``results`` ops in the format round their results, too, and not operands alone.
    """
    kernel_of = {node: k for k, nodes in enumerate(fused) for node in nodes}
    places_by_units: dict[tuple[tuple[int, ...], ...], list[Place]] = {}
    for point in find_points(graph, frozenset(units.of)):
        at, origin = point.reader, graph.values[point.origin]
        if origin.constant is not None or _inside(graph, point, units, kernel_of):
            continue
        ends = (point.origin,) if origin.is_input else ()
        ends += (point.value,) if at is None else ()
        makers = (units.of[point.maker],) if point.maker is not None and results else ()
        readers = tuple(sorted({units.of[n] for n in point.readers} - {*makers}))
        if readers or makers or ends:
            places_by_units.setdefault((readers, makers, ends), []).append((at, point.port))
    weights = {u: _constant_ports(graph, nodes) for u, nodes in enumerate(units.members)}
    used = {u: ports for u, ports in weights.items() if ports}
    return RoundingPoints(
        points=tuple(
            RoundingPoint(places=tuple(places), readers=readers, makers=makers, ends=ends)
            for (readers, makers, ends), places in places_by_units.items()
        ),
        weights=tuple(used.values()),
        weight_units=tuple(used),
    )


def _inside(graph: Graph, point: Point, units: Units, kernel_of: Mapping[int, int]) -> bool:
    """Whether the value's producer and reader are in one kernel and in one unit."""
    writer = graph.values[point.value].producer
    if point.reader is None or writer is None:
        return False
    pair = (writer, point.reader)
    return (
        kernel_of.get(writer, -1) == kernel_of.get(point.reader, -2)
        and units.of.get(writer, -1) == units.of.get(point.reader, -2)
        and all(n in units.of for n in pair)
    )


def _constant_ports(graph: Graph, nodes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """The inputs at which nodes read constants that are rounded, by node.

    The number that a Pad pads by is left out. What rounding it changes is little, and OpenVINO
    pads by another number where a switch computes it.
    """
    ports: dict[int, tuple[int, ...]] = {}
    for node_id in nodes:
        node = graph.nodes[node_id]
        constant_ports = tuple(
            i
            for i, (value, follows) in enumerate(
                zip(node.inputs, node.follows_in, strict=True)
            )
            if value is not None and follows and graph.values[value].constant is not None
            if not (node.op == "pad" and i)
        )
        if constant_ports:
            ports[node_id] = constant_ports
    return ports


# Rounding points of formats whose encodings have parameters.


# A value, the unit that encodes it as it reads it, or None if its producer does, and how.
# Kernels find scales along an axis of what they read, and a transpose may stand in front.
_Class = tuple[int, int | None, Reading]


def scaled_points(
    graph: Graph, units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> RoundingPoints:
    """The values that ops in ``fmt`` encode, separately for each unit, and their constants.

    Values that are only moved from one another have the same codes. An operand is rounded for
    the unit that encodes it only: readers in other formats read it unrounded. A result that
    its op encodes is rounded for all of its readers.
    """
    places: dict[_Class, list[Place]] = {}
    makers: dict[int, set[int]] = {}
    weights: dict[int, dict[int, tuple[int, ...]]] = {}
    for node, unit in units.of.items():
        encodings = permissions[node].encodings.get(fmt)
        if encodings is None:
            continue
        for index, encoding in encodings.operands.items():
            source = graph.nodes[node].inputs[index]
            assert source is not None
            root = origin(graph, graph.values[source]).id
            places.setdefault((root, unit, encoding), []).append((node, index))
        if isinstance(encodings.result, Scaled):
            value = coded_result(graph, graph.nodes[node])
            assert value is not None
            key = value.id, None, encodings.result
            places.setdefault(key, []).extend(reading(graph, value))
            makers.setdefault(value.id, set()).add(unit)
        if encodings.constants:
            weights.setdefault(unit, {})[node] = tuple(sorted(encodings.constants))
    return RoundingPoints(
        points=tuple(
            RoundingPoint(
                places=tuple(dict.fromkeys(at)),
                readers=tuple(sorted({*makers.get(root, ()), *own})),
                encoding=encoding,
            )
            for root, own, encoding, at in _by_reader(places)
        ),
        weights=tuple(weights.values()),
        weight_units=tuple(weights),
    )


def _by_reader(
    places: Mapping[_Class, Sequence[Place]],
) -> Iterator[tuple[int, tuple[int, ...], Reading, Sequence[Place]]]:
    """The value of each class, the unit that encodes its places, if any, how, and the places.

    Places that a unit encodes are left out of the class that the producer encodes.
    """
    encoded = {
        at
        for (_, unit, _), class_places in places.items()
        if unit is not None
        for at in class_places
    }
    for (root, unit, encoding), class_places in places.items():
        if unit is not None:
            yield root, (unit,), encoding, class_places
        elif rest := [at for at in class_places if at not in encoded]:
            yield root, (), encoding, rest


# Switches of rounding points: the inputs and outputs that each rounds, and the encodings.


SWITCH: Final = "finecast_switch"
"""Name of the input of a model with switches: bool[n], element k turns on switch k."""

# (node, index): input ``index`` of the node.
Port = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What one switch rounds.

    Attributes:
        ports: Encodings of node inputs that it rounds.
        outputs: Encodings of model outputs that it rounds, by their number.
    """

    ports: Mapping[Port, Reading] = field(default_factory=dict[Port, Reading])
    outputs: Mapping[int, Reading] = field(default_factory=dict[int, Reading])


def switches(
    points: RoundingPoints, permissions: Mapping[int, Permission], fmt: Format
) -> tuple[Switch, ...]:
    """A switch for each point, then one for each unit's constants.

    For a format whose encodings have parameters they are those of the op that reads.
    """
    constants = [
        [(node, index) for node, indices in ports.items() for index in indices]
        for ports in points.weights
    ]
    values = (_switch(permissions, p.places, fmt, p.encoding) for p in points.points)
    return (*values, *(_switch(permissions, of, fmt) for of in constants))


def _switch(
    permissions: Mapping[int, Permission],
    places: Iterable[Place],
    fmt: Format,
    shared: Reading | None = None,
) -> Switch:
    ports: dict[Port, Reading] = {}
    outputs: dict[int, Reading] = {}
    plain = fmt.result if fmt.has_scales else fmt
    for node, index in places:
        permission = None if node is None else permissions.get(node)
        of = permission and permission.encodings.get(fmt)
        encoding = shared or (of and of.at(index)) or plain
        if encoding is Format.FP32:  # it stays as it is
            continue
        if node is None:
            outputs[index] = encoding
        else:
            ports[node, index] = encoding
    return Switch(ports=ports, outputs=outputs)
