"""What is true of a simulated net: times, errors and losses of every plan, and the best plan.

A search never sees a ``Net``. It asks a ``Simulation``, which answers with noise and takes
simulated time for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from finecast.data.criterion import Criterion
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.alternatives import labels_of
from finecast.planning.cost import MeasuredCost
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.points import RoundingPoints
from finecast.planning.problem import Analysis, Roundings, build_problem
from finecast.planning.units import Units
from finecast.solver.assignment import Bools, Floats, Ints
from finecast.solver.labelling import LabelProblem

ENUMERATED: Final = "enumerated"
"""The family of nets whose plans were all evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a net is drawn from: the same key gives the same net."""

    family: str
    held_out: bool
    seed: int

    @property
    def name(self) -> str:
        """As the lab's lines name it."""
        return f"{self.family}{'*' if self.held_out else ''}/{self.seed}"

    def rng(self, *parts: int | str) -> np.random.Generator:
        """Random numbers of one purpose; those of other purposes stay as they are."""
        text = repr((self.family, self.held_out, *parts)).encode()
        return np.random.default_rng([self.seed, *text])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What an evaluation shows of single samples, of fp32 and of a plan.

    Attributes:
        samples: Numbers of the samples.
        errors: Squared relative output error of each.
        margins: The fp32 model's largest logit less the next; None where nothing is decided.
        shifts: By how much the plan changes that difference.
        right: Whether fp32's decision is the label; None where there are no labels.
        second: Whether the next choice is the label.
    """

    samples: Ints
    errors: Floats
    margins: Floats | None = None
    shifts: Floats | None = None
    right: Bools | None = None
    second: Bools | None = None

    @property
    def changed(self) -> Bools:
        """Whether the plan decides otherwise than fp32."""
        assert self.margins is not None
        assert self.shifts is not None
        return self.margins + self.shifts < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest plan that loses no more than is allowed, as far as it is known.

    Attributes:
        label: The format of each unit, as its number among the formats with fp32 first.
        by_hint: Whether it is stated by the engine's hint.
        time_s: Its true time.
    """

    label: Ints
    by_hint: bool
    time_s: float


@dataclass(kw_only=True)
class Net(ABC):
    """A net of which everything is known.

    Attributes:
        key: What it is drawn from.
        architecture: Its name.
        planner: Its graph, and the formats that the rules permit.
        units: Ops that run in one kernel.
        points: Where plans round, by format.
        metric: The name of the metric.
        criterion: What may be lost.
        profile: Times of kernels that a profile without noise tells, by format and node name:
            they are off as predictions are.
        cost_of_casts: Predicted overhead and bandwidth of a cast.
        samples: How many samples a search sees.
        sample_s: Seconds that the fp32 model takes for a sample.
        hinted: The plan of what the engine lowers under its hint; None without one.
        hinted_exact: The same without products whose results it leaves unrounded.
        states_by_hint: Whether plans can be stated by the hint, too.
    """

    key: Key
    architecture: str
    planner: Planner
    units: Units
    points: Mapping[Format, RoundingPoints]
    metric: str
    criterion: Criterion
    profile: Mapping[Format, Mapping[str, float]]
    cost_of_casts: tuple[float, float]
    samples: int
    sample_s: float
    hinted: Plan | None = None
    hinted_exact: Plan | None = None
    states_by_hint: bool = False
    _labels: dict[str, Ints] = field(init=False, default_factory=dict[str, Ints])

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.planner.graph

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats of labels: fp32, then the low ones."""
        return (Format.FP32, *self.points)

    def predicted_cost(self, profile: Mapping[Format, Mapping[str, float]]) -> MeasuredCost:
        """The costs that plans are predicted by, with the times of a profile."""
        overhead_s, bandwidth = self.cost_of_casts
        return MeasuredCost(
            times_s=profile, cast_overhead_s=overhead_s, cast_bandwidth_gb_s=bandwidth
        )

    @cached_property
    def _analysis(self) -> Analysis:
        """Units and labels alone, to number the formats of a plan."""
        cost = self.predicted_cost(self.profile)
        count = len(self.units.members)
        none = Roundings(
            units=np.zeros(count), shared=np.zeros(count), lists=(), errors=np.zeros(0)
        )
        return Analysis.of(self.graph, self.units, cost, dict.fromkeys(self.points, none))

    @cached_property
    def _unlabelled(self) -> LabelProblem:
        return build_problem(self.graph, self.planner.permissions, self._analysis)

    def label(self, plan: Plan) -> Ints:
        """The number of the format of each unit."""
        if plan.digest not in self._labels:
            problem = self._unlabelled
            numbers = labels_of(self.planner, self._analysis, problem, plan)
            self._labels[plan.digest] = numbers
        return self._labels[plan.digest]

    @abstractmethod
    def time_s(self, label: Ints, *, by_hint: bool = False) -> float:
        """The true time of a call of a plan's model, without what differs by process."""

    @property
    def fp32_s(self) -> float:
        """The true time of fp32."""
        return self.time_s(np.zeros(len(self.units.members), dtype=np.int64))

    @abstractmethod
    def rounded(self, fmt: Format, on: Bools, rows: Ints) -> Floats:
        """What roundings alone do on calibration rows: the mean of the squares is the error.

        Args:
            fmt: The format.
            on: Which points, then which units of constants, are rounded.
            rows: Numbers of calibration rows.
        """

    @abstractmethod
    def deviations(self, label: Ints, rows: Ints, *, by_hint: bool = False) -> Floats:
        """What a plan does on calibration rows; the mean of the squares is its error."""

    @abstractmethod
    def outcomes(self, label: Ints, samples: Ints, *, by_hint: bool = False) -> Outcomes:
        """What an evaluation of a plan shows of samples that a search sees."""

    def unlabelled(self, label: Ints, rows: Ints, *, by_hint: bool = False) -> Outcomes:
        """What a plan does to calibration rows, of which no label is known."""
        deviations = self.deviations(label, rows, by_hint=by_hint)
        return Outcomes(samples=rows, errors=deviations**2)

    @abstractmethod
    def value(self, outcomes: Outcomes) -> float:
        """The metric by the outcomes of samples."""

    @property
    @abstractmethod
    def baseline(self) -> float:
        """The fp32 model's metric on the samples that a search sees."""

    @abstractmethod
    def losses(self, labels: Ints, *, by_hint: bool = False) -> Floats:
        """The true losses of plans, over what may be lost: above 1 is too much.

        ``labels`` is int64[b, n], a plan a row.
        """

    @cached_property
    @abstractmethod
    def best(self) -> Best:
        """The fastest plan whose true loss is allowed."""

    def loss(self, plan: Plan) -> float:
        """The true loss of a plan, over what may be lost."""
        losses = self.losses(self.label(plan)[None, :], by_hint=plan.by_hint)
        return float(losses[0])

    def true_s(self, plan: Plan) -> float:
        """The true time of a plan."""
        return self.time_s(self.label(plan), by_hint=plan.by_hint)
