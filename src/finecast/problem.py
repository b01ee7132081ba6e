"""From units, costs and sensitivities to the assignment problem that the solvers answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finecast.assignment import PINNED_HIGH, Floats, Problem
from finecast.cost import CostModel
from finecast.formats import Format
from finecast.graph import Graph, Value
from finecast.labelling import LabelProblem, Rows, Touched
from finecast.ops import READS_ANY_FORMAT
from finecast.rules import Permission
from finecast.sensitivity import Sensitivity
from finecast.units import RoundingPoints, Units

# Seconds of one cast of a value from one format to another.
CastTime = Callable[[Value, Format, Format], float]
# Seconds by unit in each format, fp32 first.
Times = Mapping[Format, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """What rounding to one low format does to the outputs.

    ``units`` is the squared error that each unit's own constants add; of the units, or pins,
    ``lists[r]`` any one in the format adds ``errors[r]``, once.
    """

    units: NDArray[np.float64]
    lists: Sequence[Sequence[int]]
    errors: NDArray[np.float64]


def unit_times(graph: Graph, units: Units, cost: CostModel, fmt: Format) -> Floats:
    """Seconds of each unit in ``fmt``; those of its ops add up."""
    return np.array(
        [
            sum(cost.node_time_s(graph, graph.nodes[i], fmt) for i in nodes)
            for nodes in units.members
        ]
    )


def build_problem(
    graph: Graph,
    units: Units,
    permissions: Mapping[int, Permission],
    times: Times,
    cast_time: CastTime,
    rounded: Roundings,
    *,
    io: Mapping[int, Format],
) -> Problem:
    """State the choice between fp32 and one low format for every unit.

    Law: the cost of an assignment is the sum of unit times, of one cast per value and
    direction that needs one, and lam times the squared error of every rounding that the
    assignment does, each once.

    Args:
        graph: The graph.
        units: What is decided.
        permissions: What the rules left; units without fp32 must be low.
        times: Seconds by unit.
        cast_time: Seconds of a value's cast.
        rounded: What rounding does.
        io: Declared low formats of inputs and outputs, by value id.
    """
    high, low = times
    table = _ValueTable()
    stores = not low.operands_only
    for value, producer, consumers in _ports(graph, units, pins(io, (*times,)), stores=stores):
        down, up = cast_time(value, high, low), cast_time(value, low, high)
        table.add(producer, consumers, down, up, 0.0)
    for touched, error in zip(rounded.lists, rounded.errors, strict=True):
        # One more value stands for the class: rounded as soon as anything it touches is low.
        table.add(PINNED_HIGH, touched, 0.0, 0.0, float(error))
    must_be_low = _forbidden(units, permissions, high)
    return table.problem(
        time_high=np.where(must_be_low, np.inf, times[high]),
        time_low=times[low],
        error=rounded.units,
    )


def build_label_problem(
    graph: Graph,
    units: Units,
    permissions: Mapping[int, Permission],
    times: Times,
    cast_time: CastTime,
    rounded: Sequence[Roundings],
    *,
    io: Mapping[int, Format],
) -> LabelProblem:
    """State the choice among fp32 and several low formats, labels in the order of ``times``.

    Law and arguments as ``build_problem``; ``rounded`` has one entry for each low format.
    """
    formats = (*times,)
    rests = [Format.FP32 if f.operands_only else f for f in formats]
    values = list(_ports(graph, units, pins(io, formats), stores=True))
    cast = np.array(
        [[[cast_time(v, rest, f) for v, _, _ in values] for f in formats] for rest in rests]
    )
    forbidden = [_forbidden(units, permissions, f) for f in formats]
    return LabelProblem(
        time=np.where(np.stack(forbidden, axis=1), np.inf, np.stack([*times.values()], 1)),
        error=np.stack([np.zeros(len(units.members)), *(r.units for r in rounded)], axis=1),
        producer=np.array([p for _, p, _ in values], dtype=np.int64),
        consumers=Rows.of([c for _, _, c in values]),
        cast=cast.reshape(len(formats), len(formats), len(values)),
        touched=tuple(
            Touched(rows=Rows.of(r.lists), error=np.asarray(r.errors, dtype=np.float64))
            for r in rounded
        ),
    )


def roundings(
    graph: Graph,
    units: Units,
    points: RoundingPoints,
    sensitivity: Sensitivity,
    low: Format,
    pinned: Mapping[int, int],
) -> Roundings:
    """What rounding to ``low`` does, point by point: a class is touched by all its ports.

    Args:
        graph: The graph.
        units: What is decided.
        points: Where a plan can round to the format.
        sensitivity: What that does to the outputs.
        low: The format.
        pinned: Pins of declared inputs and outputs.
    """
    error = np.zeros(len(units.members))
    error[list(points.weight_units)] = sensitivity.weights
    touched: dict[int, list[int]] = {}
    for value, producer, consumers in _ports(
        graph, units, pinned, stores=not low.operands_only
    ):
        if value.id in points.class_of:
            known = touched.setdefault(points.class_of[value.id], [])
            known.extend((producer, *consumers))
    return Roundings(
        units=error, lists=[*touched.values()], errors=sensitivity.values[[*touched]]
    )


def pins(io: Mapping[int, Format], formats: Sequence[Format]) -> dict[int, int]:
    """What stands for the declared format of each input and output; -1 is fp32.

    A format that is none of ``formats`` counts as the first low one.
    """
    return {v: -1 - (formats.index(f) if f in formats else 1) for v, f in io.items()}


def _forbidden(
    units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> NDArray[np.bool_]:
    found = [fmt not in permissions[nodes[0]].formats for nodes in units.members]
    return np.array(found, dtype=bool).reshape(len(units.members))


def _ports(
    graph: Graph, units: Units, pinned: Mapping[int, int], *, stores: bool
) -> Iterator[tuple[Value, int, list[int]]]:
    """Each value that may be cast, with the units or pins that make and that read it."""
    for value in graph.values:
        if value.format is Format.FP32 and value.constant is None:
            producer = _producer(graph, units, value, pinned, stores=stores)
            yield value, producer, _consumers(graph, units, value, pinned)


def _producer(
    graph: Graph, units: Units, value: Value, pinned: Mapping[int, int], *, stores: bool
) -> int:
    if value.producer is None:
        return pinned[value.id] if value.id in pinned and value.is_input else PINNED_HIGH
    if value.producer not in units.of or not stores:
        return PINNED_HIGH
    node = graph.nodes[value.producer]
    follows = any(v.id == value.id for v in graph.following_outputs(node))
    return units.of[value.producer] if follows else PINNED_HIGH


def _consumers(
    graph: Graph, units: Units, value: Value, pinned: Mapping[int, int]
) -> list[int]:
    found: list[int] = []
    for node_id in value.uses:
        node = graph.nodes[node_id]
        if node.native in READS_ANY_FORMAT:
            continue
        for index, follows in zip(node.inputs, node.follows_in, strict=True):
            if index == value.id:  # it may be read at several ports
                found.append(units.of.get(node_id, PINNED_HIGH) if follows else PINNED_HIGH)
    if value.is_output:
        found.append(pinned.get(value.id, PINNED_HIGH))
    return found


class _ValueTable:
    """Rows of the problem's values, gathered in lists."""

    def __init__(self) -> None:
        self.producer: list[int] = []
        self.pointer: list[int] = [0]
        self.consumers: list[int] = []
        self.costs: list[tuple[float, float, float]] = []

    def add(
        self, producer: int, consumers: Sequence[int], down: float, up: float, error: float
    ) -> None:
        self.producer.append(producer)
        self.consumers.extend(consumers)
        self.pointer.append(len(self.consumers))
        self.costs.append((down, up, error))

    def problem(
        self,
        *,
        time_high: NDArray[np.float64],
        time_low: NDArray[np.float64],
        error: NDArray[np.float64],
    ) -> Problem:
        costs = np.array(self.costs, dtype=np.float64).reshape(-1, 3)
        return Problem(
            time_high=time_high,
            time_low=time_low,
            error=error,
            producer=np.array(self.producer, dtype=np.int64),
            consumer_ptr=np.array(self.pointer, dtype=np.int64),
            consumer_unit=np.array(self.consumers, dtype=np.int64),
            down_cost=costs[:, 0],
            up_cost=costs[:, 1],
            value_error=costs[:, 2],
        )
