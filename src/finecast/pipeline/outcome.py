"""The outcome of tuning: verdict, plan and measurements, and what the search considered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from finecast.naming import number_of
from finecast.numbers.formats import Format
from finecast.pipeline.adjusting import Gain
from finecast.pipeline.goal import Objective
from finecast.pipeline.hint import Anchor
from finecast.pipeline.search import Candidate
from finecast.pipeline.study import Trial
from finecast.pipeline.subject import Built
from finecast.planning.choices import Proposal
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Priced
from finecast.terminal import one_line


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a search considered.

    Attributes:
        priced: What costs count: seconds, or bytes.
        fp32_cost: Measured cost of the fp32 model in the first races; None before any.
        frontier: Steps of the frontier of predicted cost and error, the most accurate first.
        sensitivities: The units that may be low, the most sensitive first.
        candidates: Plans that were raced or predicted to be fast, the fastest first.
    """

    priced: Priced = Priced.TIME
    fp32_cost: float | None = None
    frontier: tuple[Found, ...] = ()
    sensitivities: tuple[UnitSensitivity, ...] = ()
    candidates: tuple[Found, ...] = ()

    def next_faster(self, plan: Plan) -> Found | None:
        """The candidate of the next smaller cost that missed the criterion, else any such.

        ``plan`` is the result's; that of the fp32 model is no candidate, and has its cost. A
        plan that missed before it was timed is faster by its predicted cost.
        """
        digests = [c.plan.digest for c in self.candidates]
        faster: Sequence[Found] = self.candidates[
            : digests.index(plan.digest) if plan.digest in digests else None
        ]
        if plan.digest not in digests:
            fp32 = math.inf if self.fp32_cost is None else self.fp32_cost
            faster = [c for c in faster if c.cost is None or c.cost < fp32]
        missed = [c for c in faster if c.passed is False]
        return (missed or faster or [None])[-1]


