"""A look at a tuned file in the other engines that are installed here.

A file that is faster in one engine may be slower than fp32 in another, whose kernels for its
formats differ, or not run there at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from finecast.engines import ENGINES, get_engine, installed, name_of
from finecast.engines.base import Feeds, Session, feeds_for
from finecast.errors import FinecastError
from finecast.measure.racing import Effort, Race
from finecast.native.opening import runs_in
from finecast.tuning.result import InOtherEngine

_LOOK: Final = Effort(min_time_s=0.2, rounds=5, warmup=2)
_TUNED: Final = "tuned"
_OF_FILES: Final = "ONNX"
"""The framework of engines that load a file in less than a second: others compile it."""


def in_other_engines(
    fp32: Path, tuned: Path, made_in: str, feeds: Feeds
) -> Iterator[InOtherEngine]:
    """Times both files in each installed engine that reads them, other than ``made_in``.

    Nothing is given where the fp32 model is no file, or does not run in an engine, or where
    no known engine made the file.
    """
    own = ENGINES.get(name_of(made_in))
    if own is None or not fp32.is_file():
        return
    for name, entry in ENGINES.items():
        both = runs_in(fp32, name) and runs_in(tuned, name)
        if both and entry.requires != own.requires and installed(name):
            found = in_engine(name, fp32, tuned, feeds)
            if found is not None:
                yield found


def slower_than_fp32(
    fp32: Path, other: Path, engine: str | None, feeds: Feeds
) -> tuple[str, ...]:
    """That a file is slower than fp32 in an engine, by default the first that reads both."""
    if not (fp32.is_file() and other.is_file()):
        return ()
    names = [
        name
        for name, entry in ENGINES.items()
        if entry.framework == _OF_FILES and installed(name)
        if runs_in(fp32, name) and runs_in(other, name)
    ]
    if engine is not None:
        names = [engine] if name_of(engine) in names else []
    found = in_engine(names[0], fp32, other, feeds) if names else None
    speed = None if found is None else found.speed
    return (found.text,) if found and speed and speed.high < 1 else ()


def in_engine(name: str, fp32: Path, tuned: Path, feeds: Feeds) -> InOtherEngine | None:
    """The speed of ``tuned`` beside ``fp32`` in one engine; None if that does not run fp32."""
    try:
        engine = get_engine(name)
        anchor = _call(engine.load(fp32), feeds)
        anchor()
    except FinecastError:
        return None
    try:
        race = Race.of(anchor, {_TUNED: _call(engine.load(tuned), feeds)}, _LOOK)
        return InOtherEngine(engine=engine.spec, speed=race.speed(_TUNED))
    except FinecastError as error:
        return InOtherEngine(engine=engine.spec, why=error.what)


def _call(session: Session, feeds: Feeds) -> partial[object]:
    return partial(session.run, feeds_for(session, feeds))
