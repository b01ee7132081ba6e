"""What benchmarks share: JSON lines that say on which machine they were made.

The first line that a benchmark prints is the environment; every other line is one figure with
its bar. ``python -m benchmarks.common`` prints the environment alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from finecast.measure import timing
from finecast.measure.environment import environment

# Folder of real models and their data: $FINECAST_MODELS, else one beside the repository.
SHARED_MODELS = Path(
    os.environ.get(
        "FINECAST_MODELS", Path(__file__).resolve().parents[2] / "shared" / "models"
    )
)
# Parts of the environment that may differ between figures of one table; the machine may not.
_SOFTWARE = frozenset({"finecast", "platform"})


_ROOT = Path(__file__).resolve().parents[1]


def run_apart(
    benchmark: str,
    arguments: Sequence[str],
    *,
    limit_s: float,
    held: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The last line, JSON, that a benchmark prints in a process of its own.

    Args:
        benchmark: Its module.
        arguments: Its arguments.
        limit_s: The seconds after which it is ended.
        held: Environment variables to set in addition to this process's own.

    Returns:
        The line; if the process failed, the reason as ``failed``.
    """
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *arguments]
    environ = {**os.environ, **(held or {})}
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, check=False,
            timeout=limit_s, env=environ,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {limit_s:g} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return {"failed": said[0][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def kept_lines(path: Path, *keys: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Lines of JSON that a benchmark kept, by their values of ``keys``; of equals the last."""
    if not path.is_file():
        return {}
    found = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {tuple(line[key] for key in keys): line for line in found}


def peak_bytes() -> list[int]:
    """The largest resident sets of this process and of each child that runs; Linux.

    Their sum is at least what all took at one time. ``ru_maxrss`` would inherit that of the
    process that started this one.
    """
    found: list[int] = []
    for folder in (Path("/proc/self"), *_children()):
        lines = (folder / "status").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]
    return found


TUNE_EVALUATIONS, TUNE_REST_S = 5, 10.0
"""What ``tune`` should take: so many evaluations of all data, and seconds beside them."""


def tune_aim_s(evaluation_s: float) -> float:
    """The seconds that ``tune`` should take at most."""
    return TUNE_EVALUATIONS * evaluation_s + TUNE_REST_S


def cpu_seconds() -> float:
    """Processor time of this process and of each child that runs; Linux."""
    ticks = 0
    for folder in _children():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user's and the kernel's
    return process_time() + ticks / os.sysconf("SC_CLK_TCK")


class _ProcessorTime:
    """Replaces the module ``time``, so that time of other programs does not count."""

    perf_counter = process_time = staticmethod(process_time)


def count_processor_time() -> None:
    """Make races in this process count processor time from now on; best on one thread."""
    timing.__dict__["time"] = _ProcessorTime


def _children() -> list[Path]:
    found: list[Path] = []
    for path in Path("/proc/self").glob("task/*/children"):
        with suppress(FileNotFoundError):  # the thread has ended meanwhile
            found += [Path("/proc", pid) for pid in path.read_text().split()]
    return found


class NotComparableError(Exception):
    """Figures of different machines, or of an unknown one."""


def count(text: str) -> int:
    """A number of things that an option states: 1 or more.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


@cache
def print_environment() -> None:
    """Print the environment line, once per process."""
    _line({"environment": environment().as_json()})


def report(
    bench: str,
    what: str,
    value: float,
    unit: str,
    *,
    bar: float | None = None,
    at_least: bool = False,
    **detail: object,
) -> None:
    """Print one figure.

    Args:
        bench: The benchmark.
        what: What was measured.
        value: The figure.
        unit: Its unit.
        bar: The largest value that is accepted.
        at_least: Whether the bar is the least value accepted instead.
        detail: Further facts that explain the figure.
    """
    print_environment()
    content: dict[str, object] = {"bench": bench, "what": what, "value": value, "unit": unit}
    if bar is not None:
        met = value >= bar if at_least else value <= bar
        content |= {"bar": bar, "at_least": at_least, "met": met}
    _line({**content, "detail": detail} if detail else content)


def skip(bench: str, why: str) -> None:
    """Say that a benchmark cannot run here."""
    print_environment()
    _line({"bench": bench, "skipped": why})


def _line(content: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of ``work``."""
    times: list[float] = []
    for _ in range(repeats):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return median(times)


def run_cli(*args: str) -> float:
    """Wall time of ``finecast ARGS`` as a process of its own.

    Raises:
        RuntimeError: If it fails.
    """
    start = perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "finecast", *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"finecast {' '.join(args)}: {done.stderr.strip()}")
    return perf_counter() - start


def shared_case(name: str) -> Any:
    """A case of ``shared/models/cases.py``; None where the folder is absent."""
    path = SHARED_MODELS / "cases.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES[name]


def merge(files: Mapping[str, Iterable[str]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The one environment of all lines, and the lines that are figures.

    Raises:
        NotComparableError: If a file does not say its environment, or two differ in machine,
            Python or libraries.
    """
    found: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for name, lines in files.items():
        known = False
        for line in lines:
            if not line.startswith("{"):
                continue
            content: dict[str, Any] = json.loads(line)
            if "environment" in content:
                found = found or content["environment"]
                _check_same(found, content["environment"], name)
                known = True
            elif "bench" in content:
                rows.append(content)
        if not known:
            raise NotComparableError(f"{name} does not say on which machine it was made")
    return found, rows


def _check_same(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    for key in sorted((one.keys() | other.keys()) - _SOFTWARE):
        if one.get(key) != other.get(key):
            raise NotComparableError(
                f"{name} was made elsewhere: {key} is {other.get(key)}, not {one.get(key)}"
            )


if __name__ == "__main__":
    print_environment()
