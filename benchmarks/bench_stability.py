"""How many of n runs of ``tune`` agree, each in its own process while another one is busy.

    python -m benchmarks.bench_stability cifar10_resnet20 --runs 20

A run agrees if its verdict is that of most runs, and among those its speedup lies within 5%
and its error within 10% of their median.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.bench_minilm import feeds
from benchmarks.bench_tune import score
from benchmarks.common import report, shared_case, skip
from finecast import api
from finecast.engines.base import Feeds

# The headline metric of each case, and the batch that is timed.
CASES: Final = {
    "cifar10_resnet20": ("top1", 32),
    "sts_minilm_l6": ("spearman", 16),
    "speaker_ge2e_lstm": ("pair_auc", 16),
}
_SPEED: Final = 0.05
_ERROR: Final = 0.10
# A program that multiplies matrices on all cores.
BUSY: Final = (
    "import numpy as np\na = np.random.default_rng(0).random((512, 512), np.float32)\n"
    "while True: a @ a"
)


def tune_once(name: str, policy: str) -> dict[str, Any]:
    """The figures of one run that are compared."""
    case = shared_case(name)
    assert case is not None
    key, batch = CASES[name]
    outcome = api.tune(
        case.model(),
        evaluate=score(case, key, batch),
        calib=lambda: calibration(name, case, batch),
        criterion="absolute",
        tolerance=0.005,
        policy=policy,
    )
    return {
        "verdict": outcome.verdict.value,
        "speedup": outcome.speedup,
        "error": outcome.measured_error,
        "seconds": outcome.seconds,
        "ops": dict(outcome.counts),
        "why": outcome.why,
    }


def calibration(name: str, case: Any, batch: int) -> list[Feeds]:
    """Feeds of one call of ``batch`` samples, of the case's calibration data."""
    if name == "sts_minilm_l6":
        return [feeds(case)]
    given = list(case.calib(batch))
    if any(len({f[n].shape for f in given}) > 1 for n in given[0]):
        return given[:1]
    return [{n: np.concatenate([f[n] for f in given]) for n in given[0]}]


def agreeing(found: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many runs have the commonest verdict, and how many of these agree in figures."""
    verdict, same = Counter(f["verdict"] for f in found).most_common(1)[0]
    alike = [f for f in found if f["verdict"] == verdict]
    speed, error = (median(f[k] for f in alike) for k in ("speedup", "error"))
    return {
        "verdicts": same,
        "speeds": sum(abs(f["speedup"] - speed) <= _SPEED * speed for f in alike),
        "errors": sum(abs(f["error"] - error) <= _ERROR * error for f in alike),
    }


def main() -> None:
    """Run ``tune`` n times, and count the runs that agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=1, help="processes that keep a core busy")
    parser.add_argument("--policy", default="auto:bf16")
    parser.add_argument("--one", action="store_true", help="one run, here; prints JSON")
    given = parser.parse_args()
    if shared_case(given.case) is None:
        skip("stability", "shared/models is absent")
        return
    if given.one:
        print(json.dumps(tune_once(given.case, given.policy)))
        return
    command = [sys.executable, "-m", "benchmarks.bench_stability", given.case, "--one"]
    command += ["--policy", given.policy]
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for _ in range(given.busy):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(busy.kill)
        for number in range(given.runs):
            made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(made.stdout.splitlines()[-1]))
            print(f"{number + 1}: {found[-1]}", file=sys.stderr)
    counts = agreeing(found)
    for what, count in counts.items():
        report(
            f"stability {given.case}", f"{what} that agree", count, "", bar=given.runs,
            at_least=True, busy=given.busy, runs=given.runs,
            speedups=[round(f["speedup"], 3) for f in found],
            errors=[float(f"{f['error']:.3g}") for f in found],
            verdicts=dict(Counter(f["verdict"] for f in found)),
        )  # fmt: skip


if __name__ == "__main__":
    main()
