"""From units, costs and sensitivities to the problem that the solvers answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.ops import READS_ANY_FORMAT
from finecast.ops.flops import Shape, Shapes
from finecast.planning.cost import CostModel
from finecast.planning.points import RoundingPoints
from finecast.planning.sensitivity import Saturation, Sensitivity
from finecast.planning.units import Units
from finecast.rules import Permission
from finecast.solver.assignment import PINNED_HIGH, Floats
from finecast.solver.labelling import LabelProblem, Rows, Touched

# Seconds of one cast of a value from one format to another.
CastTime = Callable[[Value, Format, Format], float]
# Seconds by unit in each format, fp32 first.
Times = Mapping[Format, NDArray[np.float64]]
# What the copy of a constant costs that ops in a format read.
ConstantCost = Callable[[Value, Format], float]


class Priced(Enum):
    """What the costs of an analysis are; ``say`` puts one in words."""

    TIME = (1e3, "ms")
    SIZE = (1e-6, "MB stored")
    MEMORY = (1e-6, "MB in memory")

    def say(self, cost: float) -> str:
        """A cost in its unit."""
        factor, unit = self.value
        return f"{factor * cost:.4g} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """What rounding to one low format does to the outputs.

    A unit in the format adds the squared error ``units[u]``, of its own constants. Rounding r
    adds ``errors[r]``, once, if any of the units or pins ``lists[r]`` has the format.
    """

    units: NDArray[np.float64]
    lists: Sequence[Sequence[int]]
    errors: NDArray[np.float64]

    @property
    def total(self) -> float:
        """The squared error of everything rounded."""
        return float(self.units.sum() + self.errors.sum())


def unit_times(graph: Graph, units: Units, cost: CostModel, fmt: Format) -> Floats:
    """Seconds of each unit in ``fmt``; those of its ops add up."""
    return np.array(
        [
            sum(cost.node_time_s(graph, graph.nodes[i], fmt) for i in nodes)
            for nodes in units.members
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What the choice among plans of one graph rests on.

    Attributes:
        units: What is decided.
        times: Seconds by unit in each format, fp32 first; or what is ``priced``, in its place.
        cast_time: Seconds of a value's cast, or the same.
        rounded: What rounding to each low format does to the outputs.
        saturation: How the errors of roundings add up.
        io: Declared formats of inputs and outputs, by value id.
        lowest_s: Predicted seconds of the plan of everything that may be low.
        probes: Runs of the model that the errors took.
        shapes: Observed shapes of values, by id.
        priced: What the costs are.
        constant_cost: Of each copy of a constant; None where they cost nothing.
    """

    units: Units
    times: Times
    cast_time: CastTime
    rounded: Mapping[Format, Roundings]
    io: Mapping[int, Format] = field(default_factory=dict[int, Format])
    lowest_s: float = math.inf
    probes: int = 0
    shapes: Shapes = field(default_factory=dict[int, Shape])
    priced: Priced = Priced.TIME
    constant_cost: ConstantCost | None = None
    saturation: Saturation = field(default_factory=Saturation)

    @classmethod
    def of(
        cls,
        graph: Graph,
        units: Units,
        cost: CostModel,
        rounded: Mapping[Format, Roundings],
        *,
        io: Mapping[int, Format] | None = None,
        lowest_s: float = math.inf,
        probes: int = 0,
    ) -> Analysis:
        """With times by ``cost``."""
        return cls(
            units=units,
            times={f: unit_times(graph, units, cost, f) for f in (Format.FP32, *rounded)},
            cast_time=cost.cast_time_s,
            rounded=rounded,
            io=io or {},
            lowest_s=lowest_s,
            probes=probes,
            shapes=cost.shapes,
        )


def build_problem(
    graph: Graph, permissions: Mapping[int, Permission], analysis: Analysis
) -> LabelProblem:
    """State the choice among fp32 and low formats for every unit, labels in their order.

    Law: the cost of a labelling is the sum of unit times, of one cast per value and format
    that needs one, of each constant in each format that it is read in, where constants cost
    anything, and lam times the squared error of every rounding that the labelling does, each
    once. The casts are those of ``edits``.

    Args:
        graph: The graph.
        permissions: What the rules left; units without fp32 must be low.
        analysis: What the choice rests on.
    """
    units, times = analysis.units, analysis.times
    rounded = [*analysis.rounded.values()]
    formats = (*times,)
    forbidden = {f: _forbidden(units, permissions, f) for f in formats}
    permitted = ~np.stack([*forbidden.values()], axis=1)
    rows = list(_rows(graph, units, forbidden, analysis.cast_time, analysis.io))
    rows += _constant_rows(graph, units, formats, analysis.constant_cost)
    cast = np.array([table for _, _, table in rows], dtype=np.float64)
    return LabelProblem(
        time=np.where(permitted, np.stack([*times.values()], axis=1), np.inf),
        error=np.stack([np.zeros(len(units.members)), *(r.units for r in rounded)], axis=1),
        producer=np.array([p for p, _, _ in rows], dtype=np.int64),
        consumers=Rows.of([c for _, c, _ in rows]),
        cast=cast.reshape(-1, len(formats), len(formats)).transpose(1, 2, 0),
        touched=tuple(
            Touched(rows=Rows.of(r.lists), error=np.asarray(r.errors, dtype=np.float64))
            for r in rounded
        ),
    )


