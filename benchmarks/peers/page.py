"""The page of the comparison, and its figure, from rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import exp, log
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.common import TUNE_EVALUATIONS, TUNE_REST_S, tune_aim_s
from benchmarks.peers.reasons import HELD, REASONS
from benchmarks.peers.results import Row
from benchmarks.peers.tools import FINECAST, TOOLS

# Two whose speeds differ by less are equally fast: what machines differ by from run to run.
_TIE: Final = 1.02
_TRIED: Final = """Where it is missed, no single phase holds it. These made it shorter:
errors of weights are probed in groups, probes run in models that have a part of the
roundings, values are observed in two threads, two models are compiled at a time, plans race
only if they are predicted to be within 15% of the fastest, a race ends when what decides is
known, a trial tells the error that the next plan is aimed at. A timing cache saves the
profile of a second `tune`; there is none here. Worked out and not built: probes that start
at the op that is rounded, as they would save a third of the runs at best."""
# How many phases of finecast's time are shown, the longest ones.
_PHASES: Final = 5

_HEAD: Final = """# finecast and other tools

Written by `make peers` (`python -m benchmarks.peers`); do not edit. {machine}.

Each tool makes its model in an environment of its own, in its best documented way (below),
with the same calibration data, the same data to evaluate on where it takes a metric, and the
same loss to keep. The file is what counts, not what the tool says of it: one scorer runs it in
OpenVINO on held data that no tool saw, and it is timed in turns with the fp32 model and all
other files in one process. A model is valid if OpenVINO runs it and it loses at most what is
allowed on the held data. Speed is the time of a call of fp32 over that of the file. Seconds
are the tool's own, with loading and saving, without starting Python. "Evaluations" are runs of
all search data or, of a tool that knows no metric, of one call.

