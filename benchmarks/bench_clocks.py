"""By which clock a race beside busy processes agrees with one on an idle machine, and itself.

    python -m benchmarks.bench_clocks [CASE ...] [--races N] [--seconds S]

Three models are timed in turns with fp32: ``all:bf16``, ``matmult:bf16`` and OpenVINO's hint.
Each race loads all anew. Reported are the median speed over races, by the time of calls and by
the processor time that they used, and its standard deviation between races. Beside them runs
nothing; a process that multiplies matrices on all cores; one and three that run a loop.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median, pstdev
from time import perf_counter, sleep
from typing import Final, TypeAlias

from benchmarks.bench_minilm import runner
from benchmarks.bench_stability import BUSY, CASES, calibration
from benchmarks.common import report, shared_case, skip
from finecast import api
from finecast.engines.base import Feeds
from finecast.measure.timing import Took, Turns

# Models by name: file and precision hint.
_Files: TypeAlias = Mapping[str, tuple[Path, str]]
_LOOP: Final = "while True: pass"
_BESIDE: Final[Mapping[str, tuple[str, ...]]] = {
    "nothing": (),
    "matrices on all cores": (BUSY,),
    "a loop": (_LOOP,),
    "three loops": (_LOOP,) * 3,
}
_CLOCKS: Final[Mapping[str, Callable[[Took], float]]] = {
    "calls": lambda took: took.wall_s,
    "processor": lambda took: took.used_s,
}


def speeds(files: _Files, given: Feeds, seconds: float) -> dict[str, dict[str, float]]:
    """Of each model, how many times as fast as fp32 it is, by each clock."""
    calls = {name: runner(path, hint, dict(given)) for name, (path, hint) in files.items()}
    turns = Turns(calls)
    turns.warm_up(3)
    rounds: list[dict[str, Took]] = []
    end = perf_counter() + seconds
    while perf_counter() < end or len(rounds) < 5:
        rounds.append(turns.round(files))
    return {
        name: {
            clock: median(of(took["fp32"]) / of(took[name]) for took in rounds)
            for clock, of in _CLOCKS.items()
        }
        for name in files
    }


@contextmanager
def busy(programs: tuple[str, ...]) -> Generator[None]:
    """Processes that run ``programs`` meanwhile."""
    started = [subprocess.Popen([sys.executable, "-c", text]) for text in programs]
    sleep(1)  # until they have imported what they use
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def compare(case_name: str, folder: Path, races: int, seconds: float) -> None:
    """Report one case beside each load."""
    case = shared_case(case_name)
    assert case is not None
    source = Path(case.model())
    files = {"fp32": (source, "f32"), "hint": (source, "bf16")}
    for scope in ("all", "matmult"):
        files[scope] = (folder / f"{case_name}-{scope}.onnx", "f32")
        api.convert(source, files[scope][0], f"{scope}:bf16", verify=False)
    given = calibration(case_name, case, CASES[case_name][1])[0]
    for beside, programs in _BESIDE.items():
        with busy(programs):
            found = [speeds(files, given, seconds) for _ in range(races)]
        for name in (n for n in files if n != "fp32"):
            for clock in _CLOCKS:
                values = [one[name][clock] for one in found]
                report(
                    f"clocks {case_name}", f"{name}, beside {beside}, by {clock}",
                    round(median(values), 3), "x",
                    deviation=round(pstdev(values) / median(values), 4), races=races,
                )  # fmt: skip


def main() -> None:
    """Compare the clocks on the named cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", default=["cifar10_resnet20", "sts_minilm_l6"])
    parser.add_argument("--races", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    for name in given.case:
        if name not in CASES:
            parser.error(f"no case {name!r}: one of {', '.join(CASES)}")
        if shared_case(name) is None:
            skip("clocks", "shared/models is absent")
            continue
        with tempfile.TemporaryDirectory() as folder:
            compare(name, Path(folder), given.races, given.seconds)


if __name__ == "__main__":
    main()
