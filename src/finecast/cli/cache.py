"""``finecast cache``: times of kernels that ``tune`` kept on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from finecast.cli.output import add_row, new_table, warn, write_json, write_table
from finecast.naming import number_of
from finecast.plugin import say


def run(
    clear: Annotated[bool, typer.Option("--clear", help="Clear the cache.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The timing cache: times of kernels that tune measured here and uses again.

    A second run on a model, or on another one with the same kernels, then needs no profiling.
    The result is timed in each run all the same. One row for each machine and engine.

    Example:
      finecast cache --clear
    """
    from datetime import UTC, datetime

    from finecast.measure import timing_cache

    path = timing_cache.default_path()
    warn(*timing_cache.misplaced(), *timing_cache.remove_damaged(path))
    machines = [] if path is None else timing_cache.machines(path)
    forgotten = timing_cache.clear(path) if clear and path is not None else 0
    rows = [
        (machine, datetime.fromtimestamp(machine.used_s, UTC).strftime("%Y-%m-%d"))
        for machine in machines
    ]
    if as_json:
        write_json(
            {
                "path": None if path is None else str(path),
                "machines": [
                    {"machine": machine.label, "kernels": machine.kernels, "last_used": day}
                    for machine, day in rows
                ],
                "forgotten": forgotten,
            }
        )
        return
    if not rows:
        say(f"no times of kernels are kept in {path or 'any cache folder'}")
        return
    table = new_table(
        str(path), ("machine and engine", "last used"), ("kernels",), fold="machine and engine"
    )
    for machine, day in rows:
        add_row(table, machine.label, day, str(machine.kernels))
    write_table(table)
    if clear:
        say(f"forgotten: {number_of(forgotten, 'time')} of kernels")
