"""How often a plan is certified that loses more than it may, after a selection.

    python -m benchmarks.bench_certificates --runs 10000

Each run draws a data set, on which an fp32 model is right on 90% of the samples, and eight
plans. Their true losses lie around the allowed one: four at 99% of it or less, four at 101% or
more. A point gate takes the fastest plan (that of most loss) whose metric on all samples
passes. A certifier chooses on one half and certifies on the other, as ``tune --confidence``.
Counted are runs in which the plan taken truly loses more than is allowed, and the runs in
which any plan is taken. The bound is 5%, plus two standard errors of the count.
"""

from __future__ import annotations

import argparse
import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import report
from finecast.data.criterion import Criterion
from finecast.data.metrics import Score
from finecast.data.samples import SummedSamples, mean_samples
from finecast.tuning.certifying import certifier_of

CONFIDENCE: Final = 0.95
ALLOWED: Final = 0.02
# True losses of the plans as shares of what is allowed, from the slowest to the fastest.
LOSSES: Final = (0.0, 0.25, 0.6, 0.99, 1.01, 1.1, 1.5, 2.0)
RIGHT: Final = 0.9
# Decisions of other samples become right: as many as a quarter of those that are lost.
WON: Final = 0.25


def decisions(samples: SummedSamples) -> Score:
    """The score of samples, as a metric gives it."""
    return Score(samples.value(), samples={"": samples})


def plans(
    exact: NDArray[np.bool_], rng: np.random.Generator
) -> list[tuple[float, NDArray[np.bool_]]]:
    """Each plan's true loss as a share of what is allowed, and which samples it has right."""
    found: list[tuple[float, NDArray[np.bool_]]] = []
    for share in LOSSES:
        net = share * ALLOWED
        lost, won = net * (1 + WON) / RIGHT, net * WON / (1 - RIGHT)
        drawn = rng.random(len(exact))
        found.append((share, np.where(exact, drawn >= lost, drawn < won)))
    return found


def one_run(count: int, rng: np.random.Generator, *, means: bool) -> dict[str, float | None]:
    """The true loss, as a share, of the plan that each way takes; None for no plan."""
    exact = rng.random(count) < RIGHT
    tried = plans(exact, rng)
    noise = rng.normal(scale=0.05, size=count) if means else np.zeros(count)

    def moved() -> NDArray[np.float64]:
        """What roundings do to the score of each sample, beside the decisions lost."""
        return rng.normal(scale=0.01, size=count) if means else np.zeros(count)

    scores = {
        str(i): decisions(mean_samples(right + noise + moved()))
        for i, (_, right) in enumerate(tried)
    }
    baseline = decisions(mean_samples(exact + noise))
    criterion = Criterion(max_drop=ALLOWED, confidence=CONFIDENCE)
    certifier = certifier_of(criterion, baseline)
    assert certifier is not None
    passed = [name for name in scores if certifier.passes(scores[name])]
    certificates = certifier.certified(scores, passed)
    held = [n for n, one in certificates.items() if certifier.holds(one)]
    gate = [n for n, score in scores.items() if criterion.passes(score, baseline)]
    taken = {"certified": held, "point gate": gate}
    return {way: tried[int(names[-1])][0] if names else None for way, names in taken.items()}


def main() -> None:
    """Count, and print a line for each number of samples and each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--samples", type=int, nargs="*", default=[400, 1000, 4000])
    parser.add_argument("--means", action="store_true", help="bootstrap in place of decisions")
    asked = parser.parse_args()
    for count in asked.samples:
        rng = np.random.default_rng(1)
        runs = [one_run(count, rng, means=asked.means) for _ in range(asked.runs)]
        limit = 0.05 + 2 * math.sqrt(0.05 * 0.95 / asked.runs)
        for way in runs[0]:
            losses = [run[way] for run in runs]
            false = sum(loss is not None and loss > 1 for loss in losses) / asked.runs
            some = [loss for loss in losses if loss is not None]
            report(
                "certificates",
                f"{'means' if asked.means else 'decisions'}, {count} samples, {way}",
                100 * false,
                "% false",
                bar=100 * limit if way == "certified" else None,
                taken=f"{len(some) / asked.runs:.1%}",
                mean_loss_of_allowed=round(float(np.mean(some)), 3) if some else None,
            )


if __name__ == "__main__":
    main()
