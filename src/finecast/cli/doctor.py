"""``finecast doctor``: what runs on this machine, measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.output import add_row, new_table, progress, write_json, write_table
from finecast.errors import EngineError
from finecast.formats import Format

if TYPE_CHECKING:
    from finecast.engines.base import Capability, Engine
    from finecast.measure.environment import Environment


def run(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What runs on this machine: per engine, device and format, with measured speed.

    Small kernels are run in each format and timed against fp32 in turns. The rows below the
    line are backends that other tools support and that are not installed here.
    """
    from finecast.cli.backends import absent_backends
    from finecast.measure.environment import environment

    rows: list[tuple[Engine, Mapping[Format, Capability]]] = []
    failures: list[str] = []
    specs = engine_specs()
    with progress("probing", quiet=as_json) as report:
        for index, spec in enumerate(specs):
            report(index, len(specs), spec)
            try:
                engine = _engine(spec)
                rows.append((engine, engine.capabilities()))
            except EngineError as error:
                failures.append(f"{spec}: {error}")
    machine = environment()
    absent = absent_backends({(e.name, e.device) for e, _ in rows})
    if as_json:
        write_json(_json(machine, rows, absent, failures))
    else:
        _print(machine, rows, absent, failures)


def engine_specs() -> list[str]:
    """Every engine and device that is installed, as ``NAME:DEVICE``."""
    from finecast.engines import ENGINES, devices, installed

    return [f"{n}:{d}" for n in ENGINES if installed(n) for d in devices(n)]


def _engine(spec: str) -> Engine:
    from finecast.engines import get_engine

    return get_engine(spec)


def cell(capability: Capability) -> str:
    """One format of one device: ``x3.4``, ``slower x0.60``, ``no``."""
    if not capability.runs:
        return "no"
    if capability.speed is None:
        return "yes"
    if capability.speed < 1:
        return f"slower x{capability.speed:.2f}"
    return f"x{capability.speed:.1f}" if capability.speed > 1 else "x1"


def _json(
    machine: Environment,
    rows: list[tuple[Engine, Mapping[Format, Capability]]],
    absent: list[dict[str, Any]],
    failures: list[str],
) -> dict[str, Any]:
    return {
        "environment": machine.as_json(),
        "engines": [
            {
                "framework": "ONNX",
                "engine": engine.name,
                "device": engine.device,
                "formats": {
                    fmt.label: {
                        "runs": c.runs,
                        "speed": c.speed,
                        "slower": c.speed is not None and c.speed < 1,
                        "worthwhile": c.worthwhile,
                        "reason": c.reason,
                    }
                    for fmt, c in formats.items()
                },
            }
            for engine, formats in rows
        ],
        "not_installed": absent,
        "failures": failures,
    }


def _print(
    machine: Environment,
    rows: list[tuple[Engine, Mapping[Format, Capability]]],
    absent: list[dict[str, Any]],
    failures: list[str],
) -> None:
    from finecast.engines.probe import PROBED

    table = new_table(
        "Here: speed against fp32, measured",
        ("framework", "engine", "device"),
        [f.label for f in PROBED],
        fold="engine",
    )
    for engine, formats in rows:
        add_row(table, "ONNX", engine.name, engine.device, *(cell(formats[f]) for f in PROBED))
    write_table(table)
    notes = [
        f"  {e.name}:{e.device} {f.label}: {c.reason}"
        for e, formats in rows
        for f, c in formats.items()
        if c.reason
    ]
    other = new_table(
        "Not here",
        ("framework", "backend", "device", "documented formats", "how to get it"),
        fold="how to get it",
    )
    for row in absent:
        formats = ", ".join(row["formats"]) or "none"
        add_row(
            other, row["framework"], row["backend"], row["device"], formats, row["install"]
        )
    flags = " ".join(machine.flags) or "none that matter"
    lines = [*notes, *failures, f"CPU: {machine.cpu}, {machine.cores} cores; flags: {flags}"]
    write_table(other, note="\n".join(lines))
