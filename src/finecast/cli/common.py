"""Options that several verbs take, one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="The FP32 ONNX model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
ExternalData = Annotated[
    bool | None,
    typer.Option(
        "--external-data/--one-file",
        help="Tensors in NAME.data beside the output, or all in one file; default: as the"
        " model came, and beside it from 1.8 GB on.",
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME[:DEVICE]",
        help="openvino or onnxruntime, with :DEVICE if not the CPU; or emulator:TARGET.",
    ),
]
NoVerify = Annotated[
    bool,
    typer.Option("--no-verify", help="Write the model even if nothing here can run it."),
]
PlanOut = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write the plan here too.")
]
