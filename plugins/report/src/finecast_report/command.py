"""``finecast report``: what was found and why, as a page, as data, for Model Explorer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli import Json, Verbatim, write_json, write_note
from finecast.errors import UsageError


def run(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN|STUDY", help="A plan or a study of tune; or a report's .json."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="MODEL",
            help="The plan's model, for the graph, if no study is beside the plan.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE.html|.json",
            help="The page, or its data. Without it a few sentences are printed.",
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(help="The study with the plan; by default the one beside it."),
    ] = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="BEFORE",
            help="An earlier plan or another version of the model: shows what changed since.",
        ),
    ] = None,
    blame: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="What blame --json printed: the page then shows which ops lose accuracy.",
        ),
    ] = None,
    explorer: Annotated[
        Path | None,
        typer.Option(
            "--model-explorer",
            metavar="FOLDER",
            help="Write graph and node data there for Google's Model Explorer.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Json = False,
) -> None:
    """What tune found and why: which ops cost accuracy, what was tried, where the time goes.

    The page is one file that opens without network. Nothing is searched or measured again:
    tune keeps what a report needs in its study. --json prints the page's data.

    Examples:
      finecast report tuned.plan.json -o report.html

      finecast report tuned.study.db --json

      finecast report old.plan.json model.onnx -o report.html

      finecast report new.plan.json --diff old.plan.json -o changes.html
    """
    from finecast import api

    if explorer is not None and output is not None and explorer == output:
        raise UsageError("two outputs have one name", where=str(output), fix="rename one")
    report = api.report(
        source, output, model=model, study=study, diff=diff, blame=blame, force=force
    )
    written = () if explorer is None else report.model_explorer(explorer, force=force)
    if as_json:
        write_json(report.to_dict())
        return
    for line in report.lines:
        write_note(line)
    for path in (*([output] if output else []), *written):
        write_note(Verbatim(f"wrote {path}"))
