"""The Neuron compilers' ladders on real models, each in one command, under three minutes.

    python -m benchmarks.bench_ladder [CASE ...]

The whole process is timed, with its search for a plan by op. ``cpu_s``, its processor time,
shows how much of that a busy machine adds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.common import report, shared_case, skip

CASES = ("cifar10_resnet20", "sts_minilm_l6")
TARGETS = ("trn1", "inf1")
BAR_S = 180.0

EVALUATION = """
import sys
sys.path.insert(0, {folder!r})
from cases import CASES

def score(run):
    return next(iter(CASES[{name!r}].metric(lambda feeds: list(run(feeds).values())).values()))

def feeds():
    return CASES[{name!r}].calib(16)
"""


def main() -> None:
    """Walk each ladder once."""
    for name in sys.argv[1:] or CASES:
        case = shared_case(name)
        if case is None:
            skip("ladder", "shared/models is absent")
            return
        model = Path(case.model())
        with tempfile.TemporaryDirectory() as folder:
            evaluation = Path(folder) / "evaluation.py"
            text = EVALUATION.format(folder=str(model.parent.parent), name=name)
            evaluation.write_text(text)
            for target in TARGETS:
                _walk(name, model, target, evaluation)


def _walk(name: str, model: Path, target: str, evaluation: Path) -> None:
    words = [sys.executable, "-m", "finecast", "ladder", str(model), "--target", target]
    words += ["--eval", f"{evaluation}:score", "--calib", f"{evaluation}:feeds"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = perf_counter()
    done = subprocess.run(
        [*words, "--tolerance", "0.001", "--json"], check=True, capture_output=True, text=True
    )
    wall_s = perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(done.stdout)
    report(
        "ladder", f"{name}, {target}, {len(found['rungs'])} rungs", round(wall_s, 1), "s",
        bar=BAR_S, cpu_s=round(cpu_s, 1),
    )  # fmt: skip


if __name__ == "__main__":
    main()
