"""Writing a converted model: checked, loaded and run before it takes its name.

Law: at the output path there is either nothing new or a model that passes onnx.checker with
full check and that the engine loads; nothing half-written stays.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from finecast.engines import EMULATOR
from finecast.engines.base import Array, Engine, Feeds, Session
from finecast.engines.emulator import exact_session
from finecast.engines.ports import DTYPES
from finecast.errors import EngineError, ModelError, UsageError, naming
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile
from finecast.tuner.sources import FeedMaker


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a model goes.

    Attributes:
        path: The model's file; None for a model in memory, verified as if it were written.
        force: Whether files that are there may be replaced.
        external_data: Whether tensors go to ``NAME.data`` beside it; None: if they are more
            than fit one file, or came in that form.
    """

    path: Path | None
    force: bool = False
    external_data: bool | None = None

    def check(self) -> None:
        """Raise UsageError unless the model may be written here."""
        if self.path is not None:
            frontend.check_writable(self.path, force=self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How the written model was verified; errors are None where it was not run.

    ``relative_error`` is the largest over outputs of ||y - r|| / ||r|| against fp32.
    """

    engine: str | None
    max_abs_error: float | None = None
    relative_error: float | None = None
    note: str = ""


def write(
    file: OnnxFile,
    applied: Applied,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> tuple[int, Verified]:
    """Put the model at its destination; returns its bytes on disk and how it was verified.

    The first of ``engines`` that runs both models verifies it; with no engines it is only
    checked.

    Raises:
        UsageError: If the output cannot be written.
        ModelError: If the model is not valid, or gives NaN where fp32 gives none.
        EngineError: If no engine can load it.
    """
    output.check()
    place = output.path.parent if output.path is not None else None
    with tempfile.TemporaryDirectory(dir=place, prefix=".finecast-") as folder:
        staged = Path(folder) / (output.path.name if output.path is not None else "model.onnx")
        with naming(staged, f"{file.name}, converted"):
            size = frontend.save(applied.model, staged, external_data=output.external_data)
            # Data before the model that names it.
            parts = sorted(Path(folder).iterdir(), key=lambda p: p.name, reverse=True)
            if place is not None:
                for part in parts:
                    frontend.check_writable(place / part.name, force=output.force)
            frontend.check(staged)
            verified = verify(file, staged, engines, feeds)
        if place is not None:
            _publish(parts, place, str(output.path))
    return size, verified


def _publish(parts: Sequence[Path], place: Path, where: str) -> None:
    try:
        for part in parts:
            part.replace(place / part.name)
    except OSError as error:
        raise UsageError(f"cannot write the output: {error.strerror}", where=where) from error


def verify(
    file: OnnxFile, path: Path, engines: Sequence[Engine], feeds: FeedMaker
) -> Verified:
    """Load and run the fp32 model and the one at ``path`` in the first engine that can."""
    if not engines:
        return Verified(engine=None, note="not run: no engine was asked to")
    feeds.check(file.model)
    failures: list[str] = []
    for engine in engines:
        try:
            return _verify_in(file, path, engine, feeds)
        except EngineError as error:
            failures.append(f"{engine.name}: {error.what}")
    raise EngineError(
        "no engine here can run the converted model",
        where="; ".join(failures),
        fix="choose another format or engine, or write it unverified with --no-verify",
    )


def _verify_in(file: OnnxFile, path: Path, engine: Engine, feeds: FeedMaker) -> Verified:
    # A device may have no fp32 products of its own: its emulator is held against fp32.
    emulated = engine.name == EMULATOR
    name = f"{EMULATOR}:{engine.device}" if emulated else engine.name
    reference = exact_session(file.path) if emulated else engine.load(file.path)
    given, wanted, note = feeds.make(reference), {}, ""
    if given is None:
        note = "loaded, not run: give --data to compare outputs"
    else:
        try:
            wanted = reference.run(given)
        except EngineError as error:
            # The fp32 model refuses these feeds: they say nothing about the converted one.
            note = f"loaded, not run: {error.what}"
    del reference  # one large model at a time
    session = engine.load(path)
    if given is None or note:
        return Verified(engine=name, note=note)
    got = session.run(_typed(given, session))
    return compare(name, list(got.values()), list(wanted.values()))


def _typed(feeds: Feeds, session: Session) -> Feeds:
    """Feeds in the types of a model whose inputs were declared low."""
    specs = (s for s in session.inputs if s.name in feeds)
    return {s.name: feeds[s.name].astype(DTYPES[s.dtype], copy=False) for s in specs}


def compare(engine: str, got: Sequence[Array], wanted: Sequence[Array]) -> Verified:
    """Largest absolute and relative error over float outputs.

    Raises:
        ModelError: If an output has a NaN or Inf where fp32 has none.
    """
    worst_abs, worst_relative = 0.0, 0.0
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if other.dtype.kind in "biuOSU":
            continue
        y, r = one.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(r)
        if not np.isfinite(y[finite]).all():
            raise ModelError(
                f"output {number} has NaN or Inf where fp32 has none",
                fix="use bf16, exclude ops with --exclude or --op NAME=fp32, or use `tune`",
            )
        difference = np.abs(y[finite] - r[finite])
        norm = math.sqrt(float(np.sum(r[finite] ** 2)))
        worst_abs = max(worst_abs, float(difference.max(initial=0.0)))
        error = math.sqrt(float(np.sum(difference**2)))
        worst_relative = max(worst_relative, error / norm if norm else error)
    return Verified(engine=engine, max_abs_error=worst_abs, relative_error=worst_relative)
