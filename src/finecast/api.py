"""The Python API: the command line's power with Python objects.

import finecast

model = finecast.load("model.onnx")
finecast.convert(model, "low.onnx", policy="all:bf16")
outcome = finecast.tune(model, "tuned.onnx", data="data.npz", metric="top1")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finecast.engines import ENGINES, default_engine, get_engine, installed
from finecast.engines.base import Engine, Feeds, Session
from finecast.errors import EngineError, UsageError
from finecast.facts import ValueFacts
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.graph import Graph
from finecast.measure.census import Census, count_classes, notes, risks
from finecast.measure.criterion import Criterion, CriterionKind
from finecast.measure.data import Dataset, load_npz
from finecast.measure.feeds import synthetic_feeds
from finecast.measure.metrics import get_metric
from finecast.measure.observe import observe
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.tune import conversion
from finecast.tune.analysis import make_planner
from finecast.tune.artefact import FeedMaker
from finecast.tune.conversion import Conversion
from finecast.tune.study import Study
from finecast.tune.tuning import Outcome, Verdict
from finecast.tune.tuning import tune as _tune
from finecast.tune.workload import (
    CalibrationFunction,
    DataWorkload,
    EvalFunction,
    FunctionWorkload,
    Workload,
)

__all__ = [
    "DataOptions",
    "apply",
    "convert",
    "graph_for",
    "inspect",
    "judge",
    "load",
    "tune",
    "workload_of",
]

DEFAULT_BATCH = 32
CALIBRATION_SAMPLES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Where evaluation and calibration data come from.

    Either ``data`` and ``metric``, or ``evaluate``. ``calib`` is an npz without labels or a
    function that yields feeds; without it the first samples of ``data`` calibrate.
    """

    data: Path | None = None
    labels: str | None = None
    metric: str | None = None
    evaluate: EvalFunction | None = None
    evaluate_name: str = ""
    calib: Path | CalibrationFunction | None = None
    batch: int = DEFAULT_BATCH
    lower_is_better: bool = False


def load(path: str | Path) -> OnnxFile:
    """Read an ONNX model; external data stays on disk.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is not a complete ONNX model.
    """
    return frontend.load(Path(path))


