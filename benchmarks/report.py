"""From the benchmarks' JSON lines to the tables of RESULTS.md.

    make bench                                       # writes build/bench.jsonl
    python -m benchmarks.report build/bench.jsonl > benchmarks/RESULTS.md

Refuses lines of different machines: their figures say nothing side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import NotComparableError, merge

_TITLES = {
    "cli_help": "The command line",
    "solve": "The solver: one lambda",
    "frontier": "The solver: the whole frontier",
    "convert_bert": "Converting a 12-layer BERT",
    "minilm": "MiniLM-L6 converted to bf16, 16 x 64, OpenVINO",
    "tune cifar10_resnet20": "Tuning ResNet-20 (CIFAR-10), batch 32, OpenVINO",
    "tune sts_minilm_l6": "Tuning MiniLM-L6 (STS), 16 x 64, OpenVINO",
    "convert": "Converting graphs of many nodes, and 2.4 GB of external data",
    "ladder": "The Neuron compilers' ladders, each in one command",
    "tensorflow": "TensorFlow and Keras models, batch 8, beside Grappler and OpenVINO's hint",
    "repair": "fp16's overflows repaired, relative errors of nets like T5 and Gemma",
    "emulator": "Emulating a target: a 12-layer BERT with a bf16 plan, against fp32",
}


def render(environment: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """RESULTS.md: the machine, then a table for each benchmark."""
    libraries = ", ".join(f"{n} {v}" for n, v in environment["libraries"].items())
    limit = f", held by {environment['isa_limit']}" if environment.get("isa_limit") else ""
    parts = [
        "# Results",
        "Written by `python -m benchmarks.report`; run `make bench` on a quiet machine first.",
        (
            f"- CPU: {environment['cpu']}, {environment['cores']} cores"
            f" ({', '.join(environment['flags'])}){limit}\n"
            f"- {environment['platform']}, Python {environment['python']}\n"
            f"- finecast {environment['finecast']}; {libraries}"
        ),
    ]
    for bench in dict.fromkeys(str(r["bench"]) for r in rows):
        parts.append(f"## {_TITLES.get(bench, bench)}")
        parts.append(_table([_normal(r) for r in rows if r["bench"] == bench]))
    return "\n\n".join(parts) + "\n"


def _normal(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """One figure: lines of the solver's benchmark name theirs ``median_s`` and ``bar_s``."""
    if "median_s" not in row:
        return row
    rest = {k: v for k, v in row.items() if k not in {"bench", "median_s", "bar_s"}}
    what = f"{rest.pop('shape')}, {rest.pop('ops'):,} ops"
    if "lam" in rest:
        what += f", lambda {rest.pop('lam'):g}"
    value, bar = float(row["median_s"]), float(row["bar_s"])
    return {
        "what": what,
        "value": value,
        "unit": "s",
        "bar": bar,
        "met": value <= bar,
        "detail": rest,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| what | measured | bar | | detail |", "|---|---|---|---|---|"]
    for row in rows:
        if "skipped" in row:
            lines.append(f"| not run | | | | {row['skipped']} |")
            continue
        unit, bar = row["unit"], row.get("bar")
        wanted = ""
        if bar is not None:
            wanted = f"{'at least' if row.get('at_least') else 'at most'} {bar:g} {unit}"
        verdict = {True: "met", False: "**missed**", None: ""}[row.get("met")]
        detail = "; ".join(f"{k} {v}" for k, v in row.get("detail", {}).items())
        lines.append(
            f"| {row['what']} | {row['value']:g} {unit} | {wanted} | {verdict} | {detail} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Read the files named on the command line, or standard input."""
    names = sys.argv[1:]
    files = {n: Path(n).read_text(encoding="utf-8").splitlines() for n in names}
    if not files:
        files = {"standard input": sys.stdin.read().splitlines()}
    try:
        environment, rows = merge(files)
    except NotComparableError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(render(environment, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
