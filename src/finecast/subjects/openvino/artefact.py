"""Writing converted IR: loaded and run before it takes its name.

Law: at the output path there is either nothing new or IR that OpenVINO loads; neither of its
two files is there without the other, and nothing half-written stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from finecast.engines.base import Engine
from finecast.errors import UsageError, naming
from finecast.files import check_writable
from finecast.files.staging import staging
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino.model import IR_SUFFIX, WEIGHTS_SUFFIX
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.sources import FeedMaker
from finecast.subjects.engine.native import EngineBuilt, RoundableSource
from finecast.subjects.engine.publishing import publish
from finecast.subjects.engine.verifying import verify


def write(
    source: RoundableSource,
    built: EngineBuilt,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> tuple[int, Verified]:
    """Write the model; returns its bytes on disk, and how it was verified.

    Raises:
        UsageError: If the output cannot be written.
        WrongNumbersError: If its formats do not explain its outputs.
        EngineError: If no engine can run it.
    """
    check_output(output)
    place = output.path.parent if output.path is not None else None
    with staging(place) as folder:
        staged = folder / (output.path.name if output.path is not None else "model.xml")
        with naming(staged, str(output.path or folder)):
            size = frontend.save(built.model, staged)
        with naming(staged, f"{source.name}, converted"):
            verified = verify(source, built, staged, engines, feeds)
        if place is not None:
            weights, model = staged.with_suffix(WEIGHTS_SUFFIX), staged
            publish([weights, model], place, str(output.path))
    return size, verified


def check_output(output: Destination) -> None:
    """Raise UsageError unless both files of IR may be written there."""
    if output.external_data is not None:
        raise UsageError(
            "--external-data/--one-file does not apply to OpenVINO models",
            where=str(output.path),
            fix="leave it out: constants are always beside the .xml, in the .bin",
        )
    output.check()
    if output.path is not None:
        if output.path.suffix != IR_SUFFIX:
            raise UsageError(
                f"OpenVINO writes no IR whose name does not end in {IR_SUFFIX}",
                where=str(output.path),
                fix=f"name it {output.path.with_suffix(IR_SUFFIX)}",
            )
        check_writable(output.path.with_suffix(WEIGHTS_SUFFIX), force=output.force)
