"""The files of a call: declared, refused and locked in one place, for the shell and Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from finecast.api.models import Model
from finecast.data.options import DataOptions
from finecast.files import CommandFiles
from finecast.measure.study import journals
from finecast.native.artefact import Destination
from finecast.native.model import OpenedModel, ReadOptions
from finecast.native.opening import (
    check_options,
    check_output_name,
    check_written,
    opened,
    written_with,
)


def declared(
    model: Model,
    how: ReadOptions,
    output: Destination,
    files: CommandFiles,
    data: DataOptions | None = None,
    study: Path | None = None,
) -> Callable[[], OpenedModel]:
    """Declare the files of a call that writes a model, and give a function for the model.

    Law: whatever the name of a file tells is refused before the model is read. Then the
    outputs may be written: ``files.locked()`` keeps other commands from them. The function
    takes the model to fp32 where ``how`` says so, which takes a while.

    Args:
        model: The model that is read.
        how: How it is read.
        output: The model that is written.
        files: The files of the call; those that only the caller knows are declared already.
        data: The data that are read.
        study: The study that is added to.

    Raises:
        UsageError: If a file that is read would be written, an output exists and must not be
            replaced, or an option does not apply to the model.
        ModelError: If a conversion made the model.
    """
    if isinstance(model, str | Path):
        read, path = None, Path(model)
    else:
        read = opened(model, how, output=output.path)
        path = read.path
    files.read("the model", path)
    for option, file in data.reads if data is not None else ():
        files.read(f"the file of {option}", file)
    result = written_with(path, output)
    files.write("the output", output.path, beside=result.beside, folder=result.folder)
    files.write("the study", study, beside=journals(study), replaces=False)
    if output.path is not None:
        check_output_name(path, output.path)
    files.check_replaced()
    if read is None:
        options = {
            "--from-type": how.from_type,
            "--external-data/--one-file": output.external_data is not None,
        }
        check_options(path, options, output=output.path)
        read = opened(model, how, output=output.path)
    read.check_original()
    if output.path is not None:
        check_written(type(read).__module__, output.path)
    read.check(output)
    files.read("the model's external data", *read.external)
    source, taken = read, how.from_type
    return cache(lambda: source if taken is None else source.to_fp32(taken))