def convert(
    model: OnnxFile | str | Path,
    output: str | Path,
    policy: Policy | str = "all:bf16",
    *,
    engine: str | None = None,
    data: str | Path | None = None,
    dims: Mapping[str, int] | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    verify: bool = True,
    force: bool = False,
) -> Conversion:
    """Convert a model by a policy, verify it in an engine, and write it.

    Args:
        model: The model, or its path.
        output: Where the converted model goes.
        policy: ``SCOPE:FORMAT`` or a Policy.
        engine: ``NAME[:DEVICE]``; by default the first installed one that runs the model.
        data: An npz with the model's inputs: its ranges guide the rules, its first batch
            verifies. Without it random feeds verify.
        dims: Sizes of free dimensions, for random feeds.
        user_rules: Rule functions by name.
        verify: Whether the model has to load and run before it is written.
        force: Whether an existing output may be replaced.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    file = model if isinstance(model, OnnxFile) else load(model)
    batches = _batches(file, Path(data), None, engine) if data is not None else []
    return conversion.convert(
        file,
        Path(output),
        Policy.parse(policy) if isinstance(policy, str) else policy,
        engines(engine),
        feeds=_feed_maker(batches, dims),
        data=batches,
        user_rules=tuple((user_rules or {}).items()),
        verify=verify,
        force=force,
    )


def apply(
    plan: Plan | str | Path,
    model: OnnxFile | str | Path,
    output: str | Path,
    *,
    engine: str | None = None,
    dims: Mapping[str, int] | None = None,
    verify: bool = True,
    force: bool = False,
) -> Conversion:
    """Write the model that a plan gives.

    Raises:
        FinecastError: If the plan was made for another model, or as for ``convert``.
    """
    file = model if isinstance(model, OnnxFile) else load(model)
    given = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    return conversion.replay(
        file,
        given,
        Path(output),
        engines(engine),
        feeds=_feed_maker([], dims),
        verify=verify,
        force=force,
    )


def tune(
    model: OnnxFile | str | Path,
    output: str | Path | None = None,
    *,
    data: str | Path | None = None,
    metric: str | None = None,
    labels: str | None = None,
    evaluate: EvalFunction | None = None,
    calib: str | Path | Callable[[], Iterable[Feeds]] | None = None,
    criterion: str = "relative",
    tolerance: float = 0.01,
    lower_is_better: bool = False,
    policy: Policy | str = "auto:bf16",
    engine: str | None = None,
    batch: int = DEFAULT_BATCH,
    user_rules: Mapping[str, UserRule] | None = None,
    study: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> Outcome:
    """Find the fastest mixed-precision model that keeps the criterion; write it if it helps.

    Nothing is written where the outcome's verdict is UNCHANGED: use the fp32 model.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    file = model if isinstance(model, OnnxFile) else load(model)
    target = Path(output) if output is not None else None
    if target is not None:
        frontend.check_writable(target, force=force)
    chosen, session = _first_that_loads(file, engine)
    options = DataOptions(
        data=Path(data) if data is not None else None,
        labels=labels,
        metric=metric,
        evaluate=evaluate,
        evaluate_name=getattr(evaluate, "__qualname__", ""),
        calib=Path(calib) if isinstance(calib, str) else calib,
        batch=batch,
        lower_is_better=lower_is_better,
    )
    workload = workload_of(options, session)
    outcome = _tune(
        file,
        workload,
        Criterion(
            kind=CriterionKind.parse(criterion),
            tolerance=tolerance,
            higher_is_better=workload.higher_is_better,
        ),
        Policy.parse(policy) if isinstance(policy, str) else policy,
        chosen,
        reference=session,
        user_rules=tuple((user_rules or {}).items()),
        study=Study(Path(study)) if study is not None else None,
        progress=progress,
    )
    if target is not None and outcome.verdict is Verdict.IMPROVED:
        timing = workload.timing()
        conversion.replay(
            file, outcome.plan, target, [chosen], feeds=lambda _: timing[0], force=force
        )
    return outcome


def inspect(
    model: OnnxFile | str | Path,
    *,
    data: str | Path | None = None,
    labels: str | None = None,
    batch: int = 1,
    dims: Mapping[str, int] | None = None,
    low: Format = Format.BF16,
    engine: str | None = None,
) -> Census:
    """Count a model's ops by class; with ``data``, report values that ``low`` cannot hold.

    Shapes are those observed on data, else on one random batch where the model runs on it.

    Raises:
        FinecastError: If the model or the data cannot be read.
    """
    file = model if isinstance(model, OnnxFile) else load(model)
    prepared = frontend.prepare(file, Policy(scope=Scope.NONE))
    facts = _observed(prepared, data, labels, batch, dims, engine)
    shapes = {i: f.shape for i, f in facts.items()}
    classes = count_classes(prepared.graph, shapes)
    return Census(
        name=str(file.path),
        opset=frontend.opset_of(file.model),
        nodes=len(prepared.graph.nodes),
        parameters=sum(c.parameters for c in classes),
        size_bytes=file.size_bytes,
        classes=classes,
        notes=notes(prepared.graph, facts if data is not None else {}),
        warnings=risks(prepared.graph, facts, low) if data is not None else (),
    )


def _observed(
    prepared: Prepared,
    data: str | Path | None,
    labels: str | None,
    batch: int,
    dims: Mapping[str, int] | None,
    engine: str | None,
) -> dict[int, ValueFacts]:
    if data is not None:
        batches = _batches(prepared.file, Path(data), labels, engine)
        return observe(prepared, lambda: batches)
    try:
        session = get_engine("onnxruntime").load(prepared.file.path)
        sizes = {**_guesses(session), **(dims or {})}
        feeds = synthetic_feeds(session.inputs, batch=batch, dims=sizes)
        return observe(prepared, lambda: [feeds])
    except (EngineError, UsageError):
        if dims:
            raise
        return {}  # no shapes: the table shows what can be told without them


