"""Verifying a converted model beside the fp32 one, in the first engine that runs both."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from finecast.data.deviation import deviation
from finecast.data.input_ranges import Normal, Range, input_ranges, without_masks
from finecast.data.response import change, nan_outputs, resampled
from finecast.data.sizes import (
    affordable,
    cached_lengths,
    guessed_dims,
    input_specs,
    length_limits,
    size_guesses,
)
from finecast.data.sources import FeedMaker
from finecast.data.workload import sample_count
from finecast.engines import crashes, what_loads_it
from finecast.engines.base import (
    Array,
    Feeds,
    Loadable,
    Session,
    Steps,
    TensorSpec,
    feeds_for,
)
from finecast.engines.fallen_apart import broken_by
from finecast.engines.loading import AS_IR
from finecast.errors import EngineError, NoKernelError, UsageError, WrongNumbersError
from finecast.files import check_writable, writing
from finecast.files.staging import staging
from finecast.frontends.dry_run import TooLargeError
from finecast.graph import Graph
from finecast.native.acceptance import Case, Outputs, Pair, accept
from finecast.native.artefact import Decisions, Destination, Verified, compare
from finecast.native.baseline import SecondOpinion, differing, mismatch_of
from finecast.native.hint import check_marks
from finecast.native.inner_decisions import changed_decisions
from finecast.native.integers import check_on_integers
from finecast.native.source import EngineBuilt, Source, VerifyOn
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.thresholds import NOTICED
from finecast.planning.free_rows import free_outputs, matched
from finecast.planning.plan import Plan
from finecast.plugin import title_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """What both models of a pair gave on ``feeds``."""

    feeds: Feeds
    got: Outputs
    wanted: Outputs


def run_both(pair: Pair, feeds: FeedMaker) -> tuple[Verified, Compared | None]:
    """Load and run both models; None if no feeds could be made for them.

    Raises:
        WrongNumbersError: If the plan's formats do not explain its outputs.
        EngineError: If the engine cannot run one of the models.
    """
    engine, plan, applied = pair.engine, pair.built.plan, pair.built.applied
    emulated, name = engine.emulates is not None, engine.label
    try:
        with as_given():
            reference, before = pair.reference()
    except GivenModelError as error:
        if isinstance(error.__cause__, TooLargeError):
            return _run_alone(pair, feeds, error.what), None
        raise
    with as_given():
        second = SecondOpinion.on(pair.source, engine)
        ran = reference_run(reference, feeds, applied.graph, second, plan)
    followed = _followed(reference, ran)
    doubt = ""
    if ran.feeds is not None:
        doubt = differing(second, applied.graph, ran.feeds, ran.outputs)
    del reference, second  # one large model at a time
    session, after = pair.converted()
    check_marks(plan, applied.graph, session)
    loaded = Verified(
        engine=name,
        note=ran.note,
        sizes=ran.sizes,
        kernels=(len(before), len(after)) if before and after else None,
        apart=tuple(one.text for one in broken_by(plan, before, after)),
    )
    inputs, wanted = ran.feeds, ran.outputs
    if inputs is None:
        return loaded, None
    got = session.run(feeds_for(session, inputs))
    if not emulated:
        check_on_integers(engine, plan, applied, inputs, session)
    del session
    case = Case(pair=pair, feeds=inputs, random=not feeds.batches, followed=followed)
    warnings = (*filter(None, [doubt]), *accept(case, got, wanted))
    # Without a lowered op both models have fp32's kernels, on any number of threads.
    alone = engine.on_one_thread() if plan.lowers else None
    if alone is not None:
        _accept_on_one_thread(replace(case, pair=replace(pair, engine=alone)), got)
    verified = compare(name, got, wanted, free_outputs(applied.graph), feeds.slices)
    verified = replace(
        verified,
        sizes=loaded.sizes,
        kernels=loaded.kernels,
        apart=loaded.apart,
        random=not feeds.batches,
        samples=sample_count([inputs]),
        warnings=warnings,
    )
    return verified, Compared(feeds=inputs, got=got, wanted=wanted)


def with_mismatch(verified: Verified, pair: Pair, ran: Compared | None) -> Verified:
    """``verified`` with a note if the engine computes a quantized model wrongly."""
    if ran is None or pair.engine.emulates is not None or not pair.source.explains:
        return verified
    graph = pair.built.applied.graph
    return verified.noted(mismatch_of(pair.source, pair.engine, graph, ran.feeds, ran.wanted))


def _verified_in(pair: Pair, feeds: FeedMaker) -> Verified:
    verified, ran = run_both(pair, feeds)
    return with_mismatch(verified, pair, ran)


def _run_alone(pair: Pair, feeds: FeedMaker, why: str) -> Verified:
    """Load and run the converted model beside no fp32 model, for which memory is short.

    Raises:
        EngineError: If the engine cannot run it as it is planned.
    """
    graph = pair.built.applied.graph
    session, _ = pair.converted()
    check_marks(pair.built.plan, graph, session)
    lengths, ranges = next(_extremes(graph, feeds, pair.built.plan))
    given = feeds.draw(session.inputs, ranges, lengths)
    outputs = session.run(feeds_for(session, given))
    check_on_integers(pair.engine, pair.built.plan, pair.built.applied, given, session)
    verified = Verified(
        engine=pair.engine.label,
        note=f"fp32 was not run: {why}",
        sizes=_sizes(session, given),
        random=not feeds.batches,
    )
    nan = nan_outputs(outputs, "")
    return verified.noted("outputs have NaN on these inputs" if nan else "")


def _accept_on_one_thread(case: Case, got: Outputs) -> None:
    """Check that outputs on one thread are right, too, where they differ from ``got``.

    Engines have other kernels for fewer threads, and the user's machine may have fewer.

    Raises:
        WrongNumbersError: If the plan's formats do not explain them.
        EngineError: If the engine cannot run the model so.
    """
    session, _ = case.pair.converted()
    alone = session.run(feeds_for(session, case.feeds))
    del session
    same = matched(free_outputs(case.applied.graph), alone, got)
    if all(deviation(same.got[n], a).relative < NOTICED for n, a in same.wanted.items()):
        return
    reference, _ = case.pair.reference()
    wanted = reference.run(feeds_for(reference, case.feeds))
    try:
        accept(case, alone, {name: wanted[name] for name in got})
    except WrongNumbersError as error:
        raise WrongNumbersError(
            f"on one thread {error.what}",
            where=error.where,
            fix=error.fix,
            unfit=error.unfit,
        ) from error


def _followed(reference: Session, ran: ReferenceRun) -> Mapping[str, float]:
    """By how much the fp32 model's outputs change with other inputs; empty if unknown."""
    others = None if ran.feeds is None else resampled(ran.feeds)
    if others is None:
        return {}
    try:
        return change(ran.outputs, reference.run(others))
    except EngineError:
        return {}


