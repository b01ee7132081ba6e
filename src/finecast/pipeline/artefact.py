"""Writing a converted model: checked, loaded and run before it takes its name.

Law: at the output path there is either nothing new or a model that passes onnx.checker with
full check and that the engine loads; nothing half-written stays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from finecast.data.deviation import deviation
from finecast.data.feeds import last_indices
from finecast.data.lengths import affordable, length_limits
from finecast.engines import EMULATOR
from finecast.engines.base import Array, Engine, Feeds, Session
from finecast.engines.emulator import exact_emulator, exact_session
from finecast.errors import EngineError, UsageError, WrongNumbersError, naming
from finecast.files import DATA_SUFFIX, check_writable
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Applied, OnnxFile
from finecast.graph import Graph
from finecast.pipeline.acceptance import Case, accept, accept_taken, feeds_for, nudge
from finecast.pipeline.sources import FeedMaker
from finecast.pipeline.truth import truth_session
from finecast.planning.plan import Plan

# Models above this are not run in a second engine to find out what their formats explain:
# that takes several times their size in memory.
_EMULATED_BYTES: Final = 1 << 30


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

    @property
    def beside(self) -> tuple[str, ...]:
        """Suffixes of the files that may be written with the model's."""
        return () if self.external_data is False else (DATA_SUFFIX,)

    def check(self, file: OnnxFile) -> None:
        """Raise UsageError unless ``file``, converted, may be written here."""
        if self.path is None:
            return
        check_writable(self.path, force=self.force)
        apart = self.external_data
        if frontend.came_external(file.model) if apart is None else apart:
            data = self.path.with_name(self.path.name + DATA_SUFFIX)
            check_writable(data, force=self.force)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How the written model was verified; errors are None where it was not run.

    ``relative_error`` is the largest over outputs of ||y - r|| / ||r|| against
    ``reference``: the fp32 model, or the fp64 model that it was taken from. Of the latter's
    error ``taken_error`` is what taking it to fp32 alone gives. ``sizes`` are those that the
    free dimensions of the inputs had.
    """

    engine: str | None
    max_abs_error: float | None = None
    relative_error: float | None = None
    note: str = ""
    reference: str = "fp32"
    taken_error: float | None = None
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])


def write(
    file: OnnxFile,
    plan: Plan,
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
        ModelError: If the model is not valid.
        WrongNumbersError: If its formats do not explain what it gives.
        EngineError: If no engine can load it.
    """
    output.check(file)
    place = output.path.parent if output.path is not None else None
    with tempfile.TemporaryDirectory(dir=place, prefix=".finecast-") as folder:
        staged = Path(folder) / (output.path.name if output.path is not None else "model.onnx")
        with naming(staged, f"{file.name}, converted"):
            size = frontend.save(applied.model, staged, external_data=output.external_data)
            # Data before the model that names it.
            parts = sorted(Path(folder).iterdir(), key=lambda p: p.name, reverse=True)
            if place is not None:
                for part in parts:
                    check_writable(place / part.name, force=output.force)
            frontend.check(staged, shapeless=frontend.shapeless_ports(file.model))
            verified = verify(file, plan, applied, staged, engines, feeds)
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
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    path: Path,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> Verified:
    """Load and run the fp32 model and the one at ``path`` in the first engine that can."""
    if not engines:
        return Verified(engine=None, note="not run: no engine was asked to")
    feeds.check(file.model)
    failures: list[str] = []
    for engine in engines:
        try:
            return _verify_in(file, plan, applied, path, engine, feeds)
        except EngineError as error:
            failures.append(f"{engine.name}: {error.what}")
    if shapeless := [v.name for v in file.model.graph.inputs if v.shape is None]:
        # Engines that compile for a rank take no such model, and in fp32 neither.
        with suppress(EngineError):
            found = _verify_in(file, plan, applied, path, exact_emulator(), feeds)
            text = f"input {shapeless[0]!r} has no shape: {'; '.join(failures)}"
            return replace(found, note="; ".join(filter(None, (found.note, text))))
    raise EngineError(
        "no engine here can run the converted model",
        where="; ".join(failures),
        fix="choose another format or engine, or write it unverified with --no-verify",
    )


