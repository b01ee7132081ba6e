"""Options that several verbs take, and the opening of the model that they name."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from finecast.cli.data_options import Data, RandomFeeds
from finecast.cli.output import warn
from finecast.errors import UsageError
from finecast.files import CommandFiles
from finecast.files.locks import OutputBusyError

if TYPE_CHECKING:
    from finecast.pipeline.artefact import Destination
    from finecast.pipeline.model import OpenedModel

Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="The FP32 model: .onnx; OpenVINO's .xml, a SavedModel's folder, .pb, .keras,"
        " .tflite, .pdmodel; or .pt2 of torch.export.",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Unpickle and run code in a .pt2 or .keras file, if you know who made the file.",
    ),
]
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
        help="openvino, onnxruntime, tensorflow, torch, torch-eager; :DEVICE if not CPU; or"
        " emulator:TARGET.",
    ),
]
NoVerify = Annotated[
    bool,
    typer.Option("--no-verify", help="Write the model even if nothing here can run it."),
]
PlanOut = Annotated[
    Path | None, typer.Option(metavar="FILE.json", help="Write the plan here too.")
]
FromType = Annotated[
    str | None,
    typer.Option(
        "--from-type",
        metavar="fp64|fp16|bf16|int8",
        help="Take the model's ops in this type to fp32 first; inputs and outputs keep it."
        " int8: what another tool quantized, to be planned op by op.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The model that is read."""

    model: Model
    from_type: FromType = None
    trust: Trust = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The model that is written."""

    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The model that is written.")
    ]
    external_data: ExternalData = None
    force: Force = False

    @property
    def destination(self) -> Destination:
        """These options for the Python API."""
        from finecast.pipeline.artefact import Destination

        return Destination(
            path=self.output, force=self.force, external_data=self.external_data
        )


class Reading(Protocol):
    """A group of options that may name files to read."""

    @property
    def reads(self) -> list[tuple[str, Path]]:
        """The files, each with its option."""
        ...


def open_model(
    files: CommandFiles,
    source: Source,
    written: Output,
    *,
    engine: str | None = None,
    data: Data | None = None,
    feeds: RandomFeeds | None = None,
) -> OpenedModel:
    """Open the model, once the output is known to overwrite nothing that is read.

    Args:
        files: The command's files; the output and the model's external data are declared.
        source: The model that is read.
        written: The model that is written.
        engine: Like ``data`` and ``feeds`` an option that some kinds of models do not take.
        data: Samples of the model's inputs.
        feeds: Sizes of random feeds.

    Raises:
        UsageError: If a file cannot be written, or an option does not apply to the model.
    """
    from finecast import api
    from finecast.subjects import check_options, check_output_name, written_with

    result = written_with(source.model, written.destination)
    files.write("--output", written.output, beside=result.beside, folder=result.folder)
    try:
        check_output_name(source.model, written.output)
    except UsageError:
        files.withdraw(written.output)
        raise
    options: dict[str, object] = {
        "--engine": engine,
        "--data": data is not None and data.given,
        "--batch": data is not None and data.batch,
        "--dim": feeds is not None and feeds.dim,
        "--from-type": source.from_type,
        "--external-data/--one-file": written.external_data is not None,
    }
    check_options(source.model, options, output=written.output)
    file = api.load(source.model, trust=source.trust, output=written.output)
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
    """If what runs inside fails, warn of outputs that an earlier run left."""
    try:
        yield
    except OutputBusyError:
        raise  # another command is making them
    except BaseException:
        warn_stale(files.stale())
        raise


def files_of(model: Path, *groups: Reading, force: bool) -> CommandFiles:
    """The files of a command that reads ``model`` and what ``groups`` name."""
    files = CommandFiles(force=force)
    files.read("MODEL", model)
    for role, path in (pair for group in groups for pair in group.reads):
        files.read(role, path)
    return files
