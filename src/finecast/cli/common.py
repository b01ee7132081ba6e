"""Options that several verbs take, and the opening of the model that they name."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from finecast.cli.groups import Only
from finecast.cli.output import warn
from finecast.data.criterion import Criterion
from finecast.data.sources import DataOptions
from finecast.errors import UsageError
from finecast.files import CommandFiles
from finecast.files.locks import OutputBusyError
from finecast.native.artefact import Destination
from finecast.native.model import ReadOptions, RunOptions

if TYPE_CHECKING:
    from finecast.native.model import OpenedModel

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="The FP32 model: .onnx; OpenVINO's .xml, a SavedModel's folder, .pb, .keras,"
        " .tflite, .pdmodel; or .pt2 of torch.export.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Written = Annotated[Destination, Only(required=("path",))]
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
Kept = Annotated[Criterion, Only("kind", "tolerance", "max_drop", "keep")]
PlanOut = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write the plan here too.")
]


def open_model(
    files: CommandFiles,
    model: Path,
    written: Destination,
    how: ReadOptions,
    *,
    engine: str | None = None,
    data: DataOptions | None = None,
) -> OpenedModel:
    """Open the model, once the output is known to overwrite nothing that is read.

    Args:
        files: The command's files; the output and the model's external data are declared.
        model: The model that is read.
        written: The model that is written.
        how: How the model is read.
        engine: Like ``data`` an option that some kinds of models do not take.
        data: Samples of the model's inputs, or sizes of random feeds.

    Raises:
        UsageError: If a file cannot be written or must not be replaced, or an option does not
            apply to the model.
    """
    from finecast import api
    from finecast.native.opening import check_options, check_output_name, written_with

    if written.path is None:
        return api.load(model, trust=how.trust, freeze_inputs=how.freeze_inputs)
    result = written_with(model, written)
    files.write("--output", written.path, beside=result.beside, folder=result.folder)
    try:
        check_output_name(model, written.path)
    except UsageError:
        files.withdraw(written.path)
        raise
    options: dict[str, object] = {
        "--engine": engine,
        "--data": data is not None and data.given,
        "--batch": data is not None and data.batch,
        "--dim": data is not None and data.dims,
        "--from-type": how.from_type,
        "--external-data/--one-file": written.external_data is not None,
    }
    files.check_replaced()
    check_options(model, options, output=written.path)
    file = api.load(
        model, trust=how.trust, freeze_inputs=how.freeze_inputs, output=written.path
    )
    files.read("MODEL's external data", *file.external)
    return file


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


def files_of(
    model: Path, data: DataOptions, rules: Sequence[Path] = (), *, force: bool
) -> CommandFiles:
    """The files of a command that reads ``model``, ``data``, and files of rules."""
    files = CommandFiles(force=force)
    files.read("MODEL", model)
    for role, path in (*data.reads, *(("--rules", file) for file in rules)):
        files.read(role, path)
    return files
