"""The lines of ``bench_int8_nets`` with their bars, and the table of RESULTS-int8.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.common import kept_lines
from benchmarks.hint_table import put, table
from finecast.measure.environment import environment

PAGE: Final = Path(__file__).with_name("RESULTS-int8.md")
NATIVE: Final = "native"
FP32, BF16, INT8, TUNED = "fp32", "bf16", "int8", "tuned"
_COLUMNS: Final = (
    "net", "verdict", "ops in int8, bf16", "error: all int8", "allowed", "result",
    "speed over fp32", "over all bf16", "evaluations", "took", "misses",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class IntegerRow:
    """The figures of one net's line; the result is fp32 where ``tune`` left it unchanged."""

    line: Mapping[str, Any]

    @property
    def _improved(self) -> bool:
        return TUNED in self.line["errors"]

    @property
    def error(self) -> float:
        """The result's error over that which the criterion allows."""
        made = self.line["errors"][TUNED] if self._improved else 0.0
        return made / self.line["allowed"]

    @property
    def speed(self) -> Mapping[str, Sequence[float]]:
        """The result's speed over that of the best model without int8: low, median, high.

        That is fp32, or bf16 where it is faster and keeps the criterion.
        """
        keeps = self.line["errors"][BF16] <= self.line["allowed"]
        others = ([FP32] if self._improved else []) + ([BF16] if keeps else [])
        return {name: [round(x, 3) for x in self.line["speed"][name]] for name in others}

    @property
    def slower(self) -> bool:
        """Whether the whole interval of a speed lies below 1."""
        return any(high < 1 for _, _, high in self.speed.values())

    @property
    def misses(self) -> tuple[str, ...]:
        """The bars that are missed."""
        found = {
            "error": self.error > 1,
            "slower": self.slower,
            "not on integers": bool(self.line["not_on_integers"]),
        }
        return tuple(name for name, missed in found.items() if missed)

    def cells(self) -> tuple[str, ...]:
        """The table's."""
        line, ops = self.line, self.line["ops"]
        over = {n: line["speed"].get(n, [0, 1, 0])[1] for n in (FP32, BF16)}
        low = f"{sum(ops.get(n, 0) for n in (INT8, 'int8_weights'))}, {ops.get(BF16, 0)}"
        result = line["errors"][TUNED] if self._improved else 0.0
        return (
            line["net"], line["verdict"], low, f"{line['errors'][INT8]:.2g}",
            f"{line['allowed']:.2g}", f"{result:.2g}", f"{over[FP32]:.2f}",
            f"{over[BF16]:.2f}", str(line["evaluations"]),
            f"{line['seconds']:.0f} s", ", ".join(self.misses),
        )  # fmt: skip


def write_table(path: Path) -> None:
    """Write a table for each ISA into RESULTS-int8.md."""
    lines = kept_lines(path, "net", "isa")
    parts: list[str] = []
    for isa in sorted({isa for _, isa in lines}, reverse=True):
        parts += _section(isa, [x for (_, held), x in sorted(lines.items()) if held == isa])
    put(PAGE, "bench_int8_nets", parts)


def _section(isa: str, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [IntegerRow(x) for x in lines if "allowed" in x]
    missed = [row for row in rows if row.misses]
    made = environment()
    return [
        f"### {made.cpu} ({', '.join(made.flags)}), {isa}, one thread",
        "",
        f"Bars missed: {len(missed)} of {len(rows)} nets.",
        "",
        *table(_COLUMNS, [row.cells() for row in rows]),
        "",
        *(f"- not run: {x['net']}: {x['failed']}" for x in lines if "failed" in x),
        *(f"- {x['net']}: {x['nothing']}" for x in lines if "nothing" in x),
        "",
    ]
