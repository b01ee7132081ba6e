"""The outcome of tuning: verdict, plan and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from finecast.naming import number_of
from finecast.pipeline.adjusting import Gain
from finecast.pipeline.findings import Findings, Found
from finecast.pipeline.hint import Anchor
from finecast.pipeline.objective import Objective
from finecast.pipeline.study import Trial
from finecast.pipeline.subject import Built
from finecast.planning.plan import Plan
from finecast.terminal import one_line


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
        seconds: How long tuning took.
        phases: The seconds of each phase of the search, the longest first.
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
