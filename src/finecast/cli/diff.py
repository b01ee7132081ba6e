"""``finecast diff``: what differs between two plans, two models, or a plan and a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from finecast.cli.common import Json, Trusted
from finecast.cli.output import write_report
from finecast.progress import shown

_WHAT: Final = "A plan or a model."


def run(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help=_WHAT)],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help=_WHAT)],
    how: Trusted,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="A row for each op; by default ops that differ alike share one."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """What differs between two plans, two models, or a plan and a new version of its model.

    Ops are matched by their names, else by what they compute, their weights and their
    neighbours. So the models may be a net and the same net trained further, changed, exported
    by another tool or in another format. Of a plan and a model it says what apply would do.

    Examples:
      finecast diff old.plan.json new.plan.json

      finecast diff tuned.plan.json retrained.onnx

      finecast diff model.onnx model.xml
    """
    from finecast import api

    with shown("comparing"):
        report = api.diff(before, after, trust=how.trust)
    write_report(report, *([report.each] if every else ()), as_json=as_json)
