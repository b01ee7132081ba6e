"""``finecast diff``: what differs between two plans, two models, or a plan and a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from finecast.cli.common import Json, Trusted
from finecast.cli.output import add_row, new_table, write_json, write_line, write_table
from finecast.progress import shown

if TYPE_CHECKING:
    from rich.table import Table

    from finecast.tuning.difference import Difference

_WHAT: Final = "A plan (.json) or a model."
_FOLDED: Final = ("what", "op", "type", "for example")


def run(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help=_WHAT)],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help=_WHAT)],
    how: Trusted,
    every: Annotated[
        bool, typer.Option("--all", help="A row for each op, not for ops that differ alike.")
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

    with shown("comparing", quiet=as_json):
        found = api.diff(before, after, trust=how.trust)
    if as_json:
        write_json(found.to_dict())
        return
    for line in found.lines:
        write_line(line)
    if found.changed:
        write_table(_every(found) if every else _grouped(found))


def _grouped(found: Difference) -> Table:
    table = new_table("", ("ops", "what", "op", "type", "for example"), fold=_FOLDED)
    for one in found.groups:
        what = ", ".join(change.value for change in one.changes)
        add_row(table, str(len(one.ops)), what, one.op, one.types, one.example.text)
    return table


def _every(found: Difference) -> Table:
    table = new_table("", ("what", "type", "op"), fold=_FOLDED)
    for one in found.changed:
        what = ", ".join(change.value for change in one.changes)
        add_row(table, what, one.types, one.text)
    return table
