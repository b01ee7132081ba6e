"""The choice of formats as a problem for the solvers, and the plans of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import READS_ANY_FORMAT
from finecast.ops.flops import Shape, Shapes
from finecast.planning.cost import CostModel
from finecast.planning.plan import Plan
from finecast.planning.points import RoundingPoints
from finecast.planning.sensitivity import Saturation, Sensitivity
from finecast.planning.units import Units, deciding
from finecast.rules import Permission
from finecast.solver.assignment import PINNED_HIGH, Bools, Floats, Ints
from finecast.solver.frontier import Step
from finecast.solver.labelling import (
    Labelling,
    LabelProblem,
    RoundingErrors,
    Rows,
    SizeLimit,
)

# Seconds of one cast of a value from one format to another.
CastTime = Callable[[Value, Format, Format], float]
# Seconds that a node takes in a format.
NodeTime = Callable[[Node, Format], float]
# Seconds by unit in each format, fp32 first.
Times = Mapping[Format, NDArray[np.float64]]
# The format in which numbers of a format rest in memory while a model runs.
Widened = Callable[[Format], Format]
# Cost of the copy of a constant that ops in a format read.
ConstantCost = Callable[[Value, Format], float]


class Priced(Enum):
    """What the costs of an analysis count; values are a factor and unit for display."""

    TIME = (1e3, "ms")
    SIZE = (1e-6, "MB stored")
    MEMORY = (1e-6, "MB in memory")

    def say(self, cost: float) -> str:
        """A cost as text, with its unit."""
        factor, unit = self.value
        return f"{factor * cost:.4g} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roundings:
    """Squared relative output errors of rounding to one low format.

    A unit u in the format adds ``units[u]``, the error of its constants, and ``shared[u]``,
    what changes as all readers of its result read the same rounding, which may be negative.
    Rounding r adds ``errors[r]``, once, if any of the units or pins in ``lists[r]`` has the
    format. ``saturation`` is how all these add up.
    ``is_even`` says that the errors were not measured one by one, but shared out evenly.
    """

    units: NDArray[np.float64]
    shared: NDArray[np.float64]
    lists: Sequence[Sequence[int]]
    errors: NDArray[np.float64]
    saturation: Saturation = field(default_factory=Saturation)
    is_even: bool = False

    @property
    def total(self) -> float:
        """The sum of all single squared errors."""
        return float(self.units.sum()) + self.values

    @property
    def values(self) -> float:
        """The sum of the single squared errors of values, without those of constants."""
        return float(self.errors.sum() + self.shared.sum())

    @property
    def by_unit(self) -> NDArray[np.float64]:
        """The squared error of the values that each unit rounds if it alone is low."""
        unit_errors = self.shared.copy()
        for units, error in zip(self.lists, self.errors, strict=True):
            for unit in {u for u in units if u >= 0}:
                unit_errors[unit] += error
        return unit_errors


def unit_times(graph: Graph, units: Units, cost: CostModel, fmt: Format) -> Floats:
    """Seconds of each unit in ``fmt``: the sum over its ops."""
    return np.array(
        [
            sum(cost.node_time_s(graph, graph.nodes[i], fmt) for i in nodes)
            for nodes in units.members
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLimit:
    """The most bytes that the copies of constants may take in a stored model.

    ``stored`` gives those of the copy of a constant that ops in a format read; ``fixed`` are
    those of constants that no plan changes.
    """

    most: float
    stored: ConstantCost
    fixed: float = 0.0


def as_it_is(fmt: Format) -> Format:
    """``Widened`` of a device that widens no format."""
    return fmt


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """All data for the choice among plans of one graph.

    Attributes:
        units: The units whose formats are chosen.
        times: Cost by unit in each format, fp32 first: seconds, or bytes as ``priced`` says.
        cast_time: Cost of a value's cast, in the same unit.
        rounded: Output errors of rounding to each low format.
        io: Declared formats of inputs and outputs, by value id.
        carried: The unit that decides the format of an input or output, by value id.
        probes: Number of runs of the model that measured the errors.
        shapes: Observed shapes of values, by id.
        priced: What the costs count.
        constant_cost: Cost of each copy of a constant; None if constants cost nothing.
        limit: What the stored constants may take at most; None for any amount.
        stored: The format in which numbers of a format rest in memory on the device.
        node_time: Seconds of a node of the graph in a format, of each node and not only of
            those in a unit; None if that is not known.
    """

    units: Units
    times: Times
    cast_time: CastTime
    rounded: Mapping[Format, Roundings]
    io: Mapping[int, Format] = field(default_factory=dict[int, Format])
    carried: Mapping[int, int] = field(default_factory=dict[int, int])
    probes: int = 0
    shapes: Shapes = field(default_factory=dict[int, Shape])
    priced: Priced = Priced.TIME
    constant_cost: ConstantCost | None = None
    limit: WeightLimit | None = None
    stored: Widened = as_it_is
    node_time: NodeTime | None = None
    # What was made of it, for the next one who asks.
    _alone: dict[Format, Analysis] = field(
        init=False, repr=False, compare=False, default_factory=dict[Format, Any]
    )
    _stated: list[tuple[Graph, Mapping[int, Permission], LabelProblem]] = field(
        init=False, repr=False, compare=False, default_factory=list[Any]
    )

    def only(self, fmt: Format) -> Analysis:
        """The same without other low formats than ``fmt``."""
        if fmt not in self._alone:
            times = {Format.FP32: self.times[Format.FP32], fmt: self.times[fmt]}
            self._alone[fmt] = replace(self, times=times, rounded={fmt: self.rounded[fmt]})
        return self._alone[fmt]

    def problem(self, graph: Graph, permissions: Mapping[int, Permission]) -> LabelProblem:
        """As ``build_problem`` states it, once for the same graph and permissions."""
        for of, permitted, stated in self._stated:
            if of is graph and permitted is permissions:
                return stated
        problem = build_problem(graph, permissions, self)
        self._stated.append((graph, permissions, problem))
        return problem

    def together(self, errors: Iterable[float]) -> float:
        """The squared error of roundings to each low format, whose single errors have sums.

        Law: the error of roundings to one format does not depend on which others there are.

        Args:
            errors: The sum of the single squared errors for each format of ``rounded``.
        """
        sums = zip(self.rounded.values(), errors, strict=True)
        return sum(rounded.saturation.together(added) for rounded, added in sums)

    @classmethod
    def of(
        cls,
        graph: Graph,
        units: Units,
        cost: CostModel,
        rounded: Mapping[Format, Roundings],
        *,
        io: Mapping[int, Format] | None = None,
        probes: int = 0,
    ) -> Analysis:
        """An analysis with the times of a cost model."""
        return cls(
            units=units,
            times={f: unit_times(graph, units, cost, f) for f in (Format.FP32, *rounded)},
            cast_time=cost.cast_time_s,
            rounded=rounded,
            io=io or {},
            probes=probes,
            shapes=cost.shapes,
            stored=cost.stored,
            node_time=partial(cost.node_time_s, graph),
        )


def build_problem(
    graph: Graph, permissions: Mapping[int, Permission], analysis: Analysis
) -> LabelProblem:
    """The choice of a format for every unit; label k is the k-th format of ``analysis.times``.

    Law: the cost of a labelling is the sum of unit times, of one cast per value and format
    that needs one, of each constant's cost in each format that it is read in, and of lam
    times the squared error of each rounding that the labelling does. Casts are counted as
    ``edits`` makes them; but where some readers of a value have bf16 and others weights that
    are decoded to bf16, a cast and a rounding count for each of both.
    """
    units, times = analysis.units, analysis.times
    rounded = [*analysis.rounded.values()]
    formats = (*times,)
    forbidden = {f: _forbidden(units, permissions, f) for f in formats}
    permitted = ~np.stack([*forbidden.values()], axis=1)
    rows = list(_rows(graph, analysis, forbidden))
    rows += _constant_rows(graph, units, formats, analysis.constant_cost)
    cast = np.array([table for _, _, table in rows], dtype=np.float64)
    return LabelProblem(
        time=np.where(permitted, np.stack([*times.values()], axis=1), np.inf),
        error=np.stack(
            [np.zeros(len(units.members)), *(r.units + r.shared for r in rounded)], axis=1
        ),
        producer=np.array([p for p, _, _ in rows], dtype=np.int64),
        consumers=Rows.of([c for _, c, _ in rows]),
        cast=cast.reshape(-1, len(formats), len(formats)).transpose(1, 2, 0),
        roundings=tuple(
            RoundingErrors(rows=Rows.of(r.lists), error=np.asarray(r.errors, dtype=np.float64))
            for r in rounded
        ),
        limit=None if analysis.limit is None else _size_limit(graph, analysis, analysis.limit),
    )


def _size_limit(graph: Graph, analysis: Analysis, limit: WeightLimit) -> SizeLimit:
    """The limit as the solver takes it: a constant that one unit reads is that unit's."""
    units, formats = analysis.units, (*analysis.times,)
    own = np.zeros((len(units.members), len(formats)))
    table = np.full((len(formats), len(formats)), limit.fixed)
    shared: list[tuple[list[int], Floats]] = [([PINNED_HIGH], table)]
    for _, readers, table in _constant_rows(graph, units, formats, limit.stored):
        if len(set(readers)) == 1 and readers[0] >= 0:
            own[readers[0]] += table[0]
        else:
            shared.append((readers, table))
    cast = np.array([table for _, table in shared], dtype=np.float64)
    nothing = RoundingErrors(rows=Rows.of([]), error=np.zeros(0))
    sizes = LabelProblem(
        time=own,
        error=np.zeros_like(own),
        producer=np.full(len(shared), PINNED_HIGH),
        consumers=Rows.of([readers for readers, _ in shared]),
        cast=cast.reshape(-1, len(formats), len(formats)).transpose(1, 2, 0),
        roundings=(nothing,) * (len(formats) - 1),
    )
    return SizeLimit(sizes=sizes, most=limit.most)


