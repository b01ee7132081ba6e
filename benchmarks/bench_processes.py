"""How much the speed of the same two files differs from process to process.

    python -m benchmarks.bench_processes FP32 TUNED FEEDS.npz --engine openvino

Each process loads both and times them in turns, several times over. The spread of a process'
own speeds is that of noise; what the means of processes differ by beyond that is the
processes': where memory lies, which threads run where. Speeds are those of processor time,
which other processes disturb least, and those by the clock.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import report, run_apart
from finecast.engines import get_engine
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.measure.timing import pass_over

_EFFORT: Final = Effort(min_time_s=0.3, rounds=40)
_LIMIT_S: Final = 600.0
_CLOCKS: Final = {"by processor time": "used_s", "by the clock": "wall_s"}


def speeds(files: Sequence[Path], engine: str, races: int) -> list[list[float]]:
    """Speeds of races in this process, by both clocks."""
    fp32, tuned, feeds = files
    loader = get_engine(engine)
    first, second = loader.load(fp32), loader.load(tuned)
    with np.load(feeds) as arrays:
        calls = [{spec.name: arrays[spec.name] for spec in first.inputs}]
    anchor, call = pass_over(first, calls), pass_over(second, calls)
    found: list[list[float]] = []
    for _ in range(races):
        race = Race.of(anchor, {"tuned": call}, _EFFORT)
        samples = race._samples  # pyright: ignore[reportPrivateUsage]  # of both clocks
        both = [
            [
                math.log(getattr(took, clock) / getattr(samples["tuned"][number], clock))
                for number, took in samples[ANCHOR].items()
            ]
            for clock in _CLOCKS.values()
        ]
        found.append([math.exp(float(np.median(logs))) for logs in both])
    return found


def main() -> None:
    """Print the spread within processes, and that between them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs=3, type=Path, metavar="FILE")
    parser.add_argument("--engine", default="openvino")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--races", type=int, default=4)
    parser.add_argument("--one", action="store_true", help="one process, here; prints JSON")
    given = parser.parse_args()
    if given.one:
        print(json.dumps({"speeds": speeds(given.files, given.engine, given.races)}))
        return
    arguments = [*map(str, given.files), "--engine", given.engine, "--one"]
    arguments += ["--races", str(given.races)]
    found = [
        run_apart("bench_processes", arguments, limit_s=_LIMIT_S)["speeds"]
        for _ in range(given.processes)
    ]
    logs = np.log(np.array(found))  # by process, race and clock
    for number, clock in enumerate(_CLOCKS):
        own = logs[..., number]
        within = float(own.var(axis=1, ddof=1).mean())
        between = float(own.mean(axis=1).var(ddof=1)) - within / given.races
        report(
            f"processes {given.files[1].name}", f"deviation between processes, {clock}",
            round(100 * math.sqrt(max(between, 0.0)), 1), "%",
            within=round(100 * math.sqrt(within), 1),
            speeds=np.exp(own.mean(axis=1)).round(3).tolist(),
        )  # fmt: skip


if __name__ == "__main__":
    main()
