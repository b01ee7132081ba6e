"""How far predicted output errors are from measured ones, over models and plans.

    python scripts/prediction.py ../shared/models [--plans 4] [--only sts_minilm_l6]

The folder holds ``cases.py`` with the models and data. Errors are predicted as ``tune`` does,
by roundings probed one by one on some samples, and measured in OpenVINO on others. Writes
docs/prediction.md and docs/prediction.svg.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from finecast import api
from finecast.engines.base import Feeds
from finecast.errors import EngineError
from finecast.measure.environment import environment, limited
from finecast.numbers.formats import Format
from finecast.pipeline.adjusting import output_error
from finecast.pipeline.workload import MOST_PROBED_ROWS, FunctionWorkload, probed
from finecast.planning.assign import chosen
from finecast.planning.choices import Choice
from finecast.planning.plan import Plan
from finecast.planning.predicting import predicted_error
from finecast.planning.problem import Analysis
from finecast.planning.proposing import propose
from finecast.progress import silent
from finecast.rules.policy import Policy

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
POLICIES: Final = ("auto:bf16", "auto:int8", "auto:int8,bf16")
# Calls of the evaluation: every second one calibrates, the others measure.
_CALLS: Final = 32
# Items that are evaluated, more and more, until they take as many calls.
_ITEMS: Final = (16, 64, 256, 1024)
_SHARES: Final = (0.25, 0.5, 0.75)
_FLOOR: Final = 1e-4
"""Below this relative error fp32's own digits count: such plans are not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Relative output errors of one plan: predicted, on the samples probed, on others."""

    model: str
    policy: str
    plan: str
    predicted: float
    probed: float
    measured: float

    @property
    def off(self) -> float:
        """How far off the prediction is: 0.25 is a quarter too much, or as much too little."""
        return _off(self.predicted, self.measured)

    @property
    def between_samples(self) -> float:
        """How far the plan's own error on the samples probed is from that on the others."""
        return _off(self.probed, self.measured)


def _off(found: float, true: float) -> float:
    if not found or not true:
        return math.inf
    return max(found / true, true / found) - 1


def calls(case: Any, run: Callable[[Feeds], Mapping[str, Any]]) -> list[Feeds]:
    """Feeds of the case's evaluation, evenly spread over it."""
    seen: list[Feeds] = []

    def recorded(feeds: Feeds) -> list[Any]:
        seen.append({name: np.array(array) for name, array in feeds.items()})
        return [*run(feeds).values()]

    for items in _ITEMS:
        seen.clear()
        case.metric(recorded, items)
        if len(seen) >= _CALLS:
            break
    places = np.linspace(0, len(seen) - 1, min(_CALLS, len(seen)))
    return [seen[round(i)] for i in places]


def plans(
    planner: Any, analysis: Analysis, count: int, draw: np.random.Generator
) -> Iterator[tuple[str, Plan]]:
    """All low, along the frontier, and random subsets of units of different sizes."""
    yield "all", planner.lowest()
    for proposal in propose(planner, analysis, max_steps=count + 2)[1:-1]:
        yield "frontier", proposal.plan
    lows = [*analysis.rounded]
    units = analysis.units
    for share in _SHARES:
        for _ in range(count):
            formats = tuple(
                lows[draw.integers(len(lows))] if draw.random() < share else Format.FP32
                for _ in units.members
            )
            choice = Choice(how="", index=0, formats=formats, time_s=0.0, error=0.0, casts=0)
            made = planner.plan(chosen(planner.permissions, units, choice), "random")
            yield f"{share:.0%} at random", made


def figures(name: str, case: Any, count: int) -> Iterator[Figure]:
    """Those of one model."""
    subject = api.load(case.model()).subject("openvino", None)
    data = calls(case, subject.reference.run)
    calibration, others = data[::2], data[1::2]
    workload = FunctionWorkload(
        function=lambda run: 0.0, name="", calibrate=lambda: calibration, remembered=others
    )
    more = probed(calibration, subject.reference.inputs, MOST_PROBED_ROWS)
    for text in POLICIES:
        draw = np.random.default_rng(0)
        examined = subject.examine(Policy.parse(text), (), workload, silent)
        planner = examined.planner
        if not planner.is_free:
            continue
        try:
            analysis = examined.analysis()
        except EngineError as error:
            print(f"{name} {text}: {error.what}", file=sys.stderr)
            continue
        ids = {n.name: n.id for n in planner.graph.nodes}
        seen: set[str] = set()
        for how, plan in plans(planner, analysis, count, draw):
            if plan.digest in seen or not plan.lowers:
                continue
            seen.add(plan.digest)
            built = subject.model.build(plan)
            try:
                session = subject.session(built)
                on_more, measured = (
                    output_error(session, subject.reference, on) for on in (more, others)
                )
            except EngineError:
                continue  # the engine has no kernels for the mix
            finally:
                built.release()
            formats = {ids[n]: f for n, f in plan.formats.items()}
            yield Figure(
                model=name,
                policy=text,
                plan=how,
                predicted=math.sqrt(predicted_error(analysis, formats)),
                probed=on_more,
                measured=measured,
            )


