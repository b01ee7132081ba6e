"""``tune`` on real models: speedup, evaluations on all data, seconds.

python -m benchmarks.bench_tune
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.bench_minilm import feeds
from benchmarks.common import report, shared_case, skip
from finecast import api
from finecast.data.function_workload import Run
from finecast.engines.base import Array, Feeds


def score(case: Any, key: str, batch: int) -> Callable[[Run], float]:
    """The case's own metric as an evaluation function."""

    def evaluate(run: Run) -> float:
        def outputs(given: Feeds) -> list[Array]:
            return list(run(given).values())

        return float(case.metric(outputs, batch=batch)[key])

    return evaluate


def tune(
    name: str, key: str, batch: int, tolerance: float, bar: float, calib: list[Feeds]
) -> None:
    """Tune one case and print its figures."""
    case = shared_case(name)
    outcome = api.tune(
        case.model(),
        evaluate=score(case, key, batch),
        calib=lambda: calib,
        criterion="absolute",
        tolerance=tolerance,
        policy="auto:bf16",
    )
    report(
        f"tune {name}", "speedup", round(outcome.speedup, 3), "x", bar=bar, at_least=True,
        verdict=outcome.verdict.value, why=outcome.why, casts=outcome.casts,
        ops=outcome.plan.counts, baseline=outcome.baseline.metric, tuned=outcome.tuned.metric,
        fp32_ms=round(1e3 * outcome.baseline.latency_s, 3),
        tuned_ms=round(1e3 * outcome.tuned.latency_s, 3),
    )  # fmt: skip
    report(f"tune {name}", "evaluations on all data", outcome.evaluations, "", bar=4)
    report(f"tune {name}", "whole run", round(outcome.seconds, 1), "s", probes=outcome.probes)


def main() -> None:
    """ResNet-20 at batch 32 by top-1, MiniLM at 16 x 64 by rank correlation."""
    resnet, minilm = (shared_case(n) for n in ("cifar10_resnet20", "sts_minilm_l6"))
    if resnet is None:
        skip("tune", "shared/models is absent")
        return
    images = [f["input"] for f in resnet.calib(32)]
    batch: Feeds = {"input": np.concatenate(images)}
    tune("cifar10_resnet20", "top1", 32, 0.005, 1.35, [batch])
    tune("sts_minilm_l6", "spearman", 16, 0.005, 1.8, [feeds(minilm)])


if __name__ == "__main__":
    main()