![speed of each tool's model beside fp32]({figure})
"""


def write(path: Path, rows: Sequence[Row], note: str = "") -> None:
    """Write the page, and the figure beside it; ``note`` stands behind how it was made."""
    models = _by_model(rows)
    figure = path.with_suffix(".svg")
    figure.write_text(_figure(models), encoding="utf-8")
    machines = sorted({row.versions.rpartition("openvino ")[2] for row in rows})
    machine = "; ".join(m.replace("; ", " on ", 1) for m in machines)
    denied = max((row.fp32.get("denied", 0.0) for row in rows), default=0.0)
    if denied:
        machine += (
            f". Other processes took up to {denied:.0%} of the processor time wanted: speeds"
            " compare processor times there, and seconds are those of a busy machine"
        )
    parts = [
        _HEAD.format(machine=f"OpenVINO {machine}", figure=figure.name),
        *filter(None, [note]),
        "## In short\n\n" + _summary(models),
        "## By tool\n\n" + _of_tools(models),
        "## Where finecast's time goes\n\n" + _of_time(models),
        *(_of_model(found) for found in models.values()),
        "## How each tool is used\n\n"
        + _table(
            ("tool", "release", "use"),
            [(t.title, _release(key, rows), t.used) for key, t in TOOLS.items()],
        ),
    ]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _by_model(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.model, {})[row.tool] = row
    return found


def fastest(rows: Mapping[str, Row], *, but: str = "") -> Row | None:
    """The fastest valid model that is faster than fp32; None if fp32 is."""
    kept = [r for r in rows.values() if r.keeps and r.tool != but and (r.speed or 0) > 1]
    return max(kept, key=lambda row: row.speed or 0, default=None)


def _summary(models: Mapping[str, Mapping[str, Row]]) -> str:
    lines: list[tuple[str, ...]] = []
    for name, rows in models.items():
        own, other = rows.get(FINECAST), fastest(rows, but=FINECAST)
        about = next(iter(rows.values())).about
        if own is None:
            lines.append((about, "", "", _named(other), "not run"))
            continue
        # Where nothing is gained finecast leaves the model as it is.
        ahead = own.keeps and _speed(own) * _TIE >= _speed(other)
        loses = own.best is not None and not own.keeps
        why = (
            HELD if loses else REASONS.get(name) or own.reason or str(own.made.get("why", ""))
        )
        verdict = "yes" if ahead else f"**no**: {why}"
        taken = f"{own.made.get('seconds', 0):.0f}"
        lines.append((about, _shown(own), taken, _named(other), verdict))
    head = ("model", "finecast", "seconds", "fastest valid model of another tool",
            "finecast's is the fastest, or within 2%")  # fmt: skip
    return _table(head, lines)


def _speed(row: Row | None) -> float:
    """Speed of a valid model; 1, fp32's own, if there is none."""
    return row.speed or 1.0 if row is not None and row.keeps else 1.0


def _shown(row: Row) -> str:
    if row.speed is None:
        return row.reason
    return f"x {row.speed:.2f}" if row.keeps else f"x {row.speed:.2f}, {row.reason}"


def _named(row: Row | None) -> str:
    if row is None:
        return "none"
    return f"x {row.speed:.2f}, {TOOLS[row.tool].title}{_by_hint(row)}"


def _by_hint(row: Row) -> str:
    """The hint a row's speed is of, where its tool is judged with several."""
    return f" ({row.best})" if len(TOOLS[row.tool].hints) > 1 and row.best else ""


def _of_tools(models: Mapping[str, Mapping[str, Row]]) -> str:
    lines: list[tuple[float, tuple[str, ...]]] = []
    told = [rows for rows in models.values() if any(row.judged for row in rows.values())]
    for key, tool in TOOLS.items():
        rows = [found[key] for found in told if key in found]
        rows = [row for row in rows if "not_applicable" not in row.made]
        if not rows:
            continue
        runs = [row for row in rows if row.best is not None]
        valid = [row for row in rows if row.keeps]
        # Nobody uses a model that is invalid or slower: fp32 is used instead.
        mean = exp(sum(log(max(_speed(row), 1.0)) for row in rows) / len(rows))
        times = [row.made["seconds"] for row in rows if "seconds" in row.made]
        lines.append(
            (
                -mean,
                (
                    tool.title, f"{len(rows)}", f"{len(runs)}", f"{len(valid)}",
                    f"{mean:.3f}", f"{median(times):.1f}" if times else "",
                ),
            )
        )  # fmt: skip
    used = "mean speed, fp32 where not valid or slower"
    head = ("tool", "models", "files that run", "valid", used, "median seconds")
    return _table(head, [cells for _, cells in sorted(lines)])


def _of_time(models: Mapping[str, Mapping[str, Row]]) -> str:
    """Seconds of finecast by phase, beside the aim: some evaluations and some seconds more."""
    lines: list[tuple[str, ...]] = []
    for rows in models.values():
        own = rows.get(FINECAST)
        phases: Mapping[str, float] = own.made.get("phases_s", {}) if own is not None else {}
        if own is None or not phases:
            continue
        taken, aim = own.made["seconds"], tune_aim_s(phases.get("baseline", 0.0))
        longest = sorted(phases.items(), key=lambda one: -one[1])[:_PHASES]
        tools = [r.made["seconds"] for r in rows.values() if r.keeps and r is not own]
        lines.append(
            (
                own.about, f"{taken:.0f}", f"{aim:.0f}",
                "met" if taken <= aim else "**missed**",
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in longest),
                f"{max(tools):.0f}" if tools else "",
            )
        )  # fmt: skip
    head = ("model", "seconds", "aim", "", "longest phases", "slowest valid tool's seconds")
    said = (
        f"The aim is the time of {TUNE_EVALUATIONS} evaluations of all search data by the fp32"
        f" model, with loading it, and {TUNE_REST_S:.0f} seconds. {_TRIED}"
    )
    return f"{said}\n\n{_table(head, lines)}"


def _of_model(rows: Mapping[str, Row]) -> str:
    one = next(iter(rows.values()))
    fp32 = next((row.fp32 for row in rows.values() if row.fp32), {})
    lines = [_cells(row) for row in sorted(rows.values(), key=_order)]
    head = ("tool", "speed", "ms", f"{one.metric}, held", "loss", "MB", "evaluations",
            "seconds", "processor s", "")  # fmt: skip
    beside = (
        f"fp32: {one.metric} {fp32['score']:.4f}, {fp32['ms'] or 0:.2f} ms."
        f" Allowed loss: {one.tolerance:g}."
        if fp32
        else ""
    )
    parts = (f"## {one.about}", beside, _table(head, lines))
    return "\n\n".join(part for part in parts if part)


def _order(row: Row) -> tuple[bool, bool, float]:
    return not row.keeps, row.speed is None, -(row.speed or 0)