def _rows(
    graph: Graph,
    units: Units,
    forbidden: Mapping[Format, NDArray[np.bool_]],
    cast_time: CastTime,
    io: Mapping[int, Format],
) -> Iterator[tuple[int, list[int], Floats]]:
    """The producer, the consumers and the table of casts of each value.

    ``forbidden`` says of each format, in the labels' order, which units cannot have it.
    """
    formats = (*forbidden,)

    def price(value: Value, readers: Sequence[int], source: Format, to: Format) -> float:
        """From an op in ``source``: one that only reads its operands in it gives fp32.

        But a kernel on codes was timed where all that can take codes do. Where all readers
        can, it gave codes, and fp32 has a price; where some can, it gave fp32, and codes have.
        One whose constants alone are low reads and gives fp32.
        """
        source, to = (Format.FP32 if f.constants_only else f for f in (source, to))
        if not source.scaled:
            return cast_time(value, Format.FP32 if source.operands_only else source, to)
        coding = [unit >= 0 and not forbidden[source][unit] for unit in readers]
        if to is source:
            return 0.0 if all(coding) else cast_time(value, Format.FP32, to)
        wide = cast_time(value, source, Format.FP32) if all(coding) else 0.0
        return wide + cast_time(value, Format.FP32, to)

    everyone = [-1 - label for label in range(len(formats))]
    for value, producer, consumers in _ports(graph, units, pins(io, formats)):
        priced = partial(price, value, tuple(consumers))
        made, declared = formats, io.get(value.id)
        if declared is not None and declared not in formats:
            if value.is_output:
                consumers.pop()  # the output itself, which no label stands for
            if value.is_input:
                made = [declared] * len(formats)
            else:
                # One more cast whatever is chosen: all labels "read" the value, and each
                # pays for the next one's reading alone.
                last = [priced(source, declared) for source in formats]
                yield producer, everyone, np.roll(np.diag(last), 1, axis=1)
        table = [[priced(source, to) for to in formats] for source in made]
        yield producer, consumers, np.array(table)


def _constant_rows(
    graph: Graph, units: Units, formats: Sequence[Format], cost: ConstantCost | None
) -> Iterator[tuple[int, list[int], Floats]]:
    """Of each constant what its copies cost: one in each format that any op reads it in."""
    for value in graph.values if cost is not None else ():
        if value.constant is not None and value.format is Format.FP32:
            copies = [cost(value, fmt) for fmt in formats] if cost is not None else []
            table = np.array([copies] * len(formats))
            yield PINNED_HIGH, _consumers(graph, units, value, {}), table


def roundings(
    units: Units,
    points: RoundingPoints,
    sensitivity: Sensitivity,
    low: Format,
    pinned: Mapping[int, int],
) -> Roundings:
    """What rounding to ``low`` does, point by point.

    Args:
        units: What is decided.
        points: Where a plan can round to the format.
        sensitivity: What that does to the outputs.
        low: The format; one for operands alone is not what an op stores.
        pinned: Pins of declared inputs and outputs.
    """
    error = np.zeros(len(units.members))
    error[list(points.weight_units)] = sensitivity.weights
    lists = [
        (
            *point.readers,
            *(() if low.operands_only else point.makers),
            *(pinned[value] for value in point.ends if value in pinned),
        )
        for point in points.points
    ]
    return Roundings(units=error, lists=lists, errors=sensitivity.values)


def pins(io: Mapping[int, Format], formats: Sequence[Format]) -> dict[int, int]:
    """What stands for the declared format of each input and output; -1 is fp32.

    One that is none of ``formats`` has no pin: its casts do not depend on the choice.
    """
    return {v: -1 - formats.index(f) for v, f in io.items() if f in formats}


def _forbidden(
    units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> NDArray[np.bool_]:
    # Of a unit's ops those take a format for operands that may; the others stay as they are.
    some = any if fmt.operands_only else all
    found = [not some(fmt in permissions[n].formats for n in m) for m in units.members]
    return np.array(found, dtype=bool).reshape(len(units.members))


def _ports(
    graph: Graph, units: Units, pinned: Mapping[int, int]
) -> Iterator[tuple[Value, int, list[int]]]:
    """Each value that may be cast, with the units or pins that make and that read it."""
    for value in graph.values:
        if value.format is Format.FP32 and value.constant is None:
            producer = _producer(graph, units, value, pinned)
            yield value, producer, _consumers(graph, units, value, pinned)


def _producer(graph: Graph, units: Units, value: Value, pinned: Mapping[int, int]) -> int:
    if value.producer is None:
        return pinned[value.id] if value.id in pinned and value.is_input else PINNED_HIGH
    if value.producer not in units.of:
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
