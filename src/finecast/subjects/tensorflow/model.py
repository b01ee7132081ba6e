"""A SavedModel or a Keras model, opened: each verb's work on it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from finecast.data.feeds import last_indices, synthetic_feeds
from finecast.devices.emulation import Emulation
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.engines.probe import speed_of
from finecast.engines.tensorflow import NAME, TensorFlowEngine
from finecast.errors import EngineError, ModelError, UsageError
from finecast.files import check_writable_folder, digest, folder_bytes, folder_files
from finecast.frontends.tensorflow import FrozenModel, capture
from finecast.frontends.tensorflow.loading import GRAPH_FILE, load, load_keras, of_keras
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.artefact import Destination, Verified
from finecast.pipeline.census import Census, risks
from finecast.pipeline.conversion import NOTHING_CONVERTED, NOTHING_GAINS, Conversion
from finecast.pipeline.model import RunOptions
from finecast.pipeline.modelled import fastest_plan
from finecast.pipeline.narrowing import worthwhile
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.program import Program
from finecast.pipeline.roundings import analysis_of, find_units, free
from finecast.pipeline.sources import calibration_batches
from finecast.pipeline.subject import Subject
from finecast.pipeline.workload import Workload
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope
from finecast.subjects import check_options
from finecast.subjects.tensorflow import artefact
from finecast.subjects.tensorflow.observing import observe, shapes_on
from finecast.subjects.tensorflow.planning import make_planner, measured_cost, profile_ends
from finecast.subjects.tensorflow.source import TensorFlowBuilt, TensorFlowSource, told
from finecast.subjects.tensorflow.subject import TensorFlowSubject

_DIGITS: Final = 16


def read(path: Path, *, trust: bool = False) -> TensorFlowModel:
    """The function that a SavedModel serves, or the Keras model in a ``.keras`` file.

    Code that a ``.keras`` file brings runs only with ``trust``; a SavedModel brings none.

    Raises:
        UsageError: If there is none, or there is nothing to trust.
        ModelError: If it cannot be read.
    """
    if path.suffix.lower() == ".keras":
        return TensorFlowModel(
            captured=capture(of_keras(load_keras(path, trust=trust)), digest(path)),
            name=str(path),
            size_bytes=path.stat().st_size,
            path=path,
        )
    if trust:
        raise UsageError(
            "--trust is for .pt2 and .keras files", where=str(path), fix="leave it out"
        )
    model = load(path)
    parts = folder_files(path, leave_out=("fingerprint.pb",))
    return TensorFlowModel(
        captured=capture(model, digest(*parts)),
        name=str(path),
        size_bytes=folder_bytes(path),
        path=path,
    )


def take(model: Any) -> TensorFlowModel:
    """A Keras model, or what was read.

    Raises:
        UsageError: If it is no model that says what it takes.
    """
    if isinstance(model, FrozenModel):
        return of_frozen(model, "model")
    if any(base.__name__ == "Session" for base in type(model).__mro__):
        raise UsageError(
            "a session of TensorFlow 1 is no model",
            fix="save it with tf.compat.v1.saved_model.simple_save, and give that folder",
        )
    if hasattr(model, "layers") and hasattr(model, "export"):
        return of_frozen(of_keras(model), model.name)
    raise UsageError(
        f"a {type(model).__name__} is not a model that finecast converts",
        fix="give a Keras model, or the folder that tf.saved_model.save wrote",
    )


def of_frozen(model: FrozenModel, name: str) -> TensorFlowModel:
    """A model in memory."""
    content = model.graph.SerializeToString(deterministic=True)
    found = hashlib.sha256(content).hexdigest()[:_DIGITS]
    return TensorFlowModel(
        captured=capture(model, found),
        name=name,
        size_bytes=model.size_bytes,
        path=Path(f"{name}.keras"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowModel(TensorFlowSource):
    """A SavedModel or a Keras model, opened."""

    path: Path
    external: tuple[Path, ...] = ()

    def taken(self, from_type: str) -> TensorFlowModel:
        """Refused: a model is saved in fp32 instead."""
        check_options(self.path, {"--from-type": from_type})
        raise UsageError("--from-type does not apply to Keras models", fix="leave it out")

    def check(self, output: Destination) -> None:
        """Raise UsageError unless a folder may be written there."""
        if output.external_data is not None:
            raise UsageError(
                "--external-data/--one-file does not apply to SavedModels", fix="leave it out"
            )
        if output.path is not None:
            check_writable_folder(output.path, GRAPH_FILE, force=output.force)

    def reference(self) -> Session:
        """In TensorFlow."""
        return TensorFlowEngine().open(self.model)

    def program(self, emulation: Emulation) -> Program:
        """Refused."""
        raise _not_elsewhere(self.name, emulation)

    def subject(self, engine: str | None, device: Emulation | None) -> Subject:
        """In TensorFlow, on this machine."""
        if device is not None:
            raise _not_elsewhere(self.name, device)
        chosen = _engine(engine)
        return TensorFlowSubject(model=self, engine=chosen, reference=chosen.open(self.model))

    def convert(self, output: Destination, policy: Policy, options: RunOptions) -> Conversion:
        """Verified on the data's first batch, else on random feeds."""
        start = time.perf_counter()
        self.check(output)
        self.check_policy(policy)
        engine = self._engine(options)
        rules = tuple(options.user_rules.items())
        policy, left_out = worthwhile(policy, lambda f: speed_of(engine, f), rules)
        batches = self._batches(options)
        feeds = self._feeds(batches, options)
        facts = observe(self.captured, lambda: batches) if batches else {}
        planner = make_planner(self.captured, policy, engine, facts=facts, user_rules=rules)
        plan = planner.lowest()
        if policy.scope is Scope.AUTO and planner.is_free:
            plan = self._fastest(planner, engine, self._drawn(batches, options), facts)
        built = self.build(plan)
        done = self._write(built, output, feeds, start)
        notes = (*left_out, *told(self.captured, policy))
        if policy.scope is not Scope.NONE and not built.applied.edits:
            gained = planner.lowest().lowers
            notes = (*notes, NOTHING_GAINS if gained else NOTHING_CONVERTED)
        return replace(done, warnings=notes)

    def _fastest(
        self,
        planner: Planner,
        engine: TensorFlowEngine,
        feeds: Feeds,
        facts: dict[int, ValueFacts],
    ) -> Plan:
        """The fastest plan that the rules allow, by profiles."""
        profiles = profile_ends(self.captured, planner, engine, feeds)
        units, points = find_units(planner, profiles)
        seen = facts or observe(self.captured, lambda: [feeds])
        cost = measured_cost(planner.graph, profiles, engine, seen)
        return fastest_plan(planner, analysis_of(planner, units, points, free(points), cost))

    def apply(self, output: Destination, plan: Plan, options: RunOptions) -> Conversion:
        """Verified as a converted model is."""
        start = time.perf_counter()
        self.check(output)
        self._engine(options)
        built = self.build(plan)
        plan.check_complete(self.captured.graph, where=self.name)
        feeds = self._feeds(self._batches(options), options)
        return self._write(built, output, feeds, start)

    def _write(
        self, built: TensorFlowBuilt, output: Destination, feeds: Feeds | None, start: float
    ) -> Conversion:
        size, verified = artefact.write(self, built, output, feeds)
        return Conversion(
            plan=built.plan,
            nodes=len(self.captured.graph.nodes),
            casts=built.casts,
            size_bytes=(self.size_bytes, size),
            seconds=time.perf_counter() - start,
            verified=verified,
            model=built.model if output.path is None else None,
        )

    def write(
        self, outcome: Outcome, output: Destination, subject: Subject, workload: Workload
    ) -> tuple[int, Verified]:
        """Verified on the feeds that were timed."""
        assert isinstance(outcome.built, TensorFlowBuilt)
        return artefact.write(self, outcome.built, output, workload.timing()[0])

    def census(self, options: RunOptions, low: Format) -> Census:
        """Shapes are those observed on data, else on one random batch where it runs."""
        graph = self.captured.graph
        if options.data is None:
            shapes = self._random_shapes(options)
            return Census.of(graph, shapes, name=self.name, size_bytes=self.size_bytes)
        batches = self._batches(options)
        facts = observe(self.captured, lambda: batches)
        shapes = {i: f.shape for i, f in facts.items()}
        size = self.size_bytes
        found = Census.of(graph, shapes, facts, name=self.name, size_bytes=size)
        return replace(found, warnings=risks(graph, facts, low))

    def _random_shapes(self, options: RunOptions) -> dict[int, tuple[int, ...]]:
        try:
            return shapes_on(self.captured, self._drawn((), options))
        except (EngineError, UsageError):
            if options.dims:
                raise
            return {}  # the table shows what can be told without them

    def judge(self, policy: Policy, options: RunOptions) -> tuple[Graph, Plan]:
        """With data the rules see the ranges that values have."""
        self.check_policy(policy)
        engine = self._engine(options)
        rules = tuple(options.user_rules.items())
        policy, _ = worthwhile(policy, lambda f: speed_of(engine, f), rules)
        batches = self._batches(options)
        facts = observe(self.captured, lambda: batches) if batches else {}
        planner = make_planner(self.captured, policy, engine, facts=facts, user_rules=rules)
        return self.captured.graph, planner.lowest()

    def graph_for(self, plan: Plan) -> Graph:
        """The graph that was read."""
        self.build(plan)
        plan.check_complete(self.captured.graph, where=self.name)
        return self.captured.graph

    def _engine(self, options: RunOptions) -> TensorFlowEngine:
        if options.device is not None:
            raise _not_elsewhere(self.name, options.device)
        return _engine(options.engine)

    def _batches(self, options: RunOptions) -> list[Feeds]:
        if options.data is None:
            return []
        return calibration_batches(self.reference(), options.data)

    def _feeds(self, batches: Sequence[Feeds], options: RunOptions) -> Feeds | None:
        """What verifies; None where nothing is to."""
        return self._drawn(batches, options) if options.verify else None

    def _drawn(self, batches: Sequence[Feeds], options: RunOptions) -> Feeds:
        """The first batch, else a random one."""
        if batches and options.dims:
            raise UsageError(
                "--dim sizes random feeds, and data is given", where="--dim", fix="drop one"
            )
        if batches:
            return batches[0]
        last = last_indices(self.captured.graph)
        inputs = self.reference().inputs
        return synthetic_feeds(inputs, batch=options.batch, dims=options.dims, last=last)


def _engine(name: str | None) -> TensorFlowEngine:
    engine = get_engine(name or NAME)
    if not isinstance(engine, TensorFlowEngine):
        raise UsageError(
            f"engine {engine.name!r} reads ONNX files, and the output is a SavedModel",
            where="--engine",
            fix="leave it out",
        )
    return engine


def _not_elsewhere(model: str, device: Emulation) -> ModelError:
    return ModelError(
        f"a SavedModel is not emulated on {device.target.name}",
        where=model,
        fix="export it to ONNX, and give that file",
    )