def _rows(
    graph: Graph, analysis: Analysis, forbidden: Mapping[Format, NDArray[np.bool_]]
) -> Iterator[tuple[int, list[int], Floats]]:
    """For each value its producer, its consumers, and the costs [producer's, reader's label].

    ``forbidden`` has, for each format in the labels' order, which units may not have it.
    """
    formats, cast_time, io = (*forbidden,), analysis.cast_time, analysis.io
    decided = {**pins(io, formats), **analysis.carried}

    def price(value: Value, readers: Sequence[int], source: Format, to: Format) -> float:
        """Cost for readers in ``to`` of a value made by an op in ``source``.

        An op in a format for operands only, or for constants only, stores its result in fp32.
        A kernel on codes was timed in the plan where every op that can read codes does. If all
        readers can, it stored codes there, and a reader in fp32 costs a conversion; if not
        all can, it stored fp32, and readers of codes cost a cast.
        """
        source, to = source.reads, to.reads
        if not source.runs_on_codes:
            return cast_time(value, source.result, to)
        stored_codes = all(unit >= 0 and not forbidden[source][unit] for unit in readers)
        if to is source:
            return 0.0 if stored_codes else cast_time(value, Format.FP32, to)
        wide = cast_time(value, source, Format.FP32) if stored_codes else 0.0
        return wide + cast_time(value, Format.FP32, to)

    everyone = [-1 - label for label in range(len(formats))]
    for value, producer, consumers in _ports(graph, analysis.units, decided):
        priced = partial(price, value, tuple(consumers))
        made, declared = formats, io.get(value.id)
        if value.is_input and value.id in analysis.carried:
            made = [fmt.result for fmt in formats]
        if declared is not None and declared not in formats:
            if value.is_output:
                consumers.pop()  # the model's output: its format has no label
            if value.is_input:
                made = [declared] * len(formats)
            else:
                # One more cast, to ``declared``, whatever is chosen. A pin of every label
                # reads this row, so a producer pays all of its row of the table: one cost,
                # off the diagonal, as ``two_sided`` wants it.
                last = [priced(source, declared) for source in formats]
                yield producer, everyone, np.roll(np.diag(last), 1, axis=1)
        table = [[priced(source, to) for to in formats] for source in made]
        yield producer, consumers, np.array(table)


