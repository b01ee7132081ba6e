"""What comes before a converted model takes its name: feeds, a run of fp32, and the move."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from finecast.data.feeds import last_indices
from finecast.data.lengths import affordable, length_limits
from finecast.engines.base import Array, Feeds, Session
from finecast.errors import EngineError, UsageError
from finecast.graph import Graph
from finecast.pipeline.sources import FeedMaker


class GivenModelError(EngineError):
    """An engine does not run a model as it was given: no conversion is to blame."""


@contextmanager
def as_given() -> Generator[None]:
    """What fails here fails of the model as it was given."""
    try:
        yield
    except EngineError as error:
        raise GivenModelError(error.what, where=error.where, fix=error.fix) from error


def not_verified(failures: Mapping[str, EngineError]) -> EngineError:
    """What to raise where each engine, by name, failed to verify a conversion."""
    where = "; ".join(f"{name}: {error.what}" for name, error in failures.items())
    if all(isinstance(error, GivenModelError) for error in failures.values()):
        fix = next(iter(failures.values())).fix
        unverified = "write the conversion unverified with --no-verify"
        return EngineError(
            "no engine here can run the model as it was given, before any conversion",
            where=where,
            fix=f"{fix}; or {unverified}" if fix else unverified,
        )
    return EngineError(
        "no engine here can run the converted model",
        where=where,
        fix="choose another format or engine, or write it unverified with --no-verify",
    )


def publish(parts: Sequence[Path], place: Path, where: str) -> None:
    """Move staged files to their place, in this order: data before the model that names it.

    Raises:
        UsageError: If one cannot be moved; then all is as it was.
    """
    done: list[tuple[Path, Path | None]] = []
    try:
        for part in parts:
            there, before = place / part.name, part.with_name(f"{part.name}.before")
            kept = there.replace(before) if there.exists() else None
            done.append((there, kept))
            part.replace(there)
    except OSError as error:
        for there, kept in reversed(done):
            there.unlink(missing_ok=True)
            if kept is not None:
                kept.rename(there)
        raise UsageError(f"cannot write the output: {error.strerror}", where=where) from error


def sizes_of(session: Session, feeds: Feeds) -> dict[str, int]:
    """Sizes of the free dimensions that have a name."""
    return {
        dim: size
        for spec in session.inputs
        if spec.name in feeds
        for dim, size in zip(spec.shape or (), feeds[spec.name].shape, strict=False)
        if isinstance(dim, str) and dim
    }


def reference_run(
    reference: Session, feeds: FeedMaker, graph: Graph
) -> tuple[Feeds | None, Mapping[str, Array], str]:
    """Feeds, what the fp32 model gives for them, and why there is nothing."""
    remedy = _remedy(reference)
    note = f"loaded, not run: {remedy} to compare outputs"
    for lengths, last in _extremes(graph, feeds):
        try:
            given = feeds.draw(reference, last, lengths)
        except UsageError as error:
            if feeds.dims:
                raise
            note = f"loaded, not run: {error.what}: {error.fix}"
            continue
        try:
            return given, reference.run(given), ""
        except EngineError as error:
            # The fp32 model refuses these feeds: they say nothing about the converted one.
            note = f"loaded, not run: {error.what}: {remedy}"
    return None, {}, note


def _remedy(reference: Session) -> str:
    """What a user can do where random feeds do not run: sizes are stated by name."""
    free = [
        dim or f"{spec.name}.{axis}"
        for spec in reference.inputs
        for axis, dim in enumerate(spec.shape or ())
        if not isinstance(dim, int)
    ]
    return "give --data" + (f", or sizes by --dim {free[0]}=SIZE" if free else "")


def _extremes(
    graph: Graph, feeds: FeedMaker
) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Lengths and indices to run at, until the fp32 model takes them.

    The ends of tables first; where the model wants others for a reason that cannot be seen,
    small ones. Positions may start at 2, as RoBERTa's do.
    """
    if not feeds.batches:  # data is taken as it is
        last = last_indices(graph)
        limits = length_limits(graph)
        for spare in (0, 2):
            lengths = {name: max(rows - spare, 1) for name, rows in limits.items()}
            if lengths:
                yield affordable(lengths, graph), last
        if last:
            yield {}, last
    yield {}, {}
