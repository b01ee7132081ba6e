"""Rows as lines of JSON: what a tool made of a model, and how the file was judged.

The last line of a model, tool, versions and machine holds; earlier ones stay as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A tool on a model.

    Attributes:
        model: The model's name.
        tool: The tool's key.
        versions: Versions of the tool and of the engine, and the machine.
        about: The model and its data in a few words.
        metric: Name of the metric.
        tolerance: The loss that is allowed.
        made: What the tool's driver said.
        judged: By precision hint what the judge found; empty if there is no file.
        fp32: Score and time of the fp32 model in the same race.
        size: Bytes of the file.
    """

    model: str
    tool: str
    versions: str
    about: str
    metric: str
    tolerance: float
    made: Mapping[str, Any]
    judged: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Any])
    fp32: Mapping[str, Any] = field(default_factory=dict[str, Any])
    size: int = 0

    @property
    def key(self) -> tuple[str, str, str]:
        """What the row is of."""
        return self.model, self.tool, self.versions

    @property
    def runs(self) -> dict[str, Mapping[str, Any]]:
        """The judged runs that the engine did, by hint."""
        return {hint: run for hint, run in self.judged.items() if "speed" in run}

    @property
    def loss(self) -> float | None:
        """The loss of the run that counts."""
        return (
            None if self.best is None else self.fp32["score"] - self.runs[self.best]["score"]
        )

    @property
    def best(self) -> str | None:
        """The hint that counts: the fastest one that keeps the criterion.

        If none keeps it, the one that loses least; None if the engine does not run the file.
        """
        runs = self.runs
        kept = [hint for hint in runs if self._keeps(hint)]
        if kept:
            return max(kept, key=lambda hint: runs[hint]["speed"])
        return max(runs, key=lambda hint: runs[hint]["score"], default=None)

    @property
    def keeps(self) -> bool:
        """Whether the engine runs the file and the criterion is kept on held data."""
        return self.best is not None and self._keeps(self.best)

    @property
    def speed(self) -> float | None:
        """How many times as fast as fp32."""
        return None if self.best is None else self.runs[self.best]["speed"]

    @property
    def reason(self) -> str:
        """Why there is no valid model, in a line; empty if there is."""
        if why := self.made.get("failed") or self.made.get("not_applicable"):
            return why
        if self.best is None:
            return next(iter(self.judged.values()), {"failed": "not judged"})["failed"]
        return "" if self.keeps else f"loses {self.loss:.4f}"

    def _keeps(self, hint: str) -> bool:
        return keeps(self.fp32["score"], self.runs[hint]["score"], self.tolerance)


def keeps(fp32: float, score: float, tolerance: float) -> bool:
    """Whether a score loses at most what is allowed of that of the fp32 model."""
    # A count of hits divided by their number differs in the last bits.
    return fp32 - score <= tolerance + 1e-9


def read(path: Path) -> dict[tuple[str, str, str], Row]:
    """The rows of a file; of equals the last. None if the file is not there."""
    if not path.is_file():
        return {}
    found: dict[tuple[str, str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        stated = json.loads(line)
        if stated.pop("version") == _VERSION:
            row = Row(**stated)
            found[row.key] = row
    return found


def append(path: Path, row: Row) -> None:
    """Add a row to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"version": _VERSION, **asdict(row)}) + "\n")
