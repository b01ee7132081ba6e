"""Writing a converted model: loaded and run before it takes its name.

Law: at the output path there is either what was there before or a SavedModel that TensorFlow
serves; nothing half-written stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from finecast.engines.base import Engine
from finecast.errors import UsageError
from finecast.files import check_writable_folder, publish_folder
from finecast.files.staging import staging
from finecast.frontends.tensorflow.loading import GRAPH_FILE
from finecast.frontends.tensorflow.saving import save
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.sources import FeedMaker
from finecast.subjects.engine.native import EngineBuilt, RoundableSource
from finecast.subjects.engine.verifying import verify


def write(
    source: RoundableSource,
    built: EngineBuilt,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> tuple[int, Verified]:
    """Write the model; returns its bytes, and how it was verified.

    Without a path it is verified in memory.

    Raises:
        UsageError: If the output cannot be written.
        WrongNumbersError: If its formats do not explain its outputs.
        EngineError: If no engine can run it.
    """
    model = built.model
    if output.path is None:
        return model.size_bytes, verify(source, built, model, engines, feeds)
    verified: list[Verified] = []

    def staged(folder: Path) -> None:
        save(model, folder)
        verified.append(verify(source, built, folder, engines, feeds))

    publish(staged, output.path, force=output.force)
    return model.size_bytes, verified[0]


def publish(make: Callable[[Path], None], path: Path, *, force: bool) -> None:
    """Let ``make`` write a SavedModel into a folder beside ``path``, then move it there.

    Raises:
        UsageError: If it cannot be written there.
    """
    try:
        with staging(path.parent) as folder:
            staged = folder / path.name
            make(staged)
            check_writable_folder(path, GRAPH_FILE, force=force)
            publish_folder(staged, path)
    except OSError as error:
        raise UsageError(
            f"cannot write the output: {error.strerror}", where=str(path)
        ) from error