def verify(
    source: Source,
    built: EngineBuilt,
    written: Loadable,
    on: VerifyOn,
    run: Callable[[Pair, FeedMaker], Verified] = _verified_in,
) -> Verified:
    """Load and run the fp32 model and ``written``, in the first engine that can.

    Args:
        source: The fp32 model.
        built: The model of a plan.
        written: The same model as it was written.
        on: The engines to try, and the inputs.
        run: Loads and runs both in one engine.

    Raises:
        WrongNumbersError: If its formats do not explain its outputs.
        EngineError: If no engine can run it.
    """
    if not on.engines:
        return Verified(engine=None, note="not run: no engine was asked to")
    on.feeds.check(source.input_shapes)
    failures: dict[str, EngineError] = {}
    for engine in on.engines:
        pair = Pair(source=source, built=built, written=written, engine=engine)
        try:
            verified = run(pair, on.feeds)
        except EngineError as error:
            failures[engine.name] = error
        else:
            decisions, hidden = _decided(pair, on)
            verified = replace(verified, decisions=decisions)
            return verified.noted(hidden, *crashes(failures))
    raise _not_verified(failures)


def _decided(pair: Pair, on: VerifyOn) -> tuple[tuple[Decisions, ...], str]:
    """The decisions inside the models, and a note if the engine does not show them."""
    try:
        return changed_decisions(pair, on.data), ""
    except EngineError as error:
        return (), f"decisions inside the model were not compared: {error.what}"


_MOST_POSITIONS: Final = 1 << 20
"""The most elements that such sizes may make of one channel: a run shall take seconds."""


class GivenModelError(EngineError):
    """An engine does not run the model as it was given, so that no conversion is at fault."""


@contextmanager
def as_given() -> Generator[None]:
    """Turn an EngineError inside into a GivenModelError."""
    try:
        yield
    except EngineError as error:
        raise GivenModelError(error.what, where=error.where, fix=error.fix) from error


