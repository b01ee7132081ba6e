"""``finecast inspect``: what a model is made of, and what its values look like on data."""

from __future__ import annotations

from typing import Annotated

import typer

from finecast.cli.common import Json, Model, Read, SizedSamples
from finecast.cli.output import write_report
from finecast.progress import shown


def run(
    model: Model,
    data: SizedSamples,
    how: Read,
    auto_cast_type: Annotated[
        str,
        typer.Option(
            "--auto-cast-type", metavar="FORMAT", help="The format to check values for."
        ),
    ] = "bf16",
    as_json: Json = False,
) -> None:
    """A model's ops by class and type, parameters, FLOPs and bytes.

    FLOPs and bytes are for one call at --batch and --dim. With --data it reports values that
    overflow or underflow in the format, and the first op that gives NaN or Inf.

    Examples:
      finecast inspect model.onnx

      finecast inspect model.onnx --data val.npz --auto-cast-type fp16
    """
    from finecast import api
    from finecast.rules.policy import low_format

    low = low_format(auto_cast_type)
    with shown("inspecting"):
        census = api.inspect(
            model,
            data=data,
            low=low,
            from_type=how.from_type,
            freeze_inputs=how.freeze_inputs,
            trust=how.trust,
        )
    write_report(census, as_json=as_json)
