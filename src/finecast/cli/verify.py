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
        Path,
        typer.Argument(metavar="MODEL", help="A model that tune wrote, with its manifest."),
    ],
    options: VerifyOptions,
    as_json: Json = False,
) -> None:
    """Check that a tuned model computes the same here as where it was tuned.

    Compares engine, version, instruction sets, settings and kernels with the deployment
    manifest that tune wrote beside the model, runs its samples, and times a call. It takes
    seconds and needs no data. Exits with 1 if numbers or speed may differ.

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