def _constant_rows(
    graph: Graph, units: Units, formats: Sequence[Format], cost: ConstantCost | None
) -> Iterator[tuple[int, list[int], Floats]]:
    """Rows that charge each constant for a copy in each format that any op reads it in."""
    if cost is None:
        return
    for value in graph.values:
        if value.constant is not None and value.format is Format.FP32:
            table = np.array([[cost(value, fmt) for fmt in formats]] * len(formats))
            yield PINNED_HIGH, _consumers(graph, units, value, {}), table


def roundings(
    units: Units,
    points: RoundingPoints,
    sensitivity: Sensitivity,
    pinned: Mapping[int, int],
) -> Roundings:
    """The errors of rounding to a format, with the units and pins that cause each.

    Args:
        units: The units.
        points: Where a plan can round to the format.
        sensitivity: The errors by point and by unit of weights.
        pinned: Pins of declared inputs and outputs, by value id.
    """
    error = np.zeros(len(units.members))
    error[list(points.weight_units)] = sensitivity.weights
    shared = np.zeros(len(units.members))
    shared[[unit for unit, _ in points.shared]] = sensitivity.shared
    lists = [
        (
            *point.readers,
            *point.makers,
            *(pinned[value] for value in point.ends if value in pinned),
        )
        for point in points.points
    ]
    return Roundings(
        units=error,
        shared=shared,
        lists=lists,
        errors=sensitivity.values,
        saturation=sensitivity.saturation,
        is_even=sensitivity.is_even,
    )


def pins(io: Mapping[int, Format], formats: Sequence[Format]) -> dict[int, int]:
    """The pin (-1 minus the label) of the declared format of each input and output.

    A value declared in a format that is none of ``formats`` has no pin.
    """
    return {v: -1 - formats.index(f) for v, f in io.items() if f in formats}


