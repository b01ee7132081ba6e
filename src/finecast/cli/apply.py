"""``finecast apply``: the model that a saved plan gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli import policy_options as po
from finecast.cli.convert import Dim, NoVerify, report
from finecast.cli.output import progress
from finecast.cli.profile import dim_sizes


def run(
    plan: Annotated[Path, typer.Argument(help="A plan that tune or convert wrote.")],
    model: Annotated[Path, typer.Argument(help="The FP32 model it was made for.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The converted model.")],
    engine: po.EngineName = None,
    dim: Dim = None,
    no_verify: NoVerify = False,
    force: po.Force = False,
    as_json: po.Json = False,
) -> None:
    """Apply a saved plan to the model it was made for.

    Example:
      finecast apply tuned.plan.json model.onnx -o tuned.onnx
    """
    from finecast import api

    with progress("applying", quiet=as_json):
        result = api.apply(
            plan,
            model,
            output,
            engine=engine,
            dims=dim_sizes(dim or ()),
            verify=not no_verify,
            force=force,
        )
    report(result, output, as_json=as_json)
