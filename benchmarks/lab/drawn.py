"""Nets that are drawn: graphs by families, times by kernel families, errors as vectors.

Each rounding adds a vector to the net's error. A plan's squared output error is the squared
length of the sum, so that single errors add up on average, and pairs interact. A sample sees
the vector from a direction of its own: the output of calibration row i is off by
``z_i . V``, and the margin of sample i moves by ``reach * size_i * z_i . W``, where W is the
sum of the same vectors with weights of their own: an output error is not what decisions hang
on alone, least of all in detectors (search.md). So plans that share roundings change the same
decisions, and margins tell what a count of changed decisions will be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.lab import assumptions as assumed
from benchmarks.lab.architectures import BY_NAME, PRODUCTS, Rng, Sketch
from benchmarks.lab.kept import Arrays, kept
from benchmarks.lab.nets import Best, Key, Net, Outcomes
from benchmarks.lab.optimum import fastest_allowed
from finecast.data.criterion import Criterion
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.planning.cost import (
    MEASURED_CAST_BANDWIDTH_GB_S,
    MEASURED_CAST_OVERHEAD_S,
    MeasuredCost,
)
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.points import RoundingPoints, rounding_points
from finecast.planning.problem import Analysis, Roundings, build_problem
from finecast.planning.units import Units, make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from finecast.solver.assignment import Bools, Floats, Ints
from finecast.solver.labelling import LabelProblem, evaluate

# What decides the best plan of a net.
_CODE: Final = tuple(
    f"lab/{name}.py" for name in ("assumptions", "architectures", "drawn", "nets", "optimum")
)
_SENSITIVE: Final = frozenset({OpKind.NORM, OpKind.SOFTMAX, OpKind.REDUCTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A population of samples.

    Attributes:
        directions: float64[n, d], from where each sees the error vector.
        margins: The fp32 model's largest logit less the next.
        right: Whether its decision is the label.
        second: Whether the next choice is the label.
    """

    directions: Floats
    margins: Floats
    right: Bools
    second: Bools

    @classmethod
    def draw(cls, rng: Rng, count: int, accuracy: float) -> Samples:
        """Margins are exponential; decisions of small margins are wrong more often."""
        directions = rng.standard_normal((count, assumed.ERROR_DIMENSIONS))
        sizes = np.exp(assumed.SPREAD_OF_SAMPLES * rng.standard_normal(count))
        directions *= (sizes / math.sqrt(float(np.mean(sizes**2))))[:, None]
        margins = rng.exponential(size=count)
        right, second = assumed.RIGHT_AT_BORDER
        # So that the mean over margins is the accuracy asked for.
        rate = (1 - right) / (1 - accuracy) - 1
        chance = 1 - (1 - right) * np.exp(-rate * margins)
        is_right = rng.random(count) < chance
        next_one = ~is_right & (rng.random(count) < second / (1 - right))
        return cls(directions=directions, margins=margins, right=is_right, second=next_one)

    def __getitem__(self, rows: Ints | slice | Bools) -> Samples:
        return Samples(
            directions=self.directions[rows],
            margins=self.margins[rows],
            right=self.right[rows],
            second=self.second[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorVectors:
    """What roundings to a format add to the error.

    Attributes:
        causes: int64[r, m], the units of which any does a rounding in the format; -1 for none.
        output: float64[r, d], what each adds to the error of the output.
        decided: float64[r, d], what each adds to that of decisions.
    """

    causes: Ints
    output: Floats
    decided: Floats


@dataclass(kw_only=True)
class DrawnNet(Net):
    """A drawn net.

    Attributes:
        vectors: The error vectors by format.
        by_casts: True times of plans by casts; errors are the squares of single roundings.
        by_hints: The same of plans by the hint.
        population: The samples of which the true loss is; a search sees the first ones.
        calibration: Rows of calibration data.
        allowed: What may be lost: of accuracy relative, of squared errors by itself.
        hint_error: The length of an error vector under the hint, over that by casts.
        bend: How much more or less many errors are than their sum.
        reach: How far an error moves a margin; of other metrics the loss of a squared error.
    """

    vectors: Mapping[Format, ErrorVectors]
    by_casts: LabelProblem
    by_hints: LabelProblem
    population: Samples
    calibration: Samples
    allowed: float
    hint_error: float
    bend: float
    reach: float = 1.0

    def time_s(self, label: Ints, *, by_hint: bool = False) -> float:
        """The sum of true times of kernels and casts, and of kernels that are not fused."""
        return evaluate(self.by_hints if by_hint else self.by_casts, label).time_s

    def rounded(self, fmt: Format, on: Bools, rows: Ints) -> Floats:
        """The sum of the vectors that are on, as calibration rows see it."""
        summed = on.astype(np.float64) @ self.vectors[fmt].output
        return self.calibration.directions[rows] @ self._bent(summed[None], "output")[0]

    def deviations(self, label: Ints, rows: Ints, *, by_hint: bool = False) -> Floats:
        """The plan's error vector, as calibration rows see it."""
        return (
            self.calibration.directions[rows] @ self._summed(label[None], by_hint, "output")[0]
        )

    def outcomes(self, label: Ints, samples: Ints, *, by_hint: bool = False) -> Outcomes:
        """Errors, margins and their shifts."""
        changes = self._outcomes(label, samples, self.population[samples], by_hint)
        if self.metric != "accuracy":
            return changes
        seen = self.population[samples]
        return replace(changes, right=seen.right, second=seen.second)

    def unlabelled(self, label: Ints, rows: Ints, *, by_hint: bool = False) -> Outcomes:
        """The same of calibration rows, without labels."""
        return self._outcomes(label, rows, self.calibration[rows], by_hint)

    def _outcomes(self, label: Ints, rows: Ints, seen: Samples, by_hint: bool) -> Outcomes:
        errors = (seen.directions @ self._summed(label[None], by_hint, "output")[0]) ** 2
        if not self.decides:
            return Outcomes(samples=rows, errors=errors)
        decided = self._summed(label[None], by_hint, "decided")[0]
        shifts = self.reach * (seen.directions @ decided)
        return Outcomes(samples=rows, errors=errors, margins=seen.margins, shifts=shifts)

    @property
    def decides(self) -> bool:
        """Whether the metric is of decisions."""
        return self.metric in ("accuracy", "agreement")

    def value(self, outcomes: Outcomes) -> float:
        """The metric."""
        if self.metric == "snr_db":
            error = float(outcomes.errors.mean())
            return -10 * math.log10(error) if error else math.inf
        if self.metric == "cosine":
            return 1 - self.reach * float(outcomes.errors.mean())
        changed = outcomes.changed
        if outcomes.right is None or outcomes.second is None:
            return 1 - float(changed.mean())
        return float(np.where(changed, outcomes.second, outcomes.right).mean())

    @property
    def baseline(self) -> float:
        """The fp32 model's metric on the first samples."""
        nothing = np.zeros(len(self.units.members), dtype=np.int64)
        return self.value(self.outcomes(nothing, np.arange(self.samples)))

    def losses(self, labels: Ints, *, by_hint: bool = False) -> Floats:
        """The losses on the whole population."""
        if not self.decides:
            vectors = self._summed(labels, by_hint, "output")
            spread = self.population.directions
            squares = np.einsum("bd,de,be->b", vectors, spread.T @ spread, vectors)
            return self.reach * squares / len(spread) / self.allowed
        vectors = self.reach * self._summed(labels, by_hint, "decided")
        return self._lost(vectors) / self.allowed

    def _lost(self, vectors: Floats) -> Floats:
        """The share of decisions that change, or the relative loss of accuracy."""
        everyone = self.population
        length = math.sqrt(float(np.square(vectors).sum(axis=1).max(initial=0.0)))
        open_ = everyone.margins < length * self._lengths  # no other one can change
        margins, directions, worse = (array[open_] for array in self._of_population)
        changed = vectors.astype(np.float32) @ directions.T < -margins
        if self.metric == "agreement":
            return np.count_nonzero(changed, axis=1) / len(everyone.margins)
        lost = changed.astype(np.float32) @ worse
        return lost.astype(np.float64) / float(everyone.right.sum())

    @cached_property
    def _of_population(self) -> tuple[NDArray[np.float32], ...]:
        """Margins, directions, and what a changed decision costs: 1, -1 or nothing."""
        of = self.population
        worse = of.right.astype(np.float32) - of.second.astype(np.float32)
        return of.margins.astype(np.float32), of.directions.astype(np.float32), worse

    @cached_property
    def _lengths(self) -> Floats:
        return np.linalg.norm(self.population.directions, axis=1)

    def _summed(self, labels: Ints, by_hint: bool, of: str) -> Floats:
        """float64[b, d], the error vectors of plans."""
        total = self._bent(self._added(labels, of), of)
        return total * self.hint_error if by_hint else total

    def _added(self, labels: Ints, of: str) -> Floats:
        """The sums of the vectors of all roundings that plans do."""
        total = np.zeros((len(labels), assumed.ERROR_DIMENSIONS))
        for number, vectors in enumerate(self.vectors.values(), start=1):
            low = np.pad(labels == number, ((0, 0), (0, 1)))  # -1 is the last one, never low
            done = low[:, vectors.causes].any(axis=2).astype(np.float64)
            total += done @ (vectors.output if of == "output" else vectors.decided)
        return total

    def _bent(self, vectors: Floats, of: str) -> Floats:
        """``vectors`` longer or shorter, as many errors are more or less than their sum."""
        squares = np.square(vectors).sum(axis=1)
        shares = np.maximum(squares / self._whole[of], 1e-12)
        return vectors * (shares ** (self.bend / 2))[:, None]

    @cached_property
    def _whole(self) -> Mapping[str, float]:
        """The squared lengths of the sums of all roundings in the lowest formats."""
        lowest = self.lowest[None]
        kinds = ("output", "decided")
        return {of: float(np.square(self._added(lowest, of)).sum()) for of in kinds}

    @cached_property
    def lowest(self) -> Ints:
        """The labels of the plan in which each unit has its lowest format."""
        permitted = np.isfinite(self.by_casts.time)
        return permitted.shape[1] - 1 - permitted[:, ::-1].argmax(axis=1)

    @cached_property
    def best(self) -> Best:
        """By the solver and a long local search, over both ways to state plans."""
        stored = kept(self.key.name.replace("*", "-held"), _CODE, self._searched)
        label = stored["label"].astype(np.int64)
        by_hint = bool(stored["by_hint"])
        return Best(label=label, by_hint=by_hint, time_s=self.time_s(label, by_hint=by_hint))

    def _searched(self) -> Arrays:
        ways = (False, True) if self.states_by_hint else (False,)
        fastest = {
            by_hint: fastest_allowed(
                self.by_hints if by_hint else self.by_casts,
                partial(self.losses, by_hint=by_hint),
                self.key.rng("kicks"),
            )
            for by_hint in ways
        }
        by_hint = min(fastest, key=lambda way: fastest[way].time_s)
        return {
            "label": fastest[by_hint].label.astype(np.float64),
            "by_hint": np.array(by_hint),
        }


# ------------------------------------------------------------------------------- drawing a net


def draw(key: Key) -> DrawnNet:
    """The drawn net of a key."""
    family, rng = BY_NAME[key.family], key.rng("graph")
    make = family.held_out if key.held_out else family.seen
    sketch = Sketch()
    make(rng, sketch)
    graph = sketch.finish(key.name)
    lows = (Format.BF16,)
    if key.rng("formats").random() < assumed.INT8_SHARE:
        lows = (Format.BF16, Format.INT8)
    permissions = _permissions(key, graph, lows)
    units = make_units(graph, permissions, lows, sketch.kernels)
    fused = [frozenset(kernel) for kernel in sketch.kernels]
    points = {f: rounding_points(graph, units, fused, results=not f.has_scales) for f in lows}
    vectors = _vectors(key, units, points)
    rows = int(key.rng("rows").choice(assumed.CALL_ROWS))
    times = _Times.draw(key, graph, sketch, lows, rows)
    planner = Planner(
        graph=graph,
        policy=Policy(formats=lows),
        permissions=permissions,
        engine="simulated",
    )
    hinted = _hinted(key, planner, units)
    exact = hinted and _hinted(key, planner, units, kept=assumed.UNROUNDED_PRODUCTS)
    hint = key.rng("hint")
    cost = cost_of_casts(rows)
    by_casts, by_hints = times.problems(graph, permissions, units, vectors, cost)
    rng = key.rng("samples")
    accuracy, samples = rng.uniform(*assumed.ACCURACY), int(rng.integers(*assumed.SAMPLES))
    population = Samples.draw(rng, assumed.POPULATION, accuracy)
    calibration = Samples.draw(rng, assumed.CALIBRATION, accuracy)
    names, shares = [*assumed.METRICS], [*assumed.METRICS.values()]
    net = DrawnNet(
        key=key,
        architecture=make.__name__,
        planner=planner,
        units=units,
        points=points,
        metric=str(key.rng("metric").choice(names, p=shares)),
        criterion=Criterion(),
        profile=times.profile,
        cost_of_casts=cost,
        samples=samples,
        sample_s=times.fp32_s / rows,
        hinted=hinted,
        hinted_exact=exact,
        states_by_hint=hinted is not None and hint.random() < assumed.STATES_BY_HINT,
        vectors=vectors,
        by_casts=by_casts,
        by_hints=by_hints,
        population=population,
        calibration=calibration,
        allowed=1.0,
        bend=assumed.ERROR_BEND * key.rng("bend").standard_normal(),
        hint_error=math.sqrt(assumed.HINT_ERROR) * math.exp(0.1 * hint.standard_normal()),
    )
    return _judged(key, net)


def cost_of_casts(rows: int) -> tuple[float, float]:
    """Overhead and bandwidth of a cast in a call of so many rows: shapes are of one row."""
    return MEASURED_CAST_OVERHEAD_S, MEASURED_CAST_BANDWIDTH_GB_S / rows


def _judged(key: Key, net: DrawnNet) -> DrawnNet:
    """The net with a criterion, of which all ops in their lowest formats lose a drawn part."""
    rng = key.rng("criterion")
    tolerance = float(rng.choice(assumed.TOLERANCES))
    lost = math.exp(rng.uniform(*np.log(assumed.DIFFICULTY)))
    lowest = net.lowest
    if net.metric == "snr_db":
        squared = float(net.losses(lowest[None])[0]) / lost
        decibels = round(-10 * math.log10(squared), 2)
        criterion = Criterion(tolerance=decibels)
        return replace(net, criterion=criterion, allowed=10 ** (-decibels / 10))
    net = replace(net, allowed=tolerance, criterion=Criterion(tolerance=tolerance))
    if net.metric == "cosine":
        return replace(net, reach=lost / float(net.losses(lowest[None])[0]))
    least, most = math.log(1e-3), math.log(1e4)
    for _ in range(30):
        middle = (least + most) / 2
        net = replace(net, reach=math.exp(middle))
        if float(net.losses(lowest[None])[0]) < lost:
            least = middle
        else:
            most = middle
    return net


def _permissions(key: Key, graph: Graph, lows: Sequence[Format]) -> dict[int, Permission]:
    """fp32 and bf16 of nearly all ops, int8 of products with weights."""
    rng = key.rng("permissions")
    permissions: dict[int, Permission] = {}
    for node in graph.nodes:
        formats = {Format.FP32}
        if rng.random() >= assumed.KEPT_BY_RULES or by_name(node.op).kind in PRODUCTS:
            formats.add(Format.BF16)
        if by_name(node.op).kind in PRODUCTS and graph.constants(node):
            formats.add(Format.INT8)
        permissions[node.id] = Permission(
            formats=frozenset(formats & {Format.FP32, *lows}), reasons=()
        )
    return permissions


def _hinted(key: Key, planner: Planner, units: Units, kept: float = 0.0) -> Plan | None:
    """What the engine lowers under its hint: products, most other ops, few sensitive ones.

    ``kept`` is the share of products that stay fp32, as the engine leaves them unrounded.
    """
    rng = key.rng("hinted")
    if rng.random() >= assumed.HINT_SHARE:
        return None
    low: set[int] = set()
    for members in units.members:
        kinds = {by_name(planner.graph.nodes[n].op).kind for n in members}
        chance = 0.3 if kinds & _SENSITIVE else 0.8
        unrounded = rng.random() < kept and bool(kinds & PRODUCTS)
        if (kinds & PRODUCTS or rng.random() < chance) and not unrounded:
            low.update(members)
    formats = {
        i: Format.BF16 if i in low and Format.BF16 in p.formats else Format.FP32
        for i, p in planner.permissions.items()
    }
    return planner.plan(formats, "the engine's hint lowers it")


def _vectors(
    key: Key, units: Units, points: Mapping[Format, RoundingPoints]
) -> dict[Format, ErrorVectors]:
    """The error vectors: lognormal lengths, few large ones, directions partly in common."""
    rng, count = key.rng("errors"), len(units.members)
    worse = np.ones(count)
    bad = rng.random(count) < assumed.OUTLIER_SHARE
    least, most = np.log(assumed.OUTLIER_FACTOR)
    worse[bad] = np.exp(rng.uniform(least, most, int(bad.sum())))
    variance = assumed.ERROR_DECAY ** np.arange(assumed.ERROR_DIMENSIONS)
    scale = np.sqrt(variance / variance.sum())
    apart = assumed.DECISIONS_APART
    if key.family == "detector":
        apart = assumed.DECISIONS_APART_IN_DETECTORS
    own = assumed.SENSITIVITY_DEVIATION * rng.standard_normal(count)
    by_format: dict[Format, ErrorVectors] = {}
    for fmt, where in points.items():
        causes = [
            *((*p.readers, *p.makers) for p in where.points),
            *((unit,) for unit in where.weight_units),
        ]
        of = np.array([c[-1] if c else 0 for c in causes], dtype=np.int64)
        logs = 0.7 * own[of] + 0.7 * assumed.SENSITIVITY_DEVIATION * rng.standard_normal(
            len(of)
        )
        squares = worse[of] * np.exp(logs) * assumed.ROUNDING_ERROR[fmt] ** 2
        squares[len(where.points) :] *= assumed.WEIGHT_SHARE
        together = rng.standard_normal((count, assumed.ERROR_DIMENSIONS))[of]
        alone = rng.standard_normal((len(of), assumed.ERROR_DIMENSIONS))
        common = assumed.COMMON_DIRECTION
        directions = common * together + math.sqrt(1 - common**2) * alone
        output = np.sqrt(squares)[:, None] * scale * directions
        weights = np.exp(apart * rng.standard_normal(len(of)))
        most = max(map(len, causes), default=1)
        padded = [(*who, *[-1] * (most - len(who))) for who in causes]
        by_format[fmt] = ErrorVectors(
            causes=np.array(padded, dtype=np.int64),
            output=output,
            decided=weights[:, None] * output,
        )
    return by_format


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """True and profiled times.

    Attributes:
        true: Seconds by format and node id.
        profile: What a profile without noise says, by format and node name.
        casts: True over predicted time of the cast of each value.
        fused: Seconds by value that are lost where its maker and a reader differ in format.
    """

    true: Mapping[Format, Floats]
    profile: Mapping[Format, Mapping[str, float]]
    casts: Floats
    fused: Floats

    @property
    def fp32_s(self) -> float:
        return float(self.true[Format.FP32].sum())

    @classmethod
    def draw(
        cls, key: Key, graph: Graph, sketch: Sketch, lows: Sequence[Format], rows: int
    ) -> _Times:
        rng = key.rng("times")
        rate = assumed.PRODUCT_GFLOPS * 1e9
        rate *= math.exp(assumed.NET_SPEED_DEVIATION * rng.standard_normal())
        first = {kernel[0] for kernel in sketch.kernels}
        traffic = np.array(
            [1.0 if n in first else assumed.FUSED_TRAFFIC for n in range(len(graph.nodes))]
        )
        work = rows * np.array(sketch.flops) / rate
        memory = rows * traffic * np.array(sketch.moved) / (assumed.BANDWIDTH_GB_S * 1e9)
        overhead = np.where(traffic == 1.0, assumed.OP_S, 0.0)
        arithmetic = np.maximum(work, memory)
        arithmetic *= np.exp(assumed.KERNEL_SPEEDUP_DEVIATION * rng.standard_normal(len(work)))
        kinds = [_kernel_family(node.op, w) for node, w in zip(graph.nodes, work, strict=True)]
        names, of = np.unique(kinds, return_inverse=True)
        is_product = np.array([by_name(n.op).kind in PRODUCTS for n in graph.nodes])

        def by_family(deviation: float) -> Floats:
            return np.exp(deviation * rng.standard_normal(len(names)))[of]

        def by_kernel(deviation: float) -> Floats:
            return np.exp(deviation * rng.standard_normal(len(of)))

        true: dict[Format, Floats] = {}
        profile: dict[Format, Mapping[str, float]] = {}
        for fmt in (Format.FP32, *lows):
            speed = np.ones(len(of))
            if fmt is not Format.FP32:
                product, other = assumed.SPEEDUPS[fmt]
                speed = np.where(is_product, product, other)
                speed = speed * by_family(assumed.SPEEDUP_DEVIATION)
                speed = speed * by_kernel(assumed.KERNEL_SPEEDUP_DEVIATION)
            true[fmt] = arithmetic / speed + overhead
            off = by_family(assumed.FAMILY_CORRECTION) * by_kernel(assumed.KERNEL_CORRECTION)
            seen = true[fmt] * off
            profile[fmt] = {n.name: float(seen[n.id]) for n in graph.nodes}
        casts = np.exp(assumed.CAST_DEVIATION * rng.standard_normal(len(graph.values)))
        lost = np.zeros(len(graph.values))
        for value in graph.values:
            if value.producer is not None and rng.random() < assumed.FUSED_SHARE:
                lost[value.id] = assumed.FUSED_GAIN * true[Format.FP32][value.producer]
        return cls(true=true, profile=profile, casts=casts, fused=lost)

    def problems(
        self,
        graph: Graph,
        permissions: Mapping[int, Permission],
        units: Units,
        vectors: Mapping[Format, ErrorVectors],
        cost: tuple[float, float],
    ) -> tuple[LabelProblem, LabelProblem]:
        """True times by casts and by the hint; errors are squares of single roundings."""
        overhead_s, bandwidth = cost
        usual = MeasuredCost(
            times_s={}, cast_overhead_s=overhead_s, cast_bandwidth_gb_s=bandwidth
        )
        rounded = {
            fmt: Roundings(
                units=np.zeros(len(units.members)),
                shared=np.zeros(len(units.members)),
                lists=[row[row >= 0].tolist() for row in of_format.causes],
                errors=np.square(of_format.decided).sum(axis=1),
            )
            for fmt, of_format in vectors.items()
        }
        in_units = {
            fmt: np.array([seconds[[*members]].sum() for members in units.members])
            for fmt, seconds in self.true.items()
        }
        elsewhere = self.fp32_s - float(in_units[Format.FP32].sum())

        def problem(casts: float, fused: float, low: float) -> LabelProblem:
            analysis = Analysis(
                units=units,
                times={f: s if f is Format.FP32 else low * s for f, s in in_units.items()},
                cast_time=lambda v, a, b: (
                    casts * self.casts[v.id] * usual.cast_time_s(v, a, b)
                ),
                rounded=rounded,
            )
            built = build_problem(graph, permissions, analysis)
            more = self._fused_rows(graph)
            cast = built.cast + fused * more * ~np.eye(built.labels, dtype=bool)[:, :, None]
            time = built.time.copy()
            time[0] += elsewhere  # of ops that have no choice, whatever the first unit has
            return replace(built, cast=np.where(np.isfinite(cast), cast, np.inf), time=time)

        return problem(1.0, 1.0, 1.0), problem(assumed.HINT_CASTS, 0.0, assumed.HINT_TIME)

    def _fused_rows(self, graph: Graph) -> Floats:
        """What each row of the problem loses, in the order in which it has the values."""
        rows = [v for v in graph.values if v.format is Format.FP32 and v.constant is None]
        return np.array([self.fused[v.id] for v in rows])


def _kernel_family(op: str, work_s: float) -> str:
    """Kernels of one op, and products of one size, come from the same code."""
    return f"{op} {round(math.log10(work_s))}" if work_s > 0 else op
