"""finecast and other tools on the same models: ``make peers``.

    python -m benchmarks.peers                             # what is not in the results yet
    python -m benchmarks.peers --only finecast --again
    python -m benchmarks.peers --models cifar10_resnet20,bert --limit 60
    python -m benchmarks.peers --lot 10 --page lot.md      # networks of the zoo, by lot
    python -m benchmarks.peers --table                     # the page alone

Each tool makes its file in a process and an environment of its own. Then all files of a model
are scored on data that no tool saw, and raced with the fp32 model in one process. Each result
is a line of ``--results`` at once, so that a stopped run goes on where it was. The page and
its figure are written from these lines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from benchmarks.common import count
from benchmarks.peers import page, results
from benchmarks.peers.environments import REQUIREMENTS
from benchmarks.peers.lot import by_lot
from benchmarks.peers.models import FIXED, MODELS, AbsentError, prepared
from benchmarks.peers.produce import produced
from benchmarks.peers.results import Row
from benchmarks.peers.task import Task
from benchmarks.peers.tools import FINECAST, TOOLS
from finecast.measure.environment import environment, version_of

_ROOT: Final = Path(__file__).resolve().parents[2]
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_JUDGE_LIMIT_S: Final = 900.0


@cache
def versions(tool: str) -> str:
    """What a row is of besides model and tool: a change of it makes the row anew.

    Of finecast it is the commit, as its version does not change between releases. It is that
    of the beginning: a merge does not split a run.
    """
    engine = f"openvino {version_of('openvino')}"
    machine = f"{environment().cpu}, {environment().cores} cores"
    own = ", ".join(REQUIREMENTS[TOOLS[tool].env]) if TOOLS[tool].env else engine
    if tool == FINECAST:
        own = f"finecast {_commit()}"
    return f"{own}; {engine}; {machine}"


def _commit() -> str:
    """The last commit that changed finecast itself."""
    done = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", "src"],
        cwd=_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or str(version_of("finecast"))


class Comparison:
    """Rows of one results file, made and judged where they are missing."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.work: Path = asked.work
        self.rows = results.read(asked.results)

    def model(self, name: str, tools: Collection[str]) -> None:
        """Make and judge the rows of a model."""
        try:
            task = prepared(name, self.work / "models", self.asked.zoo)
        except AbsentError as why:
            sys.stderr.write(f"{name}: left out: {why}\n")
            return
        for tool in tools:
            self._make(task, tool)
        self._judge(task)

    def _make(self, task: Task, tool: str) -> None:
        name = task.folder.name
        old = self.rows.get((name, tool, versions(tool)))
        if old is not None and not self.asked.again and self._is_there(old):
            return
        start = perf_counter()
        made = produced(
            tool, task, envs=self.asked.envs, files=self.work / "files" / name,
            limit_s=self.asked.limit,
        )  # fmt: skip
        made["with_start_s"] = round(perf_counter() - start, 2)
        self._keep(
            Row(
                model=name, tool=tool, versions=versions(tool), about=task.about,
                metric=task.metric, tolerance=task.tolerance, made=made,
                size=_size(made.get("file")),
            )
        )  # fmt: skip
        said = made.get("failed") or made.get("not_applicable") or "made"
        sys.stderr.write(f"{name}, {tool}: {said} ({made['with_start_s']:.0f} s)\n")

    @staticmethod
    def _is_there(row: Row) -> bool:
        return "file" not in row.made or Path(row.made["file"]).is_file()

    def _judge(self, task: Task) -> None:
        """Judge all files of a model together if one is not judged yet."""
        rows = [
            row
            for tool in TOOLS
            if (row := self.rows.get((task.folder.name, tool, versions(tool)))) is not None
            and "file" in row.made
            and Path(row.made["file"]).is_file()
        ]
        if all(row.judged for row in rows) and not self.asked.judge:
            return
        files = [
            {
                "name": f"{row.tool} {hint}",
                "file": row.made["file"],
                "hint": hint,
                "settings": row.made.get("settings"),
            }
            for row in rows
            for hint in TOOLS[row.tool].hints
        ]
        found = _judged(task, files, self.work / "files" / task.folder.name)
        for row in rows:
            judged = {
                hint: found["files"][f"{row.tool} {hint}"] for hint in TOOLS[row.tool].hints
            }
            self._keep(replace(row, judged=judged, fp32=found["fp32"]))

    def _keep(self, row: Row) -> None:
        results.append(self.asked.results, row)
        self.rows[row.key] = row