def _cells(row: Row) -> tuple[str, ...]:
    made, speed = row.made, row.speed
    run = row.runs.get(row.best or "", {})
    return (
        TOOLS[row.tool].title + _by_hint(row),
        "" if speed is None else f"{speed:.2f}",
        f"{run['ms']:.2f}" if run else "",
        f"{run['score']:.4f}" if run else "",
        "" if row.loss is None else f"{row.loss:.4f}",
        f"{row.size / 1e6:.2f}" if row.size else "",
        f"{made['evaluations']}" if made.get("evaluations") else "",
        f"{made['seconds']:.1f}" if "seconds" in made else "",
        f"{made['processor_s']:.1f}" if "processor_s" in made else "",
        _note(row),
    )


def _note(row: Row) -> str:
    if row.reason:
        return row.reason
    if row.tool == FINECAST:
        ops = ", ".join(f"{n} {fmt}" for fmt, n in row.made.get("ops", {}).items())
        return ops if row.made.get("verdict") == "improved" else "fp32 kept"
    return ""


def _release(tool: str, rows: Iterable[Row]) -> str:
    found = (re.split("[;,]", row.versions)[0] for row in rows if row.tool == tool)
    return ", ".join(dict.fromkeys(one.replace("==", " ") for one in found))


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    shown = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(_cell(c) for c in line)} |" for line in shown)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


_STYLE: Final = """svg { background: #fff; font: 13px system-ui, sans-serif; }
text { fill: #333; } .title { font-size: 15px; font-weight: 600; } .grid { stroke: #e3e3e3; }
.one { stroke: #999; stroke-dasharray: 3 3; } .own { fill: #1a7f37; }
.peer { fill: #7a8aa0; fill-opacity: .75; } .bad { stroke: #c62f2f; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  svg { background: #15181d; } text { fill: #d8dce2; } .grid { stroke: #2c323b; }
  .own { fill: #4cc264; } .peer { fill: #93a1b5; } .bad { stroke: #ff7b72; }
}"""
_LEFT, _RIGHT, _TOP, _STEP = 300, 700, 64, 26


def _figure(models: Mapping[str, Mapping[str, Row]]) -> str:
    """A line for each model: dots of valid models by their speed, crosses of others."""
    every = [row.speed for rows in models.values() for row in rows.values() if row.speed]
    top = max([2.0, *every])
    title = "Speed beside fp32 in OpenVINO of the models that tools make"
    bottom = _TOP + _STEP * len(models)

    def x(speed: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * speed / top

    parts = [f'<text class="title" x="16" y="24">{title}</text>']
    legend = (
        (0, _dot("own", _LEFT, 42), "finecast"),
        (90, _dot("peer", _LEFT + 90, 42), "another tool"),
        (205, _cross(_LEFT + 205, 42), "loses too much"),
    )
    for at, mark, text in legend:
        parts.append(f'{mark}<text x="{_LEFT + at + 10}" y="46">{text}</text>')
    step = 0.5 if top <= 4 else 1.0
    for i in range(int(top / step) + 1):
        at = x(i * step)
        kind = "one" if i * step == 1 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{i * step:g}x</text>'
        )
    for i, rows in enumerate(models.values()):
        y = _TOP + _STEP * i + 8
        about = next(iter(rows.values())).about
        parts.append(
            f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{escape(about)}</text>'
        )
        # finecast's dot last, so that it is above the others.
        drawn = sorted(rows.values(), key=lambda row: row.tool == FINECAST)
        parts += [_mark(row, x(row.speed), y) for row in drawn if row.speed is not None]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {bottom + 32}" role="img"'
        f' aria-label="{title}">\n<style>\n{_STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _mark(row: Row, x: float, y: float) -> str:
    told = f"<title>{escape(TOOLS[row.tool].title)}: {row.speed:.2f}x</title>"
    if not row.keeps:
        return f"<g>{told}{_cross(x, y)}</g>"
    kind = "own" if row.tool == FINECAST else "peer"
    return f"<g>{told}{_dot(kind, x, y)}</g>"


def _dot(kind: str, x: float, y: float) -> str:
    radius = {"own": 6, "peer": 4}[kind]
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y}" r="{radius}"/>'


def _cross(x: float, y: float) -> str:
    return f'<path class="bad" d="M{x - 4:.1f} {y - 4}l8 8m0 -8l-8 8"/>'
