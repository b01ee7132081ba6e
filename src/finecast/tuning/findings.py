"""What a search considered: its frontier, the sensitivities of units, and the candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from finecast.measure.study import Trial
from finecast.native.subject import Examined
from finecast.numbers.formats import Format
from finecast.planning.kept_products import KeptProducts, kept_products
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Priced, Proposal, predicted_error
from finecast.rules.facts import ValueFacts
from finecast.tuning.search import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSensitivity:
    """What it does to lower the ops of one kernel alone.

    Attributes:
        nodes: The names of the ops.
        format: The format that they would have.
        error: Predicted relative error of the worst output.
        fp32_cost: Predicted cost of the ops in fp32, without casts, in the unit of the search.
        low_cost: The same in the format.
    """

    nodes: tuple[str, ...]
    format: Format
    error: float
    fp32_cost: float
    low_cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that was considered; None stands for what was not measured.

    Attributes:
        name: Its name in reports.
        plan: The plan.
        predicted_cost: Cost by the analysis, in the unit of the search; infinite if unknown.
        predicted_error: Relative error of the worst output, by the sensitivities.
        cost: Measured in the first races, where the fp32 model has ``Findings.fp32_cost``.
        latency_s: Measured time of a call in the same races.
        casts: Casts in its model.
        error: Measured relative error of the worst output.
        metric: The metric on all data.
        passed: Whether that meets the criterion.
    """

    name: str
    plan: Plan
    predicted_cost: float
    predicted_error: float
    cost: float | None = None
    latency_s: float | None = None
    casts: int | None = None
    error: float | None = None
    metric: float | None = None
    passed: bool | None = None


