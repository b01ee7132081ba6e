"""``finecast doctor``: what runs on this machine, measured."""

from __future__ import annotations

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.output import add_row, new_table, write_json, write_note, write_table
from finecast.errors import EngineError, first_line
from finecast.naming import listed, number_of
from finecast.numbers.formats import Format
from finecast.plugin import failures as registered_failures
from finecast.plugin import registered, title_of
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.engines.base import Capability
    from finecast.measure.environment import Environment


_ISA_LIMIT = (
    "engines that use oneDNN use no newer instructions, whatever the CPU has (a name that"
    " oneDNN does not know limits nothing)"
)
_MOST_GAINING = 4
"""Formats that are named of an engine."""


def run(
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="All formats of each engine, backends that are not here, plugins."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which formats are faster than fp32 on this machine, measured in each engine.

    Small matrix products and convolutions are timed in turns with fp32.

    Examples:
      finecast doctor

      finecast doctor --all
    """
    from finecast.measure.environment import environment

    rows: list[EngineRow] = []
    failures: list[str] = []
    probes = engine_specs()
    with shown("probing") as report:
        for index, spec in enumerate(probes):
            report(title_of(spec), index, len(probes))
            try:
                rows.append(_row(spec))
            except EngineError as error:
                failures.append(f"{title_of(spec)}: {error}")
            except Exception as error:  # of a plugin's engine, which costs its own row
                failures.append(
                    f"{title_of(spec)}: {type(error).__name__}: {first_line(error)}"
                )
    machine = environment()
    absent = absent_backends({f"{row.engine}:{row.device}" for row in rows})
    if as_json:
        write_json(_json(machine, rows, absent, failures))
    elif every:
        _print(machine, rows, absent, failures)
    else:
        for line in (*summary(machine, rows), *failures):
            write_note(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """An engine on a device, for the models of one framework."""

    framework: str
    engine: str
    device: str
    formats: Mapping[Format, Capability]

    @property
    def title(self) -> str:
        """What people call the engine, with its device if that is no CPU."""
        return title_of(f"{self.engine}:{self.device}")


def summary(machine: Environment, rows: Sequence[EngineRow]) -> list[str]:
    """What each engine gains from here, and where to look for more."""
    flags = f" with {' '.join(machine.flags)}" if machine.flags else ""
    lines = [f"this CPU: {machine.cpu}, {number_of(machine.cores, 'core')}{flags}"]
    lines += [_gains(row) for row in rows]
    if machine.isa_limit:
        lines.append(f"{machine.isa_limit} is set: {_ISA_LIMIT}")
    lines.append(
        "speeds are those of single products and convolutions: a model gains less, and"
        " finecast tune measures how much"
    )
    lines.append("a device that is not here: finecast tune --target NAME (finecast targets)")
    lines.append("all formats, backends that are not here, and plugins: finecast doctor --all")
    return lines


def _gains(row: EngineRow) -> str:
    """The formats in which an engine is faster than fp32, the fastest first."""
    where = f"{row.title} ({row.framework} models)"
    speeds = {fmt.label: c.speed for fmt, c in row.formats.items() if c.worthwhile and c.speed}
    gaining = sorted(((v, label) for label, v in speeds.items() if v > 1), reverse=True)
    if not gaining:
        return f"{where}: no format is faster than fp32"
    texts = [f"{label} x{speed:.1f}" for speed, label in gaining]
    return f"{where}: faster than fp32 with {listed(texts, _MOST_GAINING)}"


def _row(spec: str) -> EngineRow:
    from finecast.engines import ENGINES, get_engine

    engine = get_engine(spec)
    return EngineRow(
        framework=ENGINES[engine.name].framework,
        engine=engine.name,
        device=engine.device,
        formats=engine.capabilities(),
    )


def engine_specs() -> list[str]:
    """All installed engines with their devices, as ``NAME:DEVICE``.

    PyTorch, imported only if it is installed, is one engine: compiled or not, its products are
    the same kernels.
    """
    from finecast.engines import ENGINES, devices, installed

    names = (name for name in ENGINES if installed(name) and name != "torch-eager")
    return [f"{n}:{d}" for n in names for d in devices(n)]


def cell(capability: Capability) -> str:
    """The table's cell for a format on a device: ``x3.4``, ``slower x0.60``, ``no``."""
    if not capability.runs:
        return "no"
    if capability.speed is None:
        return "yes"
    if capability.speed < 1:
        return f"slower x{capability.speed:.2f}"
    return f"x{capability.speed:.1f}" if capability.speed > 1 else "x1"


def _json(
    machine: Environment,
    rows: list[EngineRow],
    absent: list[dict[str, Any]],
    failures: list[str],
) -> dict[str, Any]:
    return {
        "environment": machine.as_json(),
        "engines": [
            {
                "framework": row.framework,
                "engine": row.engine,
                "device": row.device,
                "formats": {
                    fmt.label: {
                        "runs": c.runs,
                        "speed": c.speed,
                        "slower": c.speed is not None and c.speed < 1,
                        "worthwhile": c.worthwhile,
                        "reason": c.reason,
                    }
                    for fmt, c in row.formats.items()
                },
            }
            for row in rows
        ],
        "not_installed": absent,
        "plugins": [
            {"name": name, "distribution": of, "adds": adds} for name, of, adds in _plugins()
        ],
        "failures": [*failures, *registered_failures()],
    }


def _plugins() -> list[tuple[str, str, str]]:
    """Name, distribution with its version, and summary of each plugin that is here."""
    known = registered()
    return [(p.name, known.distributions[p.name], p.summary) for p in known.plugins[1:]]


def _print(
    machine: Environment,
    rows: list[EngineRow],
    absent: list[dict[str, Any]],
    failures: list[str],
) -> None:
    from finecast.engines.probe import PROBED

    heads = [f"{row.title}\n{row.framework}" for row in rows]
    table = new_table("Here: speed against fp32, measured", ("format",), heads)
    for fmt in (f for f in PROBED if f is not Format.FP32):
        add_row(table, fmt.label, *(cell(row.formats[fmt]) for row in rows))
    write_table(table)
    notes = [
        f"  {row.title}, {f.label}: {c.reason}"
        for row in rows
        for f, c in row.formats.items()
        if c.reason
    ]
    other = new_table(
        "Not here", ("framework", "backend", "device", "what to do"), fold="what to do"
    )
    for one in absent:
        add_row(other, one["framework"], one["backend"], one["device"], one["install"])
    write_table(other)
    added = new_table("Plugins", ("name", "of", "what it adds"), fold="what it adds")
    for row in _plugins():
        add_row(added, *row)
    flags = " ".join(machine.flags) or "none that matter"
    lines = [*notes, *failures, f"CPU: {machine.cpu}, {machine.cores} cores; flags: {flags}"]
    if machine.isa_limit:
        lines.append(f"{machine.isa_limit} is set: {_ISA_LIMIT}")
    write_table(added, *lines)


# --------------------------------------------- the backends that Intel Neural Compressor lists
#
# Source: the support matrix of its version 2.x, ``docs/source/mix_precision.md``. The table
# ``backends.csv`` has the formats that are documented for each and how to install it, and
# ``NAME:DEVICE`` of finecast's own engine for it, if there is one.


def backends() -> list[dict[str, str]]:
    """All rows of the table."""
    text = (files("finecast.cli") / "backends.csv").read_text(encoding="utf-8")
    return [*csv.DictReader(text.splitlines())]


def absent_backends(present: Collection[str]) -> list[dict[str, Any]]:
    """The rows, as JSON, but those whose engine (``NAME:DEVICE``) is ``present``."""
    rows = [row for row in backends() if row.pop("engine") not in present]
    return [{**row, "formats": row["formats"].split()} for row in rows]
