"""``finecast apply``: the model that a saved plan gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli.common import (
    ComparedSamples,
    Json,
    Model,
    Placing,
    Trusted,
    Written,
    telling_stale,
)
from finecast.cli.convert import report
from finecast.cli.output import warn
from finecast.files import CommandFiles
from finecast.progress import shown


def run(
    plan: Annotated[
        Path, typer.Argument(metavar="PLAN", help="A plan that tune or convert wrote.")
    ],
    model: Model,
    written: Written,
    data: ComparedSamples,
    running: Placing,
    how: Trusted,
    as_json: Json = False,
) -> None:
    """Apply a saved plan to the model it was made for, or to another version of it.

    In a model that was retrained, changed or exported again, ops are found by their names,
    or by their place in the graph (see finecast diff). New ops stay in fp32. A plan is
    refused if most of its ops are not found.

    Example:
      finecast apply tuned.plan.json model.onnx -o tuned.onnx
    """
    from finecast import api
    from finecast.devices.emulation import TF32_NOTE

    files = CommandFiles(force=written.force)
    with telling_stale(files), shown("applying"):
        run = api.on_data(running, data)
        result = api.applied(plan, model, written, run, how, files)
    if "tf32" in result.plan.counts:
        warn(TF32_NOTE)
    report(result, as_json=as_json)
