"""How many of n runs of ``tune`` agree, each in its own process while another one is busy.

    python -m benchmarks.bench_stability cifar10_resnet20 --runs 20 --keep runs.jsonl

A run agrees if its verdict is that of most runs, and among those its speedup lies within 5%
and its error within 10% of their median. How many have the commonest plan is told, too: of
plans that are equally fast and accurate any may be chosen.

Each run is a line of the file to keep, and runs that it has are not made again: so many can be
made in several sittings. With ``--seconds`` no further run starts after that time.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import monotonic
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
        "plan": outcome.plan.digest,
        "evaluations": outcome.evaluations,
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
        "plans": Counter(f.get("plan") for f in found).most_common(1)[0][1],
    }


def key(given: argparse.Namespace) -> dict[str, Any]:
    """What runs that are compared have in common."""
    return {"case": given.case, "policy": given.policy, "busy": given.busy}


def kept(path: Path | None, given: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of the same kind that a file has, at most as many as are wanted."""
    if path is None or not path.is_file():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    alike = [one for one in lines if key(given).items() <= one.items()]
    return alike[: given.runs]


def main() -> None:
    """Run ``tune`` n times, and count the runs that agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--busy", type=int, default=1, help="processes that use all cores")
    parser.add_argument("--policy", default="auto:bf16")
    parser.add_argument("--keep", type=Path, help="lines of runs made before, and of these")
    parser.add_argument("--seconds", type=float, default=float("inf"))
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
    found = kept(given.keep, given)
    end = monotonic() + given.seconds
    # As Ctrl-C does: the busy processes end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        for _ in range(given.busy):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(busy.kill)
        while len(found) < given.runs and monotonic() < end:
            made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found.append({**key(given), **json.loads(made.stdout.splitlines()[-1])})
            print(f"{len(found)}: {found[-1]}", file=sys.stderr)
            if given.keep is not None:
                with given.keep.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(found[-1]) + "\n")
    if not found:
        skip("stability", "no time for a run")
        return
    counts = agreeing(found)
    for what, count in counts.items():
        report(
            f"stability {given.case}", f"{what} that agree", count, "",
            bar=None if what == "plans" else len(found),
            at_least=True, busy=given.busy, runs=len(found),
            speedups=[round(f["speedup"], 3) for f in found],
            errors=[float(f"{f['error']:.3g}") for f in found],
            verdicts=dict(Counter(f["verdict"] for f in found)),
        )  # fmt: skip


if __name__ == "__main__":
    main()
