"""The bars of finecast's models beside OpenVINO's hint, and the tables of RESULTS-hint.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from finecast.measure.environment import environment

PAGE: Final = Path(__file__).with_name("RESULTS-hint.md")
# The bars, in multiples of the hint: at most so many kernels and error, at least such a speed.
KERNELS: Final = 1.05
ERROR: Final = 1.2
SPEED: Final = 0.97
_OURS: Final = ("all", "choice", "exact")
_COLUMNS: Final = (
    "net", "kernels: fp32", "hint", "`all`", "its choice", "only `all` has low",
    "error: hint", "`all`", "choice", "exact", "speed: `all`", "choice", "exact",
    "misses",
)  # fmt: skip
_IR_COLUMNS: Final = (
    "net", "kernels: fp32", "hint", "`all`", "error: hint", "`all`", "speed", "misses"
)  # fmt: skip
_TUNED_COLUMNS: Final = (
    "net",
    "verdict",
    "speed beside the hint",
    "error",
    "beaten in",
    "took",
    "stated by",
)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one net's line."""

    line: Mapping[str, Any]

    @property
    def kernels(self) -> Mapping[str, int]:
        """How many each model has."""
        return {
            name: sum(made["kinds"].values()) for name, made in self.line["kernels"].items()
        }

    @property
    def more_kernels(self) -> float:
        """The kernels of ``all`` over the hint's."""
        return self.kernels["all"] / self.kernels["hint"]

    def error(self, name: str) -> float:
        """The error of a model over the hint's; 0 over 0 is 1."""
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
    def judged(self) -> str:
        """The model whose error is judged: ``all``, or ``exact`` where ``all`` lowers more."""
        return "all" if self.same_low or "exact" not in self.line["errors"] else "exact"

    @property
    def misses(self) -> tuple[str, ...]:
        """The bars that are missed: a speed if its whole interval lies below."""
        found = {
            "kernels": self.more_kernels > KERNELS,
            "speed": self.line["speed"]["all"][2] < SPEED,
            "error": self.error(self.judged) > ERROR,
        }
        return tuple(name for name, missed in found.items() if missed)

    def ir_cells(self) -> tuple[str, ...]:
        """Those of the table of plans by the hint."""
        return (
            self.line["net"], *(str(self.kernels[n]) for n in ("fp32", "hint", "all")),
            f"{self.line['errors']['hint']:.2g}", f"{self.error('all'):.2f}",
            f"{self.speed('all'):.2f}", ", ".join(self.misses),
        )  # fmt: skip

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


@dataclass(frozen=True, slots=True)
class TunedRow:
    """The figures of one net's line on ``tune``; where it found nothing its result is fp32."""

    line: Mapping[str, Any]

    @property
    def _name(self) -> str:
        return "tuned" if "tuned" in self.line["speed"] else "fp32"

    @property
    def error(self) -> float:
        """The error of the result over the hint's."""
        hint = self.line["errors"]["hint"]
        return self.line["errors"].get(self._name, 0.0) / hint if hint else 1.0

    @property
    def speed(self) -> Sequence[float]:
        """How many times as fast as the hint the result is: low, median, high."""
        return [round(share, 3) for share in self.line["speed"][self._name]]

    @property
    def beaten(self) -> bool:
        """Whether the hint is certainly faster, and more accurate."""
        return self.speed[2] < 1 and self.error > 1

    def cells(self) -> tuple[str, ...]:
        """The table's."""
        low, median, high = self.speed
        return (
            self.line["net"], self.line["verdict"], f"{median:.2f} ({low:.2f} to {high:.2f})",
            f"{self.error:.2f}", "**both**" if self.beaten else "",
            f"{self.line['seconds']:.0f} s", "hint" if self.line.get("by_hint") else "casts",
        )  # fmt: skip


Lines = Mapping[str, Mapping[str, Any]]


def write_tables(lines: Lines, tuned: Lines, ir: Lines, tuned_ir: Lines) -> None:
    """Write the tables of these nets into RESULTS-hint.md; those of IR are ``ir``'s."""
    rows, ir_rows = _rows(lines), _rows(ir)
    texts = {
        "": [_summary(rows), "", *table(_COLUMNS, [row.cells() for row in rows])],
        " ir": [_summary(ir_rows), "", *table(_IR_COLUMNS, [r.ir_cells() for r in ir_rows])],
        " tune": _tuned(tuned),
        " tune ir": _tuned(tuned_ir),
    }
    for (which, text), made in zip(texts.items(), (lines, ir, tuned, tuned_ir), strict=True):
        if made:
            put(PAGE, f"bench_hint{which}", [*text, *_failed(made)])


def _rows(lines: Lines) -> list[Row]:
    return [Row(line) for _, line in sorted(lines.items()) if "failed" not in line]


def _tuned(lines: Lines) -> list[str]:
    found = [TunedRow(line) for _, line in sorted(lines.items()) if "failed" not in line]
    beaten = sum(row.beaten for row in found)
    counts = f"Beaten by the hint in both: {beaten} of {len(found)}."
    return [counts, "", *table(_TUNED_COLUMNS, [row.cells() for row in found])]


def put(page: Path, mark: str, lines: Iterable[str]) -> None:
    """Replace the text in ``page`` between the comment ``mark`` and the next ``end``."""
    place = re.compile(f"(<!-- {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    new = partial(_between, "\n".join(lines))
    page.write_text(place.sub(new, page.read_text(encoding="utf-8")), encoding="utf-8")


def _between(text: str, place: re.Match[str]) -> str:
    return f"{place[1]}{text}\n{place[2]}"


def _summary(rows: Sequence[Row]) -> str:
    same = [row for row in rows if row.judged == "all"]
    others = [row for row in rows if row.judged != "all"]
    met = {
        f"`all:bf16`: at most {KERNELS} times the hint's kernels": (rows, "kernels"),
        f"at least {SPEED} of its speed": (rows, "speed"),
        f"where it has the same low, at most {ERROR} times its error": (same, "error"),
        "elsewhere the exact choice has": (others, "error"),
    }
    found = (
        f"{text}: {sum(miss not in r.misses for r in those)} of {len(those)}"
        for text, (those, miss) in met.items()
        if those
    )
    made = environment()
    machine = f"{made.cpu} ({', '.join(made.flags)}), one thread."
    return f"{machine} {'; '.join(found)}."


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def _failed(lines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    found = [f"- not run: {n}: {x['failed']}" for n, x in lines.items() if "failed" in x]
    return ["", *found] if found else []
