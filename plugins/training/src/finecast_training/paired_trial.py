"""A paired trial: training from one checkpoint on the same data, in fp32 and other ways."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy import stats

from finecast.progress import Progress, silent
from finecast_training.step_plan import StepPlan
from finecast_training.target import Call, StepTarget

_CONFIDENCE: Final = 0.95
# The share of a run, at its end, whose losses are averaged.
_LAST: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTrial:
    """Losses at the end of training, by way and seed; of one seed all ways saw the same data.

    Attributes:
        steps: Steps of each run.
        losses: Mean losses of the last steps by way, in the order of seeds.
    """

    steps: int
    losses: Mapping[str, tuple[float, ...]]

    @property
    def seeds(self) -> int:
        """The number of seeds."""
        return len(next(iter(self.losses.values())))

    def difference(self, way: str) -> tuple[float, float, float]:
        """How much larger than in fp32 the loss is: the mean, and its interval of 95%.

        The interval is Student's, over seeds. It is infinite with one seed, and NaN where a
        loss is no number.
        """
        apart = np.subtract(self.losses[way], self.losses["fp32"])
        mean = float(apart.mean())
        if not math.isfinite(mean):
            return mean, math.nan, math.nan
        if len(apart) < 2:
            return mean, -math.inf, math.inf
        spread = float(apart.std(ddof=1)) / math.sqrt(len(apart))
        half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(apart) - 1)) * spread
        return mean, mean - half, mean + half

    @property
    def spread(self) -> float:
        """The standard deviation of fp32's losses over seeds."""
        losses = self.losses["fp32"]
        return float(np.std(losses, ddof=1)) if len(losses) > 1 else 0.0

    def is_worse(self, way: str) -> bool:
        """Whether a way loses: by more than chance, and more than another seed changes."""
        mean, low, _ = self.difference(way)
        return not math.isfinite(mean) or (low > 0 and mean > self.spread)

    def text(self, way: str) -> str:
        """The difference in words."""
        mean, low, high = self.difference(way)
        return (
            f"loss after {self.steps} steps {mean:+.3g} beside fp32 ({low:+.3g} to {high:+.3g}"
            f" over {self.seeds} seeds; seeds of fp32 differ by {self.spread:.3g})"
        )

    def to_dict(self) -> dict[str, Any]:
        """All losses and differences."""
        return {
            "steps": self.steps,
            "losses": {way: list(losses) for way, losses in self.losses.items()},
            "differences": {w: list(self.difference(w)) for w in self.losses if w != "fp32"},
        }


def paired_trial(
    target: StepTarget,
    calls: Mapping[str, tuple[Call, StepPlan]],
    *,
    steps: int,
    seeds: int,
    micro_batches: int = 1,
    progress: Progress = silent,
    draw: Callable[[np.random.Generator], int] | None = None,
) -> PairedTrial:
    """Train from the target's first checkpoint in each way, for each seed.

    Args:
        target: The step.
        calls: Ways of computing it, ``fp32`` among them, each with its plan.
        steps: Steps of each run.
        seeds: Number of seeds, each of which draws other batches.
        micro_batches: Batches of a step, whose gradients are added up.
        progress: Told of each run.
        draw: Draws the number of a batch; by default each is equally probable.
    """
    first = target.samples[0].checkpoint
    last = max(1, round(_LAST * steps)) * micro_batches
    losses: dict[str, list[float]] = {way: [] for way in calls}
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        some = draw or (lambda g: int(g.integers(len(target.batches))))
        batches = [target.batch(some(generator)) for _ in range(steps * micro_batches)]
        for number, (way, (call, plan)) in enumerate(calls.items()):
            progress("trial", seed * len(calls) + number, seeds * len(calls))
            with target.holding(plan.states, plan.dtype):
                target.restore(first)
                curve = target.train(call, batches, plan.scale, micro_batches=micro_batches)
            losses[way].append(float(np.mean(curve[-last:])))
    target.restore(first)
    return PairedTrial(steps=steps, losses={w: tuple(of) for w, of in losses.items()})