def judge(
    model: OnnxFile | str | Path,
    policy: Policy,
    *,
    engine: str | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
) -> tuple[Graph, Plan]:
    """What the rules alone say of each op, as the lowest plan they permit.

    Raises:
        FinecastError: If the model cannot be read or rules conflict.
    """
    file = model if isinstance(model, OnnxFile) else load(model)
    prepared = frontend.prepare(file, policy)
    planner = make_planner(
        prepared, policy, engines(engine)[0], user_rules=tuple((user_rules or {}).items())
    )
    return prepared.graph, planner.lowest()


def graph_for(file: OnnxFile, plan: Plan) -> Graph:
    """The graph whose nodes ``plan`` names.

    Raises:
        ModelError: If the plan was made for another model.
    """
    return frontend.apply(file, plan).graph


def workload_of(options: DataOptions, session: Session) -> Workload:
    """The workload that ``options`` describe, for a model loaded as ``session``.

    Raises:
        UsageError: If they do not fit together or do not fit the model.
    """
    calibration = _calibration(options, session)
    if options.evaluate is not None:
        if options.metric is not None:
            raise UsageError(
                "both a built-in metric and an evaluation function are given",
                where="--metric, --eval",
                fix="give one of them",
            )
        return FunctionWorkload(
            function=options.evaluate,
            name=options.evaluate_name,
            lower_is_better=options.lower_is_better,
            calibrate=calibration,
        )
    if options.data is None:
        raise UsageError(
            "no data to tune on", fix="give --data FILE.npz or --eval FILE.py:FUNCTION"
        )
    metric = get_metric(options.metric or "agreement")
    data = load_npz(options.data, session.inputs, labels=options.labels)
    if metric.needs_labels and data.labels is None:
        raise UsageError(
            f"metric {metric.name} needs labels",
            where=str(options.data),
            fix="add an array 'label', name it with --labels, or use --metric agreement",
        )
    return DataWorkload(
        data=data,
        metric=metric,
        batch=options.batch,
        data_digest=frontend.digest(options.data),
        calibrate=calibration or partial(_first_batches, data, options.batch),
    )


def _calibration(options: DataOptions, session: Session) -> CalibrationFunction | None:
    calib = options.calib
    if calib is None:
        return None
    if isinstance(calib, Path):
        return partial(_first_batches, load_npz(calib, session.inputs), options.batch)
    if next(iter(calib()), None) is None:
        raise UsageError("the calibration function yields nothing", where="--calib")
    return calib


def _first_batches(data: Dataset, batch: int) -> Iterator[Feeds]:
    return (b.feeds for b in data.batches(batch, limit=CALIBRATION_SAMPLES))


def engines(spec: str | None) -> list[Engine]:
    """The engine that is asked for, else all that are installed, the preferred one first."""
    if spec:
        return [get_engine(spec)]
    return [get_engine(name) for name in ENGINES if installed(name)] or [default_engine()]


def _first_that_loads(file: OnnxFile, spec: str | None) -> tuple[Engine, Session]:
    """The engine that is asked for, or the first installed one that reads the model."""
    failures: list[str] = []
    for engine in engines(spec):
        try:
            return engine, engine.load(file.path)
        except EngineError as error:
            if spec:
                raise
            failures.append(f"{engine.name}: {error.what}")
    raise EngineError("no engine here can run the model", where="; ".join(failures))


def _batches(
    file: OnnxFile, data: Path, labels: str | None, engine: str | None
) -> list[Feeds]:
    session = engines(engine)[0].load(file.path)
    data_set = load_npz(data, session.inputs, labels=labels)
    return list(_first_batches(data_set, DEFAULT_BATCH))


def _feed_maker(batches: Sequence[Feeds], dims: Mapping[str, int] | None) -> FeedMaker:
    def make(session: Session) -> Feeds | None:
        if batches:
            return batches[0]
        try:
            sizes = {**_guesses(session), **(dims or {})}
            return synthetic_feeds(session.inputs, batch=1, dims=sizes)
        except UsageError:
            if dims:
                raise
            return None

    return make


def _guesses(session: Session) -> dict[str, int]:
    """A small size for each free dimension that is not the batch."""
    free = {d for s in session.inputs for d in (s.shape or ())[1:] if isinstance(d, str) and d}
    batches = {s.shape[0] for s in session.inputs if s.shape}
    return {d: 16 for d in free if d not in batches}