def findings(
    planner: Planner,
    analysis: Analysis | None,
    proposals: Sequence[Proposal],
    candidates: Sequence[Candidate],
    fp32_cost: float | None,
    trials: Mapping[str, Trial],
    errors: Mapping[str, float],
) -> Findings:
    """What a search considered.

    Args:
        planner: Made the plans.
        analysis: What they were chosen by; None if there is none.
        proposals: The steps of the frontier.
        candidates: Plans that were raced or predicted to be fast.
        fp32_cost: The fp32 model's cost in the first races.
        trials: Evaluations by the plan's digest.
        errors: Measured relative errors by the plan's digest.
    """
    if analysis is None:
        return Findings()
    raced = {c.plan.digest: c for c in candidates}
    return Findings(
        priced=analysis.priced,
        fp32_cost=fp32_cost,
        frontier=tuple(
            Found(
                name=p.name,
                plan=p.plan,
                predicted_cost=p.time_s,
                predicted_error=math.sqrt(p.error),
            )
            for p in proposals
        ),
        sensitivities=sensitivities(planner, analysis),
        candidates=tuple(
            Found(
                name=c.name,
                plan=c.plan,
                predicted_cost=c.predicted_cost,
                predicted_error=math.sqrt(c.error),
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
    found: list[UnitSensitivity] = []
    for fmt, rounded in analysis.rounded.items():
        errors = np.array(rounded.units, dtype=np.float64)
        for units, error in zip(rounded.lists, rounded.errors, strict=True):
            for unit in {u for u in units if u >= 0}:
                errors[unit] += error
        found += [
            UnitSensitivity(
                nodes=tuple(graph.nodes[n].name for n in members[unit]),
                format=fmt,
                error=math.sqrt(analysis.saturation.together(float(error))),
                fp32_cost=float(analysis.times[Format.FP32][unit]),
                low_cost=float(analysis.times[fmt][unit]),
            )
            for unit, error in enumerate(errors)
            if any(fmt in planner.permissions[n].formats for n in members[unit])
        ]
    return tuple(sorted(found, key=lambda one: -one.error))


class Verdict(Enum):
    """How a tuning ended."""

    IMPROVED = "improved"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Metric, latency and size of one model.

    ``outputs`` has a built-in metric by output, the worst first, which decides. ``cost`` is
    what the objective counts: latency, seconds of a call under load, or bytes; NaN if it was
    not measured.
    """

    metric: float
    latency_s: float
    size_bytes: int
    cost: float
    outputs: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def text(self) -> str:
        """The metric, the time of a call and the size."""
        took, size = f"{self.latency_s * 1e3:.3f} ms a call", f"{self.size_bytes / 1e6:.2f} MB"
        return f"metric {self.metric:.6g}, {took}, {size}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Outcome:
    """What tuning found; printed it is a few lines, and its attributes have the rest.

    Attributes:
        verdict: Whether the tuned model is better than fp32.
        why: The reason of the verdict.
        objective: What the search minimised.
        baseline: Measurements of the fp32 model.
        tuned: Those of the tuned model; of the fp32 model where it is unchanged.
        plan: The plan of the tuned model.
        ops: Number of ops by the format that they compute in; ops that another tool quantized
            are counted apart.
        casts: Casts in the tuned model.
        trials: Plans that were evaluated, or taken from the study.
        evaluations: Evaluations on all data in this run.
        seconds: How long tuning took, from the making of its goal on.
        phases: The seconds of each phase, the longest first; they add up to ``seconds``.
        probes: Runs of the model for sensitivities.
        speedup: How many times as fast as fp32 a call of the tuned model is.
        speedup_spread: The width of the interval in which that lies.
        gain: How many times as good as fp32 the tuned model is by the objective.
        gain_spread: The width of the interval in which that lies.
        predicted_error: Relative error of the worst output against fp32, by the sensitivities.
        output_errors: The same by output, measured on the timing feeds, the worst first.
        left_out: Outputs that no error is told of, as they copy an input or others are named.
        target: The device that was emulated, with modelled times; empty if all was measured.
        reference: The name of the baseline: fp32, or the model given if that was low or
            quantized.
        warnings: What makes the result weak, as data that says little.
        reused: How many of the trials an earlier run made.
        stale: Files beside the output that an earlier run left and this one did not replace.
        model: The tuned model in its frontend's form; the fp32 model where it is unchanged.
        built: What the plan gave; None where it is unchanged.
        anchors: Models that the engine lowers by itself, without tuning.
        gains: What each adjustment of operands gained, if the tuned model has some.
        findings: What the search considered: frontier, sensitivities and candidates.
    """

    verdict: Verdict
    why: str
    objective: Objective
    baseline: Measured
    tuned: Measured
    plan: Plan
    ops: Mapping[str, int]
    casts: int
    trials: tuple[Trial, ...]
    evaluations: int
    seconds: float
    probes: int
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    speedup: float = 1.0
    speedup_spread: float = 0.0
    gain: float = 1.0
    gain_spread: float = 0.0
    predicted_error: float = 0.0
    output_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    left_out: tuple[str, ...] = ()
    target: str = ""
    reference: str = "fp32"
    warnings: tuple[str, ...] = ()
    reused: int = 0
    stale: tuple[Path, ...] = ()
    model: Any = None
    built: Built | None = None
    anchors: tuple[Anchor, ...] = ()
    gains: tuple[Gain, ...] = ()
    findings: Findings = field(default_factory=Findings, repr=False)

    def and_then(self, phases: Mapping[str, float]) -> Outcome:
        """The outcome once further ``phases``, of other names, took these seconds, too."""
        every = sorted(({**self.phases, **phases}).items(), key=lambda found: -found[1])
        return replace(self, phases=dict(every), seconds=self.seconds + sum(phases.values()))

    def __repr__(self) -> str:
        """The verdict, both models side by side, and what the tuned one is made of."""
        ops = ", ".join(f"{count} {label}" for label, count in self.ops.items())
        lines = [f"{self.verdict.value}: {self.why}"]
        lines.append(f"{self.reference}: {self.baseline.text}")
        if self.improved:
            words = self.objective.words
            faster = f"{self.gain:.2f} times {words.as_good} as {self.reference}"
            lines.append(f"tuned: {self.tuned.text}, {faster}")
        lines.append(f"ops: {ops or 'none in fp32'}; {number_of(self.casts, 'cast')}")
        told = f"times modelled for {self.target}" if self.target else "times measured"
        evaluated = number_of(self.evaluations, "evaluation")
        lines.append(f"{told}; {evaluated} on all data in {self.seconds:.1f} s")
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n  ".join(one_line(line) for line in lines)

    @property
    def measured_error(self) -> float:
        """Relative error of the worst output against fp32, measured on the timing feeds."""
        return max(self.output_errors.values(), default=0.0)

    @property
    def next_faster(self) -> Found | None:
        """The next faster plan, which missed or was not tried; None if there is none."""
        return self.findings.next_faster(self.plan)

    @property
    def improved(self) -> bool:
        """Whether there is a better model, by the objective, that keeps the criterion."""
        return self.verdict is Verdict.IMPROVED
