"""What tuning found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from finecast.pipeline.adjusting import Gain
from finecast.pipeline.hint import Anchor
from finecast.pipeline.objective import Objective
from finecast.pipeline.study import Trial
from finecast.pipeline.subject import Built
from finecast.planning.plan import Plan


class Verdict(Enum):
    """How a tuning ended."""

    IMPROVED = "improved"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Metric, latency and size of one model; ``cost`` is what the objective counts.

    That is the latency, the seconds of a call under load, or bytes; NaN where it was not
    looked at.
    """

    metric: float
    latency_s: float
    size_bytes: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What tuning found; ``tuned`` and ``plan`` are those of fp32 where it is unchanged.

    The errors are relative errors of the tuned model's outputs against fp32: what the
    sensitivities added up to, and what was measured on the timing feeds. ``target`` is the
    device where accuracy was emulated and times are modelled; empty where all was measured.
    ``warnings`` are of what makes the answer weak: data that says little, rules that judge
    nothing. ``reused`` counts the trials that an earlier run made. ``stale`` are files at the
    output's place that were there before and that this run did not replace. ``model`` is the
    tuned model in its frontend's form, the fp32 model where it is unchanged; ``built`` is what
    the plan gave, None where it is unchanged. ``anchors`` are what the engine's own lowering
    gives without tuning. ``gain`` is how many times as good as fp32 the tuned model is by the
    ``objective``; ``speedup`` by the latency of a call, whatever the objective. ``gains``
    are what each adjustment of operands gained, if the tuned model has some. ``ops`` counts
    ops by the format that they compute in, those that came quantized apart; ``reference`` is
    what the baseline is called: fp32, or the model given, if that came low or quantized.
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
    speedup: float = 1.0
    speedup_spread: float = 0.0
    gain: float = 1.0
    gain_spread: float = 0.0
    predicted_error: float = 0.0
    measured_error: float = 0.0
    target: str = ""
    reference: str = "fp32"
    warnings: tuple[str, ...] = ()
    reused: int = 0
    stale: tuple[Path, ...] = ()
    model: Any = None
    built: Built | None = None
    anchors: tuple[Anchor, ...] = ()
    gains: tuple[Gain, ...] = ()

    @property
    def improved(self) -> bool:
        """Whether there is a better model, by the objective, that keeps the criterion."""
        return self.verdict is Verdict.IMPROVED
