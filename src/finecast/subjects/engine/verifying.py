"""Verifying converted models with one engine, by runs beside the fp32 model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from finecast.data.deviation import NOTICED, deviation
from finecast.data.response import change, resampled
from finecast.engines.base import Array, Engine, Feeds, Loadable, Session
from finecast.engines.emulator.native_session import plan_session
from finecast.engines.fallen_apart import Kernels, broken_by, load_with_kernels
from finecast.engines.loading import exact_session
from finecast.errors import EngineError, WrongNumbersError
from finecast.frontends.prepared import AppliedModel
from finecast.frontends.roundable import with_roundings
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.pipeline.artefact import Verified, compare
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.subjects.engine.acceptance import Case, accept, feeds_for
from finecast.subjects.engine.by_hint import check_marks
from finecast.subjects.engine.integers import check_on_integers
from finecast.subjects.engine.native import EngineBuilt, Source
from finecast.subjects.engine.publishing import (
    ReferenceRun,
    as_given,
    reference_run,
    verified_by_first,
)

Outputs: TypeAlias = Mapping[str, Array]
# Loads a model in an engine, and tells the nodes in each of its kernels, if the engine does.
Load: TypeAlias = Callable[[Engine], tuple[Session, Kernels]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An fp32 model and the model that a plan makes of it, both to run in one engine.

    Attributes:
        engine: The engine.
        plan: The plan.
        applied: What the plan made.
        reference: Loads the fp32 model in an engine.
        converted: Loads the plan's model in an engine.
        original: Makes the model in which the plan lowers nothing.
        exact: Gives the fp32 model's outputs by the definitions of its ops.
        fp32: What the engine loads for the fp32 model.
        emulated: Gives the outputs that the formats of a plan alone explain; None where nobody
            can.
        careful: Loads the fp32 model where sizes that do not fit are refused, to try random
            feeds there first; None if the engine itself refuses them.
    """

    engine: Engine
    plan: Plan
    applied: AppliedModel
    reference: Load
    converted: Load
    original: Callable[[], AppliedModel]
    exact: Callable[[Feeds], Outputs]
    fp32: Loadable
    emulated: Callable[[Plan, Feeds], Outputs] | None
    careful: Callable[[], Session | None] | None = None


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
    engine, plan, applied = pair.engine, pair.plan, pair.applied
    emulated, name = engine.emulates is not None, engine.label
    with as_given():
        reference, before = pair.reference(engine)
        careful = pair.careful() if pair.careful is not None else None
        ran = reference_run(reference, feeds, applied.graph, careful)
    followed = _followed(reference, ran)
    del reference, careful  # one large model at a time
    session, after = pair.converted(engine)
    check_marks(plan, applied.graph, session)
    seen = Verified(
        engine=name,
        note=ran.note,
        sizes=ran.sizes,
        kernels=(len(before), len(after)) if before and after else None,
        apart=tuple(one.text for one in broken_by(plan, before, after)),
    )
    given, wanted = ran.feeds, ran.outputs
    if given is None:
        return seen, None
    got = session.run(feeds_for(session, given))
    del session
    if not emulated:
        check_on_integers(engine, plan, applied, given)
    ids = {n.name: n.id for n in applied.graph.nodes}
    explained = pair.emulated
    case = Case(
        engine=engine,
        applied=applied,
        original=pair.original,
        formats={ids[n]: f for n, f in plan.formats.items()},
        feeds=given,
        exact=pair.exact,
        emulated=None if explained is None or emulated else partial(explained, plan, given),
        random=not feeds.batches,
        followed=followed,
        usual=partial(_usual, pair, given),
    )
    warnings = accept(case, got, wanted)
    alone = engine.on_one_thread()
    if alone is not None:
        _accept_on_one_thread(pair, case, alone, got)
    found = compare(name, got, wanted)
    found = replace(
        found,
        sizes=seen.sizes,
        kernels=seen.kernels,
        apart=seen.apart,
        random=not feeds.batches,
        warnings=warnings,
    )
    return found, Compared(feeds=given, got=got, wanted=wanted)