def _forbidden(
    units: Units, permissions: Mapping[int, Permission], fmt: Format
) -> NDArray[np.bool_]:
    """Which units may not have ``fmt``.

    One op has to permit it. If results are stored low, all others have to permit what is
    stored; beside a format for operands they stay fp32.
    """
    stores = {fmt, fmt.storage}

    def may(members: Sequence[int]) -> bool:
        permitted = [permissions[n].formats for n in members]
        fits = not fmt.encodes_results or not any(map(stores.isdisjoint, permitted))
        return fits and any(fmt in formats for formats in permitted)

    return np.array([not may(m) for m in units.members], dtype=bool)


def _ports(
    graph: Graph, units: Units, pinned: Mapping[int, int]
) -> Iterator[tuple[Value, int, list[int]]]:
    """Each value that may be cast, the unit or pin that makes it, and those that read it.

    ``pinned`` has the pins of declared inputs and outputs, and the unit of carried state.
    """
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
    consumers: list[int] = []
    for node_id in value.uses:
        node = graph.nodes[node_id]
        if node.native in READS_ANY_FORMAT:
            continue
        for index, follows in zip(node.inputs, node.follows_in, strict=True):
            if index == value.id:  # it may be read at several ports
                consumers.append(
                    units.of.get(node_id, PINNED_HIGH) if follows else PINNED_HIGH
                )
    if value.is_output:
        consumers.append(pinned.get(value.id, PINNED_HIGH))
    return consumers


# The error that the measured sensitivities predict for any plan.


def predicted_error(analysis: Analysis, formats: Mapping[int, Format]) -> float:
    """Squared relative output error if node i has ``formats[i]``.

    A unit of which any op is low counts as low, so roundings are never left out.
    """
    return analysis.together(sum(_parts(analysis, fmt, formats)) for fmt in analysis.rounded)


def predicted_parts(
    analysis: Analysis, formats: Mapping[int, Format]
) -> tuple[float, float] | None:
    """Squared relative output errors of codes of constants alone, and of values alone.

    Node i has ``formats[i]``; the errors are those of formats with scales. None if the plan
    has not both, so that there is nothing to tell apart.
    """
    none = (0.0, 0.0)
    coded = [
        _parts(analysis, fmt, formats) if fmt.has_scales else none for fmt in analysis.rounded
    ]
    constants, values = map(analysis.together, zip(*coded, strict=True)) if coded else none
    return (constants, values) if constants and values else None


def _parts(
    analysis: Analysis, fmt: Format, formats: Mapping[int, Format]
) -> tuple[float, float]:
    """The summed squared errors of constants and of values that are rounded to ``fmt``."""
    rounded = analysis.rounded[fmt]
    low = {
        unit
        for unit, members in enumerate(analysis.units.members)
        if fmt in deciding([formats.get(n, Format.FP32) for n in members])
    }
    values = (
        float(error)
        for units, error in zip(rounded.lists, rounded.errors, strict=True)
        if not low.isdisjoint(units)
    )
    shared = sum(float(rounded.shared[u]) for u in low)
    return sum(float(rounded.units[u]) for u in low), sum(values) + shared


# ------------------------------------------------------------ a choice, and a plan made of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A format for each unit, with the predicted cost and squared relative output error.

    Attributes:
        formats: The format of each unit.
        time_s: Predicted seconds, or bytes where plans are priced in bytes.
        error: Predicted squared relative output error.
        added: The sum of the single squared errors of its roundings.
        index: Its step of the frontier; None for none.
    """

    formats: tuple[Format, ...]
    time_s: float
    error: float
    added: float = 0.0
    index: int | None = None

    @classmethod
    def of(
        cls,
        found: Labelling | Step,
        label: Ints | Bools,
        analysis: Analysis,
        *,
        index: int | None = None,
    ) -> Choice:
        """What the solver ``found``; ``label`` numbers the formats of ``analysis``."""
        formats = (*analysis.times,)
        return cls(
            formats=tuple(formats[int(number)] for number in label),
            time_s=found.time_s,
            error=analysis.together(found.errors[1:]),
            added=found.error,
            index=index,
        )

    @property
    def saturation(self) -> Saturation:
        """How errors of choices like this one add up: of one format just as they do."""
        if not (self.added > 0 and self.error > 0):
            return Saturation()
        return Saturation.through(self.added, self.error)

    @property
    def lowers(self) -> bool:
        """Whether any unit has a low format."""
        return any(f is not Format.FP32 for f in self.formats)

    def by_node(self, units: Units) -> dict[int, Format]:
        """Format by id of the nodes that belong to a unit."""
        return {n: self.formats[u] for n, u in units.of.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan worth trying, its predicted cost and squared relative output error."""

    name: str
    plan: Plan
    time_s: float
    error: float
