"""``finecast verify``: whether a tuned model does here what it did where it was tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli.common import Json
from finecast.cli.output import write_report
from finecast.errors import ExitCode
from finecast.native.drift import VerifyOptions
from finecast.progress import shown


def run(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model that tune wrote, with its lock.")
    ],
    options: VerifyOptions,
    as_json: Json = False,
) -> None:
    """Whether a tuned model does on this machine what it did when it was tuned.

    Compares the engine and its version, instruction sets, settings and kernels with the lock
    that tune wrote beside the model, runs its golden samples, and times a call. It takes
    seconds, and needs no data. Exits with 1 where numbers or speed may be others.

    Examples:
      finecast verify tuned.onnx

      finecast verify tuned.xml --set INFERENCE_PRECISION_HINT=bf16
    """
    from finecast import api

    with shown("verifying"):
        report = api.verify(
            model, lock=options.lock, settings=options.settings, strict=options.strict
        )
    write_report(report, as_json=as_json)
    if not report.holds:
        raise typer.Exit(ExitCode.NOT_IMPROVED)
