"""Writing converted IR: loaded and run before it takes its name.

Law: at the output path there is either nothing new or IR that OpenVINO loads; neither of its
two files is there without the other, and nothing half-written stays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from finecast.engines import EMULATOR
from finecast.engines.base import Array, Engine, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.emulator.openvino_session import plan_session
from finecast.engines.loading import exact_session
from finecast.errors import EngineError, UsageError, naming
from finecast.files import check_writable
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino import OvApplied, OvFile
from finecast.frontends.openvino.model import IR_SUFFIX, WEIGHTS_SUFFIX
from finecast.pipeline.artefact import Destination, Verified, compared
from finecast.pipeline.sources import FeedMaker
from finecast.planning.plan import Plan
from finecast.subjects.engine.acceptance import Case, accept, feeds_for
from finecast.subjects.engine.integers import check_on_integers
from finecast.subjects.engine.publishing import publish, reference_run, sizes_of


def write(
    file: OvFile,
    plan: Plan,
    applied: OvApplied,
    output: Destination,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> tuple[int, Verified]:
    """Put the model at its destination; returns its bytes on disk and how it was verified.

    Raises:
        UsageError: If the output cannot be written.
        WrongNumbersError: If its formats do not explain what it gives.
        EngineError: If no engine can run it.
    """
    check_output(output)
    place = output.path.parent if output.path is not None else None
    with tempfile.TemporaryDirectory(dir=place, prefix=".finecast-") as folder:
        staged = Path(folder) / (output.path.name if output.path is not None else "model.xml")
        with naming(staged, f"{file.name}, converted"):
            size = frontend.save(applied.model, staged)
            verified = _verified(file, plan, applied, staged, engines, feeds)
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


def _verified(
    file: OvFile,
    plan: Plan,
    applied: OvApplied,
    path: Path,
    engines: Sequence[Engine],
    feeds: FeedMaker,
) -> Verified:
    """Load and run the fp32 model and the one at ``path`` in the first engine that can."""
    if not engines:
        return Verified(engine=None, note="not run: no engine was asked to")
    feeds.check(frontend.input_shapes(file.model))
    failures: list[str] = []
    for engine in engines:
        try:
            return _verified_in(file, plan, applied, path, engine, feeds)
        except EngineError as error:
            failures.append(f"{engine.name}: {error.what}")
    raise EngineError(
        "no engine here can run the converted model",
        where="; ".join(failures),
        fix="choose another format, or write it unverified with --no-verify",
    )


def _verified_in(
    file: OvFile,
    plan: Plan,
    applied: OvApplied,
    path: Path,
    engine: Engine,
    feeds: FeedMaker,
) -> Verified:
    emulated = isinstance(engine, EmulatorEngine)
    name = f"{EMULATOR}:{engine.device}" if emulated else engine.name
    # A device may have no fp32 products of its own: its emulator is held against fp32.
    reference = exact_session(file.model) if emulated else engine.load(file.model)
    given, wanted, note = reference_run(reference, feeds, applied.graph)
    sizes = {} if given is None else sizes_of(reference, given)
    del reference  # one large model at a time
    session: Session
    if isinstance(engine, EmulatorEngine):
        exact_session(path)  # it loads, whatever the device gives
        session = plan_session(file.model, applied.graph, plan, engine.emulation)
    else:
        session = engine.load(path)
    if given is None or note:
        return Verified(engine=name, note=note)
    got = session.run(feeds_for(session, given))
    del session
    if not emulated:
        check_on_integers(engine, plan, applied, given)

    def elsewhere() -> Mapping[str, Array]:
        """The plan's roundings by arithmetic in fp32: what its formats alone give."""
        return exact_session(frontend.emulated(file, plan)).run(given)

    ids = {n.name: n.id for n in applied.graph.nodes}
    accept(
        Case(
            engine=engine,
            applied=applied,
            original=lambda: frontend.apply(file, replace(plan, decisions=(), io={})),
            formats={ids[n]: f for n, f in plan.formats.items()},
            feeds=given,
            exact=lambda nudged: exact_session(file.model).run(nudged),
            emulated=None if emulated else elsewhere,
        ),
        got,
        wanted,
    )
    found = compared(name, list(got.values()), list(wanted.values()))
    return replace(found, sizes=sizes)
