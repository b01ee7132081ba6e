"""Compares predicted and measured times of plans that have about half of their ops in int8.

    python -m benchmarks.bench_predicted_time [resnet20] [minilm] [resnet50]

Steps of the frontier of ``auto:int8`` with a quarter to three quarters of its ops on integers,
in turns with fp32 in one process. A prediction is the sum of profiled kernels and casts. Both
are given as multiples of fp32's speed, so that the machine's momentary speed cancels.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.bench_int8 import CASES, Case
from benchmarks.common import report, skip
from finecast import api
from finecast.data.function_workload import FunctionWorkload
from finecast.engines.base import Feeds, Session
from finecast.measure.racing import Effort, Race
from finecast.numbers.formats import Format
from finecast.planning.problem import Proposal
from finecast.planning.proposing import propose
from finecast.progress import silent
from finecast.rules.policy import Policy

_BENCH: Final = "predicted time"
_POLICY: Final = "auto:int8"
_STEPS: Final = 40
_MOST: Final = 6
_SHARES: Final = (0.25, 0.75)
_OFF: Final = 0.10
_EFFORT: Final = Effort(min_time_s=10.0, settle_s=30.0, known_to=0.03)


def halves(proposals: list[Proposal]) -> list[Proposal]:
    """Some proposals whose number of int8 ops is about half of the largest such number."""
    counts = [p.plan.counts.get(Format.INT8.label, 0) for p in proposals]
    low, high = (share * max(counts) for share in _SHARES)
    found = [p for p, count in zip(proposals, counts, strict=True) if low <= count <= high]
    return found[:: max(1, -(-len(found) // _MOST))]


def figures(case: Case) -> Iterator[tuple[str, float, float]]:
    """For each plan its name, and its speed as predicted and as measured."""
    subject = api.load(str(case.model)).subject("openvino", None)
    workload = FunctionWorkload(
        function=lambda run: 0.0,
        name="",
        calibrate=lambda: [case.feeds],
        remembered=[case.feeds],
    )
    examined = subject.examine(Policy.parse(_POLICY), (), workload, silent)
    exact, *others = propose(examined.planner, examined.analysis(), max_steps=_STEPS)
    plans = {p.name: p for p in [exact, *halves(others)]}
    with ExitStack() as stack:
        calls: dict[str, Callable[[], object]] = {}
        for name, made in plans.items():
            built = subject.model.build(made.plan)
            stack.callback(built.release)
            calls[name] = _call(subject.session(built), case.feeds)
        race = Race.of(calls.pop(exact.name), calls, _EFFORT)
        for name in calls:
            yield name, exact.time_s / plans[name].time_s, race.speed(name).median


def _call(session: Session, feeds: Feeds) -> Callable[[], object]:
    return lambda: session.run(feeds)


def main() -> None:
    """Report each case's plans, and the largest deviation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", default=["resnet20", "resnet50"])
    for name in parser.parse_args().case:
        with tempfile.TemporaryDirectory() as folder:
            case = CASES[name](Path(folder))
            if case is None:
                skip(f"{_BENCH}, {name}", "shared/models is absent")
                continue
            off: list[float] = []
            for plan, predicted, measured in figures(case):
                off.append(abs(measured / predicted - 1))
                report(
                    _BENCH, f"{name}, {plan}", round(measured, 3), "x",
                    predicted=round(predicted, 3), off=round(off[-1], 3),
                )  # fmt: skip
            if off:
                report(_BENCH, f"{name}, the most off", round(max(off), 3), "", bar=_OFF)
            else:
                skip(f"{_BENCH}, {name}", "no plan has about half of its ops in int8")


if __name__ == "__main__":
    main()