def _verify_in(
    file: OnnxFile,
    plan: Plan,
    applied: Applied,
    path: Path,
    engine: Engine,
    feeds: FeedMaker,
) -> Verified:
    # A device may have no fp32 products of its own: its emulator is held against fp32.
    emulated = engine.name == EMULATOR
    name = f"{EMULATOR}:{engine.device}" if emulated else engine.name
    reference = exact_session(file.path) if emulated else engine.load(file.path)
    given, wanted, note = _reference_run(reference, feeds, applied.graph)
    sizes = {} if given is None else _sizes(reference, given)
    del reference  # one large model at a time
    session = engine.load(path)
    if given is None or note:
        return Verified(engine=name, note=note)
    got = session.run(feeds_for(session, given))
    del session

    def elsewhere() -> Mapping[str, Array]:
        other = exact_session(path)
        return other.run(feeds_for(other, given))

    ids = {n.name: n.id for n in applied.graph.nodes}
    small = file.size_bytes <= _EMULATED_BYTES
    accept(
        Case(
            engine=engine,
            applied=applied,
            original=lambda: frontend.apply(file, replace(plan, decisions=(), io={})),
            formats={ids[n]: f for n, f in plan.formats.items()},
            feeds=given,
            exact=lambda nudged: exact_session(file.path).run(nudged),
            emulated=elsewhere if small and not emulated else None,
        ),
        got,
        wanted,
    )
    found = _compared(name, list(got.values()), list(wanted.values()))
    found = replace(found, sizes=sizes)
    return found if file.truth is None else _against(file, applied, given, got, wanted, found)


def _against(
    file: OnnxFile,
    applied: Applied,
    feeds: Feeds,
    got: Mapping[str, Array],
    taken: Mapping[str, Array],
    found: Verified,
) -> Verified:
    """How far the written model is from the fp64 one, and if fp32 is what makes it so.

    Raises:
        WrongNumbersError: If fp32 cannot hold what the model computes.
    """
    session, note = truth_session(file)
    if session is None:
        return replace(found, note="; ".join(filter(None, (found.note, note))))
    exact = session.run(feeds)
    nudged = session.run({name: nudge(array) for name, array in feeds.items()})
    accept_taken(applied.graph, taken, exact, nudged)
    wanted = list(exact.values())
    return replace(
        _compared(found.engine or "", list(got.values()), wanted),
        sizes=found.sizes,
        reference="fp64",
        taken_error=_compared("", list(taken.values()), wanted).relative_error,
    )


def _sizes(session: Session, feeds: Feeds) -> dict[str, int]:
    """Sizes of the free dimensions that have a name."""
    return {
        dim: size
        for spec in session.inputs
        if spec.name in feeds
        for dim, size in zip(spec.shape or (), feeds[spec.name].shape, strict=False)
        if isinstance(dim, str) and dim
    }


def _reference_run(
    reference: Session, feeds: FeedMaker, graph: Graph
) -> tuple[Feeds | None, Mapping[str, Array], str]:
    """Feeds, what the fp32 model gives for them, and why there is nothing."""
    note = "loaded, not run: give --data to compare outputs"
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
            note = f"loaded, not run: {error.what}"
    return None, {}, note


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


def compare(engine: str, got: Sequence[Array], wanted: Sequence[Array]) -> Verified:
    """Largest absolute and relative error over float outputs.

    Raises:
        WrongNumbersError: If an output has a NaN or Inf where fp32 has none.
    """
    for number, pair in enumerate(zip(got, wanted, strict=True)):
        if deviation(*pair).nonfinite:
            raise WrongNumbersError(
                f"output {number} has NaN or Inf where fp32 has none",
                fix="use bf16, exclude ops with --exclude or --op NAME=fp32, or use `tune`",
            )
    return _compared(engine, got, wanted)


def _compared(engine: str, got: Sequence[Array], wanted: Sequence[Array]) -> Verified:
    found = [deviation(one, other) for one, other in zip(got, wanted, strict=True)]
    unlike = sum(not d.comparable for d in found)
    empty = all(not one.size for one in wanted)
    note = f"{unlike} outputs of another shape: what is in them decides it" if unlike else ""
    return Verified(
        engine=engine,
        max_abs_error=max((d.largest for d in found), default=0.0),
        relative_error=max((d.relative for d in found), default=0.0),
        note="every output is empty: nothing was compared" if empty else note,
    )
