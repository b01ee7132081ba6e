"""``finecast blame``: which ops of a low model cost its accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli.common import Engine, Evaluation, Json, Kept, Model, Read
from finecast.cli.groups import Only, given_in
from finecast.cli.output import warn, write_report
from finecast.cli.policy_options import CompilerCasting, OfDevice, Target
from finecast.devices.choice import emulated
from finecast.diagnosis.judging import BlameOptions
from finecast.errors import ExitCode, UsageError
from finecast.progress import shown

_MOST_OPS = 10


def run(
    model: Model,
    casting: CompilerCasting,
    device: OfDevice,
    data: Evaluation,
    kept: Kept,
    judged: Annotated[BlameOptions, Only("check", "max_error")],
    running: Engine,
    how: Read,
    low: Annotated[
        Path | None,
        typer.Argument(
            metavar="OTHER", help="MODEL quantized or in reduced precision, by any tool."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A plan in place of OTHER.")
    ] = None,
    target: Target = None,
    ops: Annotated[int, typer.Option(min=0, help="Ops to show.")] = _MOST_OPS,
    as_json: Json = False,
) -> None:
    r"""Find the ops that make a quantized or reduced-precision model lose accuracy.

    Names the fewest ops that have to be in fp32 for it to pass, as confirmed by runs, and the
    first op with a wrong result. Without a metric the error of the outputs decides. OTHER
    may also be a plan (--plan), or a device with its compiler's options (--target).

    Examples:
      finecast blame m.onnx q.onnx --data val.npz

      finecast blame m.onnx q.onnx --data val.npz --metric top1 --max-drop 0.01

      finecast blame m.onnx --target trn1 --auto-cast all --auto-cast-type fp16 \
        --data val.npz
    """
    from finecast import api

    emulation = None
    if target is not None or given_in(casting, *device):
        emulation, _, notes = emulated(casting.request(target), device)
        warn(*notes)
    low_models = [one for one in (low, plan, emulation) if one is not None]
    if len(low_models) != 1:
        raise UsageError(
            "more than one model is given to compare with"
            if low_models
            else "no model is given to compare with",
            where="OTHER",
            fix="give OTHER, or --plan, or --target with --auto-cast",
        )
    with shown("comparing") as bar:
        report = api.blame(
            model,
            low_models[0],
            data=data,
            engine=running.engine,
            criterion=kept,
            check=judged.check,
            max_error=judged.max_error,
            from_type=how.from_type,
            freeze_inputs=how.freeze_inputs,
            trust=how.trust,
            progress=bar,
        )
    warn(*report.warnings)
    write_report(report, report.by_op(ops), as_json=as_json)
    if not report.passed:
        raise typer.Exit(ExitCode.NOT_IMPROVED)