def table(found: Sequence[Figure]) -> list[str]:
    """For each model and policy: plans, median and largest deviation."""
    rows = [
        "| model | policy | plans | median off | most off | between samples: median, most |",
        "|---|---|---|---|---|---|",
    ]
    keys = dict.fromkeys((f.model, f.policy) for f in found)
    for model, policy in keys:
        rows.append(
            _row(model, policy, [f for f in found if (f.model, f.policy) == (model, policy)])
        )
    rows.append(_row("**all**", "", found))
    return rows


def _row(model: str, policy: str, found: Sequence[Figure]) -> str:
    off = np.array([f.off for f in found])
    between = np.array([f.between_samples for f in found])
    worst = max(found, key=lambda f: f.off)
    return (
        f"| {model} | {policy} | {len(found)} | {np.median(off):.0%} |"
        f" {off.max():.0%} ({worst.plan}: {worst.predicted:.2g} for {worst.measured:.2g}) |"
        f" {np.median(between):.0%}, {between.max():.0%} |"
    )


_COLOURS: Final = {"auto:bf16": "#1f77b4", "auto:int8": "#d62728", "auto:int8,bf16": "#9467bd"}
_SIZE, _MARGIN = 480, 60
_TITLE: Final = "relative output error: predicted (up) over measured; dashed: 50% off"


def svg(found: Sequence[Figure]) -> str:
    """Predicted over measured errors, both axes logarithmic, with the bars of 50%."""
    ends = [x for f in found for x in (f.predicted, f.measured)]
    low, high = math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends)))
    scale = (_SIZE - 2 * _MARGIN) / (high - low)

    def at(measured: float, predicted: float) -> tuple[float, float]:
        x, y = (scale * (math.log10(v) - low) for v in (measured, predicted))
        return _MARGIN + x, _SIZE - _MARGIN - y

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SIZE}" height="{_SIZE}">',
        "<style>text { font: 12px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for factor, dash in ((1.0, ""), (1.5, "4 4"), (1 / 1.5, "4 4")):
        (x1, y1), (x2, y2) = (at(10.0**e, factor * 10.0**e) for e in (low, high))
        line = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        parts.append(f'<line {line} stroke="#888" stroke-dasharray="{dash}"/>')
    for power in range(low, high + 1):
        x, y = at(10.0**power, 10.0**power)
        parts.append(f'<text x="{x:.0f}" y="{_SIZE - _MARGIN + 18}">1e{power}</text>')
        parts.append(f'<text x="{_MARGIN - 36}" y="{y:.0f}">1e{power}</text>')
    for one in found:
        x, y = at(one.measured, one.predicted)
        colour = _COLOURS[one.policy]
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" opacity=".6"/>')
    for number, (policy, colour) in enumerate(_COLOURS.items()):
        y = _MARGIN + 16 * number
        parts.append(f'<text x="{_MARGIN + 10}" y="{y}" fill="{colour}">{policy}</text>')
    parts += [
        f'<text x="{_SIZE / 2}" y="{_SIZE - 14}" text-anchor="middle">measured</text>',
        f'<text x="{_SIZE / 2}" y="24" text-anchor="middle">{_TITLE}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--plans", type=int, default=4)
    parser.add_argument("--only", action="append")
    parser.add_argument("--out", type=Path, default=DOCS)
    options = parser.parse_args()
    sys.path.insert(0, str(options.models))
    cases: dict[str, Any] = importlib.import_module("cases").CASES
    found: list[Figure] = []
    for name in options.only or cases:
        try:
            for one in figures(name, cases[name], options.plans):
                print(one, f"off {one.off:.0%}", flush=True)
                found.append(one)
        except EngineError as error:
            print(f"{name}: {error.what}", file=sys.stderr)
    judged = [f for f in found if f.predicted > _FLOOR and f.measured > _FLOOR]
    head = (DOCS / "prediction.md").read_text().partition("<!-- figures -->")[0]
    below = f"{len(found) - len(judged)} of {len(found)} plans are below {_FLOOR:g}"
    made = f"Made on {limited(environment())}; {below}."
    text = [f"{head}<!-- figures -->", made, "", *table(judged), ""]
    (options.out / "prediction.md").write_text("\n".join(text))
    (options.out / "prediction.svg").write_text(svg(judged))


if __name__ == "__main__":
    main()