def _not_verified(failures: Mapping[str, EngineError]) -> EngineError:
    """The error where every engine failed to verify a conversion; ``failures`` by name."""
    unconverted = {n for n, error in failures.items() if isinstance(error, GivenModelError)}
    every = unconverted == set(failures)
    remarks = dict.fromkeys(() if every else unconverted, ", even as it was given")
    where = "; ".join(
        f"{title_of(n)}{remarks.get(n, '')}: {e.what}" for n, e in failures.items()
    )
    if every:
        fix = what_loads_it(failures)
        unverified = "write the conversion unverified with --no-verify"
        return GivenModelError(
            "no engine here can run the model as it was given, before any conversion",
            where=where,
            fix=f"{fix}; or {unverified}" if fix else unverified,
        )
    fixes = [error.fix for error in failures.values()]
    alone = fixes[0] if len(fixes) == 1 else AS_IR if AS_IR in fixes else ""
    return EngineError(
        "no engine here can run the converted model",
        where=where,
        fix=f"{alone or 'choose another format or engine'}, or write it unverified with"
        " --no-verify",
        unfit=next((e.unfit for e in failures.values() if e.unfit), {}),
    )


@contextmanager
def staged_model(output: Destination, name: str) -> Generator[Path]:
    """A path in a temporary folder, whose files take their names after the block.

    The path has the name of the output; ``name`` for a model in memory, which is not kept.
    Data are there before the model that names them.

    Raises:
        UsageError: If a file may not be written.
    """
    place = None if output.path is None else output.path.parent
    with staging(place) as folder:
        staged = folder / (name if output.path is None else output.path.name)
        yield staged
        if place is not None:
            parts = sorted(folder.iterdir(), key=lambda part: part == staged)
            for part in parts:
                check_writable(place / part.name, force=output.force)
            _publish(parts, place, str(output.path))


def _publish(parts: Sequence[Path], place: Path, where: str) -> None:
    """Move staged files to their place, in this order: data before the model that names it.

    Raises:
        UsageError: If one cannot be moved; earlier files are then put back.
    """
    done: list[tuple[Path, Path | None]] = []
    with writing(where):
        try:
            for part in parts:
                target, backup = place / part.name, part.with_name(f"{part.name}.before")
                kept = target.replace(backup) if target.exists() else None
                done.append((target, kept))
                part.replace(target)
        except OSError:
            for target, kept in reversed(done):
                target.unlink(missing_ok=True)
                if kept is not None:
                    kept.rename(target)
            raise


