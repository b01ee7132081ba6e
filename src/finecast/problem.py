"""From units, costs and sensitivities to the assignment problem that ``solve`` answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finecast.assignment import PINNED_HIGH, PINNED_LOW, Problem
from finecast.formats import Format
from finecast.graph import Graph, Value
from finecast.ops import READS_ANY_FORMAT
from finecast.rules import Permission
from finecast.sensitivity import Sensitivity
from finecast.units import RoundingPoints, Units

# Seconds of one cast of a value, down and up.
CastCost = Callable[[Value], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Seconds that each unit takes in fp32 and in the low format."""

    high_s: NDArray[np.float64]
    low_s: NDArray[np.float64]


def build_problem(
    graph: Graph,
    units: Units,
    points: RoundingPoints,
    permissions: Mapping[int, Permission],
    times: UnitTimes,
    cast_cost: CastCost,
    sensitivity: Sensitivity,
    *,
    io: Mapping[int, Format],
) -> Problem:
    """State the choice between fp32 and the low format for every unit.

    Law: the cost of an assignment is the sum of unit times, of one cast per value and
    direction that needs one, and lam times the squared error of every rounding point that
    the assignment rounds, each once.

    Args:
        graph: The graph.
        units: What is decided.
        points: Where a plan can round.
        permissions: What the rules left; units without fp32 must be low.
        times: Seconds by unit.
        cast_cost: Seconds by value.
        sensitivity: Squared relative output error by rounding point.
        io: Declared low formats of inputs and outputs, by value id.
    """
    count = len(units.members)
    must_be_low = np.array(
        [Format.FP32 not in permissions[nodes[0]].formats for nodes in units.members],
        dtype=bool,
    ).reshape(count)
    error = np.zeros(count)
    error[list(points.weight_units)] = sensitivity.weights
    table = _ValueTable()
    sides: dict[int, list[int]] = {}
    for value in graph.values:
        if value.format is not Format.FP32 or value.constant is not None:
            continue
        producer = _producer(graph, units, value, io)
        consumers = _consumers(graph, units, value, io)
        down, up = cast_cost(value)
        table.add(producer, consumers, down, up, 0.0)
        if value.id in points.class_of:
            sides.setdefault(points.class_of[value.id], []).extend((producer, *consumers))
    for k, touched in sides.items():
        # One more value stands for the class: rounded as soon as anything it touches is low.
        table.add(PINNED_HIGH, touched, 0.0, 0.0, float(sensitivity.values[k]))
    return table.problem(
        time_high=np.where(must_be_low, np.inf, times.high_s),
        time_low=times.low_s,
        error=error,
    )


def _producer(graph: Graph, units: Units, value: Value, io: Mapping[int, Format]) -> int:
    if value.producer is None:
        return PINNED_LOW if value.id in io and value.is_input else PINNED_HIGH
    if value.producer not in units.of:
        return PINNED_HIGH
    node = graph.nodes[value.producer]
    follows = any(v.id == value.id for v in graph.following_outputs(node))
    return units.of[value.producer] if follows else PINNED_HIGH


def _consumers(
    graph: Graph, units: Units, value: Value, io: Mapping[int, Format]
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
        found.append(PINNED_LOW if value.id in io else PINNED_HIGH)
    return found


class _ValueTable:
    """Rows of the problem's values, gathered in lists."""

    def __init__(self) -> None:
        self.producer: list[int] = []
        self.pointer: list[int] = [0]
        self.consumers: list[int] = []
        self.costs: list[tuple[float, float, float]] = []

    def add(
        self, producer: int, consumers: list[int], down: float, up: float, error: float
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