def _accept_on_one_thread(pair: Pair, case: Case, engine: Engine, got: Outputs) -> None:
    """Check that outputs on one thread are right, too, where they differ from ``got``.

    Engines have other kernels for fewer threads, and the user's machine may have fewer.

    Raises:
        WrongNumbersError: If the plan's formats do not explain them.
        EngineError: If the engine cannot run the model so.
    """
    session = pair.converted(engine)[0]
    alone = session.run(feeds_for(session, case.feeds))
    del session
    if all(deviation(alone[name], array).relative < NOTICED for name, array in got.items()):
        return
    reference = pair.reference(engine)[0]
    wanted = reference.run(feeds_for(reference, case.feeds))
    try:
        accept(replace(case, engine=engine), alone, {name: wanted[name] for name in got})
    except WrongNumbersError as error:
        raise WrongNumbersError(
            f"on one thread {error.what}", where=error.where, fix=error.fix
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


def _usual(pair: Pair, feeds: Feeds) -> tuple[str, Outputs] | None:
    """What the fp32 model gives if it is lowered in the usual way, and what that is called.

    The engine's own hint is one; where it has none, products alone in the plan's formats.
    """
    with suppress(EngineError):
        hinted = _under_hint(pair, feeds)
        if hinted is not None:
            return hinted
    if pair.emulated is None:
        return None
    with suppress(EngineError):
        outputs = pair.emulated(_products_of(pair.plan), feeds)
        return "the model with its products alone lowered", outputs
    return None


def _under_hint(pair: Pair, feeds: Feeds) -> tuple[str, Outputs] | None:
    """The fp32 model's outputs under the engine's hint for the plan's format, and its name."""
    engine, lows = pair.engine, pair.plan.low_formats
    if not engine.lowers_by_hint or len(lows) != 1:
        return None
    (low,) = lows
    session = engine.load_hinted(pair.fp32, low)
    if all(kernel.computed != low.label for kernel in session.kernel_formats()):
        return None
    name = f"{engine.name}'s own {low.label} hint"
    return name, session.run(feeds_for(session, feeds))


def _products_of(plan: Plan) -> Plan:
    """``plan`` with all but its matrix products in fp32."""
    decisions = tuple(
        d if by_name(d.op).matmul_engine else replace(d, format=Format.FP32)
        for d in plan.decisions
    )
    return replace(plan, decisions=decisions, by_hint=False)


def verify(
    source: Source,
    built: EngineBuilt,
    written: Loadable,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> Verified:
    """Load and run the fp32 model and ``written``, in the first engine that can.

    Args:
        source: The fp32 model.
        built: The model of a plan.
        written: The same model as it was written.
        engines: Engines to try; none to leave it unverified.
        feeds: Makes the inputs of both.

    Raises:
        WrongNumbersError: If its formats do not explain its outputs.
        EngineError: If no engine can run it.
    """
    if engines:
        feeds.check(source.input_shapes)

    def verify_in(engine: Engine) -> Verified:
        return run_both(_pair(source, built, written, engine), feeds)[0]

    return verified_by_first(engines, verify_in)


def _pair(source: Source, built: EngineBuilt, written: Loadable, engine: Engine) -> Pair:
    """The pair for a library whose models an emulator runs with roundings put into them."""
    plan = built.plan
    copy = partial(source.roundable, plan.policy, plan.adjustments)

    def reference(engine: Engine) -> tuple[Session, Kernels]:
        # A device may have no fp32 products of its own: it is compared with exact fp32.
        if engine.emulates is not None:
            return source.reference(), ()
        return load_with_kernels(engine, source.loadable)

    def converted(engine: Engine) -> tuple[Session, Kernels]:
        if engine.emulates is not None:
            source.runners(None)[0].load(written)  # raises EngineError if it does not load
            return plan_session(copy, plan, engine.emulates), ()
        return load_with_kernels(engine, written)

    def emulated(of: Plan, given: Feeds) -> Outputs:
        edits = (built if of == plan else source.build(of)).applied.edits
        return exact_session(with_roundings(copy(), edits)).run(given)  # by arithmetic in fp32

    return Pair(
        engine=engine,
        plan=plan,
        applied=built.applied,
        reference=reference,
        converted=converted,
        original=lambda: source.build(replace(plan, decisions=(), io={})).applied,
        exact=lambda given: source.reference().run(given),
        fp32=source.loadable,
        emulated=emulated,
    )