_STEPS: Final = {
    "race": "benchmark",
    "errors of ops": "errors of single ops",
    "more plans": "more plans, as none known is worth a measurement",
    "probes": "plans probed by runs on calibration data",
}
_FP32: Final = "fp32"
_END: Final = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStep:
    """A measurement of the search, or its end.

    Attributes:
        what: ``fp32``, whose metric is known; ``race`` or ``evaluation`` of a plan; ``errors
            of ops``; ``more plans`` that were proposed, or by ``probes``; or ``end``.
        plan: The name of the plan that is measured; of the end, the fastest one that passed.
        instead_of: The name of a plan that was worth most and is as fast and less accurate;
            empty if that is ``plan``.
        worth: By this it was chosen: the mean of the logarithm of how many times as fast as
            the plan in use it may be, beyond what counts as equally fast, times its chance to
            pass.
        gain: The share of the time of a call that the plan was predicted to save, over the
            fastest plan that had passed by then; over fp32 before any had. Once the plan was
            timed, that is measured.
        gain_off: The standard deviation of ``gain``, as far as it was known: a plan that is
            predicted to save nothing may turn out to be faster.
        chance: The probability with which it was expected to keep the criterion.
        seconds: What the measurement took.
        result: What it told; of the end, why nothing more was measured.
    """

    what: str
    seconds: float = 0.0
    plan: str = ""
    instead_of: str = ""
    worth: float = 0.0
    gain: float = 0.0
    gain_off: float = 0.0
    chance: float = 0.0
    result: str = ""

    @property
    def text(self) -> str:
        """The same in a line."""
        if self.what == _END:
            chosen = f" with {self.plan}" if self.plan else ""
            return f"the search ends{chosen}: {self.result}"
        text = _STEPS.get(self.what, self.what)
        if self.what == _FP32:
            return f"{text}: {self.result}"
        if self.plan:
            text += f" of {self.plan}, {self.reason}"
        return f"{text}: took {self.seconds:.2g} s{self.result and f', {self.result}'}"

    @property
    def reason(self) -> str:
        """Text: why the plan was measured, or would be."""
        off, gain = f"{self.gain_off:.0%}", f"{abs(self.gain):.1%}"
        size = f"{gain} ± {off}" if off != f"{0:.0%}" else gain
        saving = f"would save {size} of the time"
        if self.gain < 0 and gain != f"{0:.1%}":
            saving = f"would take {size} more time"
        instead = (
            f", as fast as {self.instead_of} and more accurate" if self.instead_of else ""
        )
        return f"worth {self.worth:.2g} ({saving}, chance to pass {self.chance:.0%}{instead})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a search considered.

    Attributes:
        priced: What costs count: seconds, or bytes.
        fp32_cost: Measured cost of the fp32 model in the first races; None before any.
        frontier: Steps of the frontier of predicted cost and error, the most accurate first.
        sensitivities: The units that may be low, the most sensitive first.
        candidates: Plans that were raced or predicted to be fast, the fastest first.
        planner: Made the plans: it has the graph, and what the rules permit.
        analysis: The times and errors that plans were chosen by; None if nothing was chosen.
        facts: What calibration data showed of values, by id.
        journal: The measurements of the search, in their order.
        final_benchmark: Of plans in the last race, by digest: how many times as good as fp32
            they were there, and the seconds of a call.
    """

    priced: Priced = Priced.TIME
    fp32_cost: float | None = None
    frontier: tuple[Found, ...] = ()
    sensitivities: tuple[UnitSensitivity, ...] = ()
    candidates: tuple[Found, ...] = ()
    planner: Planner | None = None
    analysis: Analysis | None = None
    facts: Mapping[int, ValueFacts] = field(default_factory=dict[int, ValueFacts])
    journal: tuple[SearchStep, ...] = ()
    final_benchmark: Mapping[str, tuple[float, float]] = field(
        default_factory=dict[str, tuple[float, float]]
    )

    def kept_products(self, plan: Plan | None = None) -> KeptProducts | None:
        """The products that ``plan`` leaves in fp32; without one, those that the rules do."""
        if self.planner is None:
            return None
        plan = plan or self.planner.lowest()
        shapes = {index: facts.shape for index, facts in self.facts.items()}
        return kept_products(self.planner.graph, plan, shapes)

    def gain(self, one: Found) -> float | None:
        """How many times as good as fp32 a plan was in the first races; None if in none."""
        return self.fp32_cost / one.cost if self.fp32_cost and one.cost else None

    def next_faster(self, plan: Plan) -> Found | None:
        """The candidate of the next smaller cost that missed the criterion, else any such.

        ``plan`` is the result's; that of the fp32 model is no candidate, and has its cost. A
        plan that missed before it was timed is faster by its predicted cost. A plan may have
        been faster in the last race alone, by less than what the choice of a plan counts.
        """
        digests = [c.plan.digest for c in self.candidates]
        faster: Sequence[Found] = self.candidates[
            : digests.index(plan.digest) if plan.digest in digests else None
        ]
        if plan.digest not in digests:
            fp32 = math.inf if self.fp32_cost is None else self.fp32_cost
            faster = [c for c in faster if c.cost is None or c.cost < fp32]
        own = self.final_benchmark.get(plan.digest)
        if own is not None:
            ahead = {
                digest for digest, found in self.final_benchmark.items() if found[0] > own[0]
            }
            slower = self.candidates[len(faster) :]
            faster = [*faster, *(c for c in slower if c.plan.digest in ahead)]
        missed = [c for c in faster if c.passed is False]
        return (missed or faster or [None])[-1]


def foretold(planner: Planner, analysis: Analysis, plan: Plan, error: float) -> float:
    """The relative output error that was predicted of a plan before it was measured.

    Law: no measurement of the plan is part of it. Those of a plan by the engine's hint correct
    the error by which the search ranks it, as a hint leaves some results unrounded.

    Args:
        planner: Made the plan.
        analysis: What plans were chosen by.
        plan: The plan.
        error: The squared error by which the search ranks it.
    """
    if not plan.by_hint or plan.kv_cache is not Format.FP32:
        return math.sqrt(error)
    ids = {node.name: node.id for node in planner.graph.nodes}
    formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    return math.sqrt(predicted_error(analysis, formats))


def findings(
    examined: Examined,
    analysis: Analysis | None,
    proposals: Sequence[Proposal],
    candidates: Sequence[Candidate],
    fp32_cost: float | None,
    trials: Mapping[str, Trial],
    errors: Mapping[str, float],
) -> Findings:
    """What a search considered.

    Args:
        examined: The model, whose planner made the plans.
        analysis: What they were chosen by; None if there is none.
        proposals: The steps of the frontier.
        candidates: Plans that were raced or predicted to be fast.
        fp32_cost: The fp32 model's cost in the first races.
        trials: Evaluations by the plan's digest.
        errors: Measured relative errors by the plan's digest.
    """
    planner, facts = examined.planner, examined.observed
    if analysis is None:
        return Findings(planner=planner, facts=facts)
    raced = {c.plan.digest: c for c in candidates}
    return Findings(
        planner=planner,
        analysis=analysis,
        facts=facts,
        priced=analysis.priced,
        fp32_cost=fp32_cost,
        frontier=tuple(
            Found(
                name=p.name,
                plan=p.plan,
                predicted_cost=p.time_s,
                predicted_error=foretold(planner, analysis, p.plan, p.error),
            )
            for p in proposals
        ),
        sensitivities=sensitivities(planner, analysis),
        candidates=tuple(
            Found(
                name=c.name,
                plan=c.plan,
                predicted_cost=c.predicted_cost,
                predicted_error=foretold(planner, analysis, c.plan, c.error),
                cost=c.cost if c.timed else None,
                latency_s=c.latency_s if c.timed else None,
                casts=c.casts,
                error=errors.get(digest),
                metric=trials[digest].metric if digest in trials else None,
                passed=trials[digest].passed if digest in trials else None,
            )
            for digest, c in sorted(raced.items(), key=lambda item: item[1].cost)
        ),
    )


def sensitivities(planner: Planner, analysis: Analysis) -> tuple[UnitSensitivity, ...]:
    """The error of each unit alone in each format that it may have, the worst first."""
    graph, members = planner.graph, analysis.units.members
    unit_sensitivities: list[UnitSensitivity] = []
    for fmt, rounded in analysis.rounded.items():
        errors = rounded.units + rounded.by_unit
        unit_sensitivities += [
            UnitSensitivity(
                nodes=tuple(graph.nodes[n].name for n in members[unit]),
                format=fmt,
                error=rounded.saturation.relative(float(error)),
                fp32_cost=float(analysis.times[Format.FP32][unit]),
                low_cost=float(analysis.times[fmt][unit]),
            )
            for unit, error in enumerate(errors)
            if any(fmt in planner.permissions[n].formats for n in members[unit])
        ]
    return tuple(sorted(unit_sensitivities, key=lambda one: -one.error))
