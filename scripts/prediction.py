"""Compares predicted output errors with measured ones, over models and plans.

    python scripts/prediction.py ../shared/models [--plans 4] [--only sts_minilm_l6] [--resume]

The folder holds ``cases.py`` with the models and data. Errors are predicted as ``tune`` does,
by roundings probed one by one on some samples, and measured in OpenVINO on others. The results
of each model and policy are added to the file ``--json`` as soon as they are there; ``--only``
and ``--resume`` keep those that it has. docs/prediction.md and docs/prediction.svg are written
of all results in it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from finecast import api
from finecast.data.function_workload import FunctionWorkload
from finecast.data.workload import MOST_PROBED_ROWS, probed, samples
from finecast.engines.base import Feeds
from finecast.errors import EngineError
from finecast.measure.environment import cpu_label, environment
from finecast.native.gains import output_error
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import chosen
from finecast.planning.problem import Analysis, Choice, predicted_error
from finecast.planning.proposing import propose
from finecast.progress import silent
from finecast.rules.policy import Policy

ROOT: Final = Path(__file__).resolve().parents[1]
POLICIES: Final = ("auto:bf16", "auto:int8", "auto:int8,bf16")
# Samples used of the evaluation: one half, as many as ``tune`` probes on, predicts, the other
# half measures. A call may have several samples, but each half has at least a few calls.
_SAMPLES: Final = 2 * MOST_PROBED_ROWS
_LEAST_CALLS: Final = 8
# Items of the evaluation that are tried in turn, until they give enough samples.
_ITEMS: Final = (16, 64, 256, 1024)
_SHARES: Final = (0.25, 0.5, 0.75)
_FLOOR: Final = 1e-4
"""Plans below this relative error are not judged: fp32's own rounding matters there."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Relative output errors of one plan.

    ``predicted`` is predicted; ``probed`` is measured on the samples that it was predicted on,
    ``measured`` on others.
    """

    model: str
    policy: str
    plan: str
    predicted: float
    probed: float
    measured: float

    @property
    def off(self) -> float:
        """How far off the prediction is: 0.25 if one is 1.25 times the other."""
        return _off(self.predicted, self.measured)

    @property
    def between_samples(self) -> float:
        """How far apart the measured errors on the two halves of the samples are."""
        return _off(self.probed, self.measured)


def _off(found: float, true: float) -> float:
    if not found or not true:
        return math.inf
    return max(found / true, true / found) - 1


def _judged(found: Sequence[Figure]) -> list[Figure]:
    return [f for f in found if f.predicted > _FLOOR and f.measured > _FLOOR]


def calls(case: Any, run: Callable[[Feeds], Mapping[str, Any]]) -> list[Feeds]:
    """Feeds of the case's evaluation, evenly spaced over it."""
    seen: list[Feeds] = []

    def recorded(feeds: Feeds) -> list[Any]:
        seen.append({name: np.array(array) for name, array in feeds.items()})
        return [*run(feeds).values()]

    wanted = 0
    for items in _ITEMS:
        seen.clear()
        case.metric(recorded, items)
        wanted = max(_SAMPLES // samples(seen[0]), _LEAST_CALLS)
        if len(seen) >= wanted:
            break
    shapes = [tuple(a.shape for a in feeds.values()) for feeds in seen]
    most, count = Counter(shapes).most_common(1)[0]
    if count > len(seen) / 2:  # the last call may have fewer samples
        seen = [feeds for feeds, shape in zip(seen, shapes, strict=True) if shape == most]
    places = np.linspace(0, len(seen) - 1, min(wanted, len(seen)))
    return [seen[round(i)] for i in places]


def fixed(path: str, data: Sequence[Feeds]) -> onnx.ModelProto:
    """The model with fixed shapes, if all calls have the same.

    OpenVINO's casts to bf16 round wrongly where shapes are open, as the README says.
    """
    model = onnx.load(path)
    shapes = [{n: a.shape for n, a in feeds.items()} for feeds in data]
    if all(s == shapes[0] for s in shapes):
        for port in model.graph.input:
            for size, dim in zip(
                shapes[0].get(port.name, ()), port.type.tensor_type.shape.dim, strict=False
            ):
                dim.dim_value = size
    return model


def plans(
    planner: Any, analysis: Analysis, count: int, draw: np.random.Generator
) -> Iterator[tuple[str, Plan]]:
    """Plans to judge: all low, those of the frontier, and random sets of low units."""
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
            choice = Choice(formats=formats, time_s=0.0, error=0.0)
            made = planner.plan(chosen(planner.permissions, units, choice), "random")
            yield f"{share:.0%} at random", made


class Measured:
    """One model, whose policies are all planned and measured on the same samples."""

    def __init__(self, name: str, case: Any) -> None:
        self.name = name
        data = calls(case, api.load(case.model()).subject("openvino", None).reference.run)
        self.subject = api.load(fixed(case.model(), data)).subject("openvino", None)
        calibration, self.others = data[::2], data[1::2]
        self.workload = FunctionWorkload(
            function=lambda run: 0.0,
            name="",
            calibrate=lambda: calibration,
            remembered=self.others,
        )
        self.more = probed(calibration, self.subject.reference, MOST_PROBED_ROWS)

    def figures(self, text: str, count: int) -> Iterator[Figure]:
        """The figures of one policy's plans."""
        draw = np.random.default_rng(0)
        subject = self.subject
        examined = subject.examine(Policy.parse(text), (), self.workload, silent)
        planner = examined.planner
        if not planner.is_free:
            return
        analysis = examined.analysis()
        ids = {n.name: n.id for n in planner.graph.nodes}
        seen: set[str] = set()
        for how, plan in plans(planner, analysis, count, draw):
            errors = () if plan.digest in seen or not plan.lowers else self.errors(plan)
            seen.add(plan.digest)
            if errors:
                formats = {ids[n]: f for n, f in plan.formats.items()}
                predicted = math.sqrt(predicted_error(analysis, formats))
                yield Figure(self.name, text, how, predicted, *errors)

    def errors(self, plan: Plan) -> Sequence[float]:
        """The plan's errors on both halves of the samples; none if no engine runs it."""
        built = self.subject.model.build(plan)
        try:
            session = self.subject.session(built)
            return [
                output_error(session, self.subject.reference, on)
                for on in (self.more, self.others)
            ]
        except EngineError:
            return ()
        finally:
            built.release()


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
    """A plot of predicted over measured errors, on logarithmic axes, with lines 50% off."""
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


def measure(given: argparse.Namespace, known: list[dict[str, Any]]) -> None:
    """Add the results of each model and policy to ``known``, and write them at once."""
    cases: dict[str, Any] = importlib.import_module("cases").CASES
    done = {(entry["model"], entry["policy"]) for entry in known} if given.resume else set()
    for name in given.only or cases:
        wanted = [text for text in POLICIES if (name, text) not in done]
        try:
            model = Measured(name, cases[name]) if wanted else None
            for text in wanted:
                assert model is not None
                found = [asdict(one) for one in model.figures(text, given.plans)]
                entry = {"model": name, "policy": text, "figures": found}
                known[:] = [e for e in known if (e["model"], e["policy"]) != (name, text)]
                known.append(entry)
                given.json.parent.mkdir(parents=True, exist_ok=True)
                given.json.write_text("".join(json.dumps(e) + "\n" for e in known))
                judged = _judged([Figure(**one) for one in found])
                print(*(table(judged)[2:3] if judged else ()), sep="\n", flush=True)
        except EngineError as error:
            print(f"{name}: {error.what}", file=sys.stderr)


def main() -> None:
    """Measure, and write the page and the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path)
    parser.add_argument("--plans", type=int, default=4)
    parser.add_argument("--only", action="append")
    parser.add_argument("--resume", action="store_true", help="leave out what --json has")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "prediction.jsonl")
    given = parser.parse_args()
    sys.path.insert(0, str(given.models))
    keep = (given.only or given.resume) and given.json.exists()
    known = [json.loads(line) for line in given.json.read_text().splitlines()] if keep else []
    measure(given, known)
    order = [*importlib.import_module("cases").CASES]
    known.sort(key=lambda e: (order.index(e["model"]), POLICIES.index(e["policy"])))
    write([Figure(**one) for entry in known for one in entry["figures"]])


def write(found: Sequence[Figure]) -> None:
    """Write the figures into docs/prediction.md, after its text, and docs/prediction.svg."""
    judged = _judged(found)
    docs = ROOT / "docs"
    head = (docs / "prediction.md").read_text().partition("<!-- figures -->")[0]
    below = f"{len(found) - len(judged)} of {len(found)} plans are below {_FLOOR:g}"
    made = f"Made on {cpu_label(environment())}; {below}."
    text = [f"{head}<!-- figures -->", made, "", *table(judged), ""]
    (docs / "prediction.md").write_text("\n".join(text))
    (docs / "prediction.svg").write_text(svg(judged))


if __name__ == "__main__":
    main()
