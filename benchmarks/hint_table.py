"""The bars of finecast's models beside OpenVINO's hint, and the table of RESULTS-hint.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finecast.measure.environment import environment

PAGE: Final = Path(__file__).with_name("RESULTS-hint.md")
_PLACE: Final = re.compile(r"(<!-- bench_hint -->\n).*?(<!-- end -->)", re.DOTALL)
# The bars: kernels and error at most, speed at least so many times the hint's.
KERNELS: Final = 1.05
ERROR: Final = 1.2
SPEED: Final = 0.97
_OURS: Final = ("all", "choice", "exact")
_COLUMNS: Final = (
    "net", "kernels: fp32", "hint", "`all`", "its choice", "only `all` has low",
    "error: hint", "`all`", "choice", "exact", "speed: `all`", "choice", "exact",
    "`all` misses",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """What one net's line says."""

    line: Mapping[str, Any]

    @property
    def kernels(self) -> Mapping[str, int]:
        """How many each model has."""
        return {name: found["kernels"] for name, found in self.line["kernels"].items()}

    @property
    def more_kernels(self) -> float:
        """Those of ``all`` over the hint's."""
        return self.kernels["all"] / self.kernels["hint"]

    def error(self, name: str) -> float:
        """That of a model over the hint's; 0 over 0 is 1."""
        found, hint = self.line["errors"][name], self.line["errors"]["hint"]
        return found / hint if hint else 1.0 if not found else float("inf")

    def speed(self, name: str) -> float:
        """How many times as fast as the hint a model is."""
        return self.line["speed"][name][1]

    @property
    def same_low(self) -> bool:
        """Whether the hint computes low what ``all`` does, and rounds the same results."""
        return not any(self.line["low_only"].values())

    @property
    def misses(self) -> tuple[str, ...]:
        """The bars that ``all`` misses: a speed if its whole interval lies below."""
        found = {
            "kernels": self.more_kernels > KERNELS,
            "speed": self.line["speed"]["all"][2] < SPEED,
            "error": self.same_low and self.error("all") > ERROR,
        }
        return tuple(name for name, missed in found.items() if missed)

    def cells(self) -> tuple[str, ...]:
        """The table's."""
        kernels = (str(self.kernels.get(n, "")) for n in ("fp32", "hint", "all", "choice"))
        present = [n if n in self.line["errors"] else "" for n in _OURS]
        only = self.line["low_only"]
        low = [f"{len(only['computed'])} ops"] if only["computed"] else []
        low += [f"{len(only['given'])} results"] if only["given"] else []
        return (
            self.line["net"], *kernels, ", ".join(low), f"{self.line['errors']['hint']:.2g}",
            *(f"{self.error(n):.2f}" if n else "" for n in present),
            *(f"{self.speed(n):.2f}" if n else "" for n in present), ", ".join(self.misses),
        )  # fmt: skip


def write_table(lines: Mapping[str, Mapping[str, Any]]) -> None:
    """Put the table of these nets in its place in RESULTS-hint.md."""
    rows = [Row(line) for _, line in sorted(lines.items()) if "failed" not in line]
    failed = [line for _, line in sorted(lines.items()) if "failed" in line]
    text = "\n".join([_summary(rows), "", *_table(rows), *_failed(failed)])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_PLACE.sub(lambda m: f"{m[1]}{text}\n{m[2]}", page), encoding="utf-8")


def _summary(rows: Sequence[Row]) -> str:
    same = [row for row in rows if row.same_low]
    met = {
        f"at most {KERNELS} times the hint's kernels": (rows, "kernels"),
        f"at least {SPEED} of its speed": (rows, "speed"),
        f"where it has the same low, at most {ERROR} times its error": (same, "error"),
    }
    found = (
        f"{text}: {sum(miss not in r.misses for r in those)} of {len(those)}"
        for text, (those, miss) in met.items()
    )
    made = environment()
    return (
        f"{made.cpu} ({', '.join(made.flags)}), one thread. `all:bf16` has {'; '.join(found)}."
    )


def _table(rows: Sequence[Row]) -> list[str]:
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{' --- |' * len(_COLUMNS)}"]
    return [*lines, *(f"| {' | '.join(row.cells())} |" for row in rows)]


def _failed(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return ["", *(f"- not run: {x['net']}: {x['failed']}" for x in lines)] if lines else []