def _sizes(session: Session, feeds: Feeds) -> dict[str, int]:
    """Sizes of the inputs' named free dimensions in ``feeds``."""
    return {
        dim: size
        for spec in session.inputs
        if spec.name in feeds
        for dim, size in zip(spec.shape or (), feeds[spec.name].shape, strict=False)
        if isinstance(dim, str) and dim
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A run of the fp32 model, with which a converted one is compared.

    Attributes:
        feeds: The inputs; None if it was not run.
        outputs: Its outputs by name.
        sizes: Sizes of the inputs' named free dimensions.
        note: Why it was not run; else empty.
    """

    feeds: Feeds | None = None
    outputs: Mapping[str, Array] = field(default_factory=dict[str, Array])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    note: str = ""


def reference_run(
    reference: Session,
    feeds: FeedMaker,
    graph: Graph,
    second: SecondOpinion,
    plan: Plan,
) -> ReferenceRun:
    """Run the fp32 model on the first feeds that it takes.

    Where sizes of random feeds are guessed, or bodies hide them, the feeds run in ``second``
    before, which refuses sizes that do not fit: OpenVINO may read beyond an array instead.

    Raises:
        UsageError: If no feeds can be made with the sizes that the user gave.
        EngineError: If the fp32 model does not run on the user's data, or on any.
    """
    remedy = _remedy(reference)
    note = f"loaded, not run: {remedy} to compare outputs"
    hidden = any(node.region for node in graph.nodes) or guessed_dims(input_specs(graph))
    careful = second.session if hidden and not feeds.batches else None
    for lengths, ranges in _extremes(graph, feeds, plan):
        try:
            given = feeds.draw(reference.inputs, ranges, lengths)
        except UsageError as error:
            if feeds.dims:
                raise
            note = f"loaded, not run: {error.what}: {error.fix}"
            continue
        try:
            if careful is not None:
                careful.run(feeds_for(careful, given))
            outputs = reference.run(given)
            if nan_outputs(outputs, "") and (others := without_masks(ranges)) != ranges:
                # It has no numbers where all is masked, and NaN would hide all else.
                given = feeds.draw(reference.inputs, others, lengths)
                outputs = reference.run(given)
            given, outputs = _with_more_steps(reference, given, outputs)
        except EngineError as error:
            if feeds.batches or isinstance(error, NoKernelError):  # other feeds do not help
                raise
            # The fp32 model refuses these feeds: they say nothing about the converted one.
            note = f"loaded, not run: {error.what}: {remedy}"
            continue
        if feeds.batches or any(array.size for array in outputs.values()):
            return ReferenceRun(feeds=given, outputs=outputs, sizes=_sizes(reference, given))
        note = f"loaded, nothing was compared: outputs are empty on random inputs: {remedy}"
    return ReferenceRun(note=note)


# The first step of a sequence has an empty state, the second reads what the first one stored,
# and the third what a step stored that read a state.
_STEPS: Final = 3


def _with_more_steps(
    reference: Session, given: Feeds, outputs: Mapping[str, Array]
) -> tuple[Feeds, Mapping[str, Array]]:
    """Feeds of a sequence, if the model keeps a state and takes the same feeds again.

    What an op does with a state does not show while the state is empty.
    """
    if not reference.keeps_state or isinstance(given, Steps):
        return given, outputs
    sequence = Steps([given] * _STEPS)
    try:
        return sequence, reference.run(sequence)
    except EngineError:
        return given, outputs


def _remedy(reference: Session) -> str:
    """What a user can do if random feeds do not run: give data, or the sizes of dimensions."""
    free = [
        dim or f"{spec.name}.{axis}"
        for spec in reference.inputs
        for axis, dim in enumerate(spec.shape or ())
        if not isinstance(dim, int)
    ]
    sized = " ".join(
        f"--dim {name}=SIZE" for name in guessed_dims(reference.inputs) or free[:1]
    )
    return "give --data" + (f", or sizes by {sized}" if sized else "")


def _extremes(
    graph: Graph, feeds: FeedMaker, plan: Plan
) -> Iterator[tuple[dict[str, int], Mapping[str, Range]]]:
    """Lengths and ranges of random feeds, to be tried until the fp32 model runs.

    First lengths up to the ends of tables of positions, less 2 where positions start at 2 as
    in RoBERTa; then small ones, which a model may need for a reason that the graph hides, and
    larger ones (see ``data/sizes``).
    """
    if feeds.batches:  # data is taken as it is
        yield {}, {}
        return
    ranges = input_ranges(graph) | _within_scales(graph, plan)
    limits = length_limits(graph)
    for spare in (0, 2):
        lengths = {name: max(rows - spare, 1) for name, rows in limits.items()}
        if lengths:
            most = affordable(lengths, graph)
            together = [*cached_lengths(graph, feeds.dims, most)]
            yield from ((sizes, ranges) for sizes in together or [most])
    inputs = input_specs(graph)
    for number, sizes in enumerate(size_guesses(graph, feeds.dims)):
        if number == 0 or _positions(inputs, sizes) <= _MOST_POSITIONS:
            yield sizes, ranges
        if number == 0 and ranges:
            yield sizes, {}


_DEVIATIONS: Final = 3.0
"""Half a range that scales cover, in deviations: one in 400 numbers is beyond it."""


def _within_scales(graph: Graph, plan: Plan) -> dict[str, Range]:
    """Numbers that the plan's scales of inputs cover, by the inputs' names.

    Scales are those of the data that the plan was made on. What is far beyond them saturates,
    and says nothing of the plan's formats.
    """
    ranges: dict[str, Range] = {}
    encodings = plan.encodings
    for node in graph.nodes:
        for index, encoding in encodings.get(node.name, Encodings()).operands.items():
            value = node.inputs[index]
            if value is None or not graph.values[value].is_input:
                continue
            if isinstance(encoding, Scaled) and len(encoding.scale) == 1:
                low, high = (float(end.item()) for end in encoding.range)
                ranges[graph.values[value].name] = Normal(
                    mean=np.asarray((low + high) / 2),
                    deviation=np.asarray((high - low) / (2 * _DEVIATIONS)),
                )
    return ranges


def _positions(inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    """The most elements of one channel of an input, where its sizes are free."""
    element_counts = [
        math.prod(
            sizes.get(f"{spec.name}.{axis}", sizes.get(dim or "", 1))
            for axis, dim in enumerate(spec.shape or ())
            if axis and not isinstance(dim, int)
        )
        for spec in inputs
    ]
    return max(element_counts, default=1)
