"""The Python API: the command line's power with Python objects.

For example::

    model = finecast.load("model.onnx")
    finecast.convert(model, "low.onnx", policy="all:bf16")
    outcome = finecast.tune(model, "tuned.onnx", data="data.npz", metric="top1")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from finecast.engines import candidates, first_that_loads, get_engine
from finecast.engines.base import Feeds, Session
from finecast.errors import EngineError, UsageError
from finecast.facts import ValueFacts
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.graph import Graph
from finecast.measure.census import Census, count_classes, notes, risks
from finecast.measure.criterion import Criterion, CriterionKind
from finecast.measure.feeds import synthetic_feeds
from finecast.measure.observe import observe
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.tuner import conversion
from finecast.tuner.analysis import make_planner
from finecast.tuner.conversion import Conversion
from finecast.tuner.sources import (
    DEFAULT_BATCH,
    DataOptions,
    calibration_batches,
    feed_maker,
    guessed_dims,
    workload_of,
)
from finecast.tuner.study import Study
from finecast.tuner.tuning import Outcome, Verdict
from finecast.tuner.tuning import tune as _tune
from finecast.tuner.workload import EvalFunction

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
    batches = (
        calibration_batches(_session(file, engine), Path(data), None)
        if data is not None
        else []
    )
    return conversion.convert(
        file,
        Path(output),
        Policy.parse(policy) if isinstance(policy, str) else policy,
        candidates(engine),
        feeds=feed_maker(batches, dims),
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
        candidates(engine),
        feeds=feed_maker([], dims),
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
    chosen, session = first_that_loads(file.path, engine)
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
        batches = calibration_batches(_session(prepared.file, engine), Path(data), labels)
        return observe(prepared, lambda: batches)
    try:
        session = get_engine("onnxruntime").load(prepared.file.path)
        sizes = {**guessed_dims(session), **(dims or {})}
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
        prepared, policy, candidates(engine)[0], user_rules=tuple((user_rules or {}).items())
    )
    return prepared.graph, planner.lowest()


def graph_for(file: OnnxFile, plan: Plan) -> Graph:
    """The graph whose nodes ``plan`` names.

    Raises:
        ModelError: If the plan was made for another model.
    """
    return frontend.apply(file, plan).graph


def _session(file: OnnxFile, engine: str | None) -> Session:
    return first_that_loads(file.path, engine)[1]
