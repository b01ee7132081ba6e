"""``finecast blame``: which ops of a low model cost its accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.common import Engine, Evaluation, Json, Kept, Model, Read
from finecast.cli.output import Verbatim, warn, write_line, write_note, write_report
from finecast.cli.policy_options import CompilerCasting, Device, Target
from finecast.errors import ExitCode, UsageError
from finecast.progress import shown
from finecast.tuning.judging import BlameOptions

if TYPE_CHECKING:
    from finecast.tuning.blaming import Blame

_MOST_OPS = 10


def run(
    model: Model,
    casting: CompilerCasting,
    device: Device,
    data: Evaluation,
    kept: Kept,
    judged: BlameOptions,
    running: Engine,
    how: Read,
    low: Annotated[
        Path | None,
        typer.Argument(metavar="LOW", help="A low version of MODEL, by any tool."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan in place of LOW.")] = None,
    target: Target = None,
    ops: Annotated[int, typer.Option(min=0, help="Ops to show.")] = _MOST_OPS,
    as_json: Json = False,
) -> None:
    """Which ops of a low model cost its accuracy, with what shows it.

    Names the fewest ops whose return to fp32 makes it pass, confirmed by runs, and the first
    op whose result leaves range or digits. Without a metric the outputs' error is judged.
    LOW may also be a plan (--plan), or a device with its compiler's options (--target).

    Examples:
      finecast blame m.onnx low.onnx --data val.npz

      finecast blame m.onnx low.onnx --data val.npz --metric top1 --max-drop 0.005

      finecast blame m.onnx --target trn1 --auto-cast all --auto-cast-type fp16
      --data val.npz
    """
    from finecast import api

    emulation: Any = None
    if target is not None or device.from_env:
        emulation, _ = device.emulation(casting, target)
    elif casting != CompilerCasting() or device != Device():
        raise UsageError(
            "options of a compiler need its device",
            where="--auto-cast",
            fix="give --target, or leave them out",
        )
    with shown("comparing", quiet=as_json) as bar:
        found = api.blame(
            model,
            low,
            plan=plan,
            target=emulation,
            data=data,
            engine=running.engine,
            progress=bar,
            criterion=kept,
            check=judged.check,
            max_error=judged.max_error,
            from_type=how.from_type,
            trust=how.trust,
        )
    for note in found.warnings:
        warn(note)
    tables = [found.culprits_table(ops)] if found.culprits else []
    write_report(found, *tables, as_json=as_json)
    if not as_json:
        _print_advice(found, ops)
    if not found.passed:
        raise typer.Exit(ExitCode.NOT_IMPROVED)


def _print_advice(found: Blame, most: int) -> None:
    if found.instead:
        names = ", ".join(found.instead[:most])
        write_note(f"any one of these in fp32 would do in its place: {names}")
    if found.first is not None:
        write_note(f"first wrong: {found.first.node}: {found.first.why}")
        if found.first.absorbed:
            write_note(f"  the NaN or Inf is absorbed at {found.first.absorbed}")
        if found.first.source:
            write_note(f"  {found.first.source}")
    if found.keep and len(found.culprits) <= most:
        write_line("to keep them in fp32:")
        write_note(Verbatim(f"  {found.keep}"))
    write_note(found.effort)
