"""Verifying converted models of a library with one engine, by runs beside the fp32 model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from finecast.engines import EMULATOR
from finecast.engines.base import Array, Engine, Loadable, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.emulator.native_session import plan_session
from finecast.engines.loading import exact_session
from finecast.frontends.roundable import with_roundings
from finecast.pipeline.artefact import Verified, compare
from finecast.pipeline.sources import FeedMaker
from finecast.subjects.engine.acceptance import Case, accept, feeds_for
from finecast.subjects.engine.integers import check_on_integers
from finecast.subjects.engine.native import EngineBuilt, RoundableSource
from finecast.subjects.engine.publishing import (
    as_given,
    reference_run,
    verified_by_first,
)


def verify(
    source: RoundableSource,
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
    return verified_by_first(engines, lambda e: _verify_in(source, built, written, e, feeds))


def _verify_in(
    source: RoundableSource,
    built: EngineBuilt,
    written: Loadable,
    engine: Engine,
    feeds: FeedMaker,
) -> Verified:
    plan, graph = built.plan, built.applied.graph
    copy = partial(source.roundable, plan.policy, plan.adjustments)
    emulated = isinstance(engine, EmulatorEngine)
    name = f"{EMULATOR}:{engine.device}" if emulated else engine.name
    # A device may have no fp32 products of its own: its emulator is compared with exact fp32.
    with as_given():
        reference = source.reference() if emulated else engine.load(source.loadable)
        ran = reference_run(reference, feeds, graph)
    del reference  # one large model at a time
    session: Session
    if isinstance(engine, EmulatorEngine):
        source.runners(None)[0].load(written)  # raises EngineError if it does not load
        session = plan_session(copy, plan, engine.emulation)
    else:
        session = engine.load(written)
    given, wanted = ran.feeds, ran.outputs
    if given is None:
        return Verified(engine=name, note=ran.note)
    got = session.run(feeds_for(session, given))
    del session
    if not emulated:
        check_on_integers(engine, plan, built.applied, given)

    def by_formats() -> Mapping[str, Array]:
        """The outputs that the formats alone explain: roundings by arithmetic in fp32."""
        return exact_session(with_roundings(copy(), built.applied.edits)).run(given)

    ids = {n.name: n.id for n in graph.nodes}
    case = Case(
        engine=engine,
        applied=built.applied,
        original=lambda: source.build(replace(plan, decisions=(), io={})).applied,
        formats={ids[n]: f for n, f in plan.formats.items()},
        feeds=given,
        random=not feeds.batches,
        exact=lambda nudged: source.reference().run(nudged),
        emulated=None if emulated else by_formats,
    )
    accept(case, got, wanted)
    found = compare(name, [got[output] for output in wanted], list(wanted.values()))
    return replace(found, sizes=ran.sizes, random=not feeds.batches)
