"""Options that several verbs take, and the opening of the model that they name."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from finecast.cli.groups import Only
from finecast.cli.output import warn
from finecast.data.criterion import Criterion
from finecast.data.options import DataOptions
from finecast.files import CommandFiles
from finecast.files.locks import OutputBusyError
from finecast.native.artefact import Destination
from finecast.native.model import ReadOptions, RunOptions

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="The fp32 model: .onnx, OpenVINO's .xml, a SavedModel folder, .pb, .keras,"
        " .tflite, .pdmodel, or torch.export's .pt2.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_PLACES: Final = ("path", "force", "external_data")
Written = Annotated[Destination, Only(*_PLACES, required=("path",))]
WrittenWithPlan = Annotated[Destination, Only(*_PLACES, "plan_out", required=("path",))]
Read = Annotated[ReadOptions, Only("from_type", "freeze_inputs", "trust")]
Trusted = Annotated[ReadOptions, Only("trust")]
Run = Annotated[RunOptions, Only("engine", "verify", "lock")]
Placing = Annotated[RunOptions, Only("engine", "verify")]
Engine = Annotated[RunOptions, Only("engine")]
_SAMPLES: Final = ("data", "labels", "calib", "sample_axes", "batch", "decode_steps", "state")
Samples = Annotated[DataOptions, Only(*_SAMPLES)]
SizedSamples = Annotated[DataOptions, Only(*_SAMPLES, "dims")]
ComparedSamples = Annotated[DataOptions, Only(*_SAMPLES, "dims", "slices")]
EVALUATION: Final = (*_SAMPLES, "metric", "evaluate", "lower_is_better", "of", "slices")
"""Options of data on which a model is evaluated."""
Evaluation = Annotated[DataOptions, Only(*EVALUATION)]
Kept = Annotated[Criterion, Only("tolerance", "max_drop")]


def warn_stale(paths: Sequence[Path]) -> None:
    """Warn that files at the outputs' paths are those of an earlier run."""
    for path in paths:
        warn(
            f"STALE: {path} is there from before, and this run neither made nor checked it;"
            " remove it, or do not take it for the result"
        )


@contextmanager
def telling_stale(files: CommandFiles) -> Generator[None]:
    """If what runs inside fails, name the outputs that it wrote or an earlier run left."""
    try:
        yield
    except OutputBusyError:
        raise  # another command is making them
    except BaseException:
        warn(*(f"{path} was written whole before what follows" for path in files.replaced()))
        warn_stale(files.stale())
        raise
