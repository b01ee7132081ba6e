"""``finecast apply``: the model that a saved plan gives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli.common import (
    EngineName,
    Json,
    Model,
    NoVerify,
    Output,
    Source,
    Trust,
    files_of,
    open_model,
    telling_stale,
)
from finecast.cli.convert import report
from finecast.cli.data_options import Data, RandomFeeds
from finecast.cli.output import warn
from finecast.progress import shown


def run(
    plan: Annotated[Path, typer.Argument(help="A plan that tune or convert wrote.")],
    model: Model,
    written: Output,
    data: Data,
    feeds: RandomFeeds,
    engine: EngineName = None,
    no_verify: NoVerify = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Apply a saved plan to the model it was made for.

    Example:
      finecast apply tuned.plan.json model.onnx -o tuned.onnx
    """
    from finecast import api
    from finecast.devices.emulation import TF32_NOTE

    files = files_of(model, data, force=written.force)
    files.read("PLAN", plan)
    source = Source(model=model, trust=trust)
    with telling_stale(files), shown("applying", quiet=as_json):
        result = api.apply(
            plan,
            open_model(files, source, written, engine=engine, data=data, feeds=feeds),
            written.output,
            engine=engine,
            data=data.if_given(),
            dims=feeds.sizes,
            verify=not no_verify,
            force=written.force,
            external_data=written.external_data,
        )
    if "tf32" in result.plan.counts:
        warn(TF32_NOTE)
    report(result, written.output, as_json=as_json)