def _judged(task: Task, files: list[dict[str, Any]], folder: Path) -> Mapping[str, Any]:
    """What the judge finds. A file that takes its process down is left out and named."""
    failed: dict[str, Any] = {}
    left = files
    while True:
        job = folder / "judge.json"
        job.write_text(json.dumps({"task": str(task.folder), "files": left}), encoding="utf-8")
        begun = ""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.peers.judge", str(job)],
                cwd=_ROOT, capture_output=True, text=True, check=False,
                timeout=_JUDGE_LIMIT_S,
            )  # fmt: skip
            out, why = done.stdout, done.stderr.strip().splitlines()[-1:]
            if done.returncode == 0:
                found = json.loads(out.splitlines()[-1])
                return {**found, "files": found["files"] | failed}
        except subprocess.TimeoutExpired as late:
            out, why = (late.stdout or b"").decode(), ["out of time"]
        for line in out.splitlines():
            begun = json.loads(line).get("begins", begun)
        if not begun:
            raise SystemExit(f"{task.folder.name} cannot be judged: {why}")
        failed[begun] = {"failed": f"ends the engine's process: {' '.join(why)[:160]}"}
        left = [one for one in left if one["name"] != begun]


def _size(file: str | None) -> int:
    """Bytes of a model, with what lies beside it."""
    if file is None or not Path(file).is_file():
        return 0
    path = Path(file)
    beside = (path.with_suffix(".bin"), path.with_name(path.name + ".data"))
    return sum(p.stat().st_size for p in (path, *beside) if p.is_file())


def _names(text: str, known: Collection[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"unknown: {', '.join(unknown)}; there are {', '.join(known)}"
        )
    return names


def main() -> None:
    """Make, judge, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--only", type=lambda t: _names(t, TOOLS), default=list(TOOLS), metavar="TOOL[,TOOL]")
    add("--models", type=lambda t: _names(t, MODELS), default=list(FIXED), metavar="NAME,...")
    add(
        "--lot",
        type=count,
        default=0,
        metavar="N",
        help="N networks of the zoo, by lot",
    )
    add("--seed", type=int, default=0, help="of the lots")
    add("--again", action="store_true", help="make rows that are there anew")
    add("--judge", action="store_true", help="judge files that are there anew")
    add("--table", action="store_true", help="write the page alone")
    add("--limit", type=float, default=300.0, help="seconds for a tool on a model (300)")
    add("--envs", type=Path, default=_CACHE / "finecast-peers", help="where environments are")
    add("--work", type=Path, default=_ROOT / "build" / "peers", help="models and files made")
    add("--results", type=Path, help="lines of JSON; default results.jsonl in --work")
    add("--note", default="", help="a sentence for the page, as on limits that differed")
    add("--page", type=Path, default=_ROOT / "benchmarks" / "RESULTS-peers.md")
    add(
        "--zoo",
        type=Path,
        default=_ROOT / ".venv-zoo" / "bin" / "python",
        help="a Python that has timm and transformers; made by make zoo",
    )
    asked = parser.parse_args()
    asked.work = asked.work.resolve()
    asked.models = by_lot(asked.lot, asked.seed) if asked.lot else asked.models
    asked.results = asked.results or asked.work / "results.jsonl"
    # As Ctrl-C does: the tool that runs ends, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    compared = Comparison(asked)
    if not asked.table:
        for name in asked.models:
            compared.model(name, asked.only)
    # finecast's own release is a commit: the last row of each model holds.
    current = [
        row
        for row in compared.rows.values()
        if row.tool == FINECAST or row.versions == versions(row.tool)
    ]
    shown = set(asked.models if asked.lot else FIXED)
    rows = [row for row in current or compared.rows.values() if row.model in shown]
    page.write(asked.page, rows, asked.note)


if __name__ == "__main__":
    main()
