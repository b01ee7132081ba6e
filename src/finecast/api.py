"""The Python API: the command line's power with Python objects.

For example::

    model = finecast.load("model.onnx")
    finecast.convert(model, "low.onnx", policy="all:bf16")
    outcome = finecast.tune(model, "tuned.onnx", data="data.npz", metric="top1")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from finecast.emulation import Emulation
from finecast.engines import EMULATOR, candidates, first_that_loads, get_engine
from finecast.engines.base import Engine, Feeds, Session, TensorSpec
from finecast.engines.emulator import EmulatorEngine, exact_session
from finecast.errors import EngineError, UsageError
from finecast.facts import ValueFacts
from finecast.files import CommandFiles
from finecast.formats import Format
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile, Prepared, from_model
from finecast.graph import Graph
from finecast.measure.census import Census, count_classes, notes, risks
from finecast.measure.criterion import Criterion, CriterionKind
from finecast.measure.feeds import synthetic_feeds
from finecast.measure.observe import observe
from finecast.measure.sizes import shapes_for
from finecast.neuron import explicit_casts
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.user import without_opinion
from finecast.tuner import conversion
from finecast.tuner.analysis import make_planner, worthwhile
from finecast.tuner.artefact import Destination
from finecast.tuner.conversion import Conversion
from finecast.tuner.sources import (
    DEFAULT_BATCH,
    Data,
    DataOptions,
    FeedMaker,
    calibration_batches,
    guessed_dims,
    workload_of,
)
from finecast.tuner.study import JOURNAL_SUFFIX, Study
from finecast.tuner.targeted import tune_for
from finecast.tuner.tuning import Outcome, Verdict
from finecast.tuner.tuning import tune as _tune
from finecast.tuner.workload import EvalFunction

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

Model: TypeAlias = "OnnxFile | str | Path | onnx.ModelProto | ir.Model"
"""What takes a model takes it loaded, as a path, or from memory."""

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


def load(model: Model) -> OnnxFile:
    """Read an ONNX model from its path, or take one in memory; external data stays on disk.

    Raises:
        UsageError: If there is no such file, or it is no model at all.
        ModelError: If it is not a complete ONNX model.
    """
    if isinstance(model, OnnxFile):
        return model
    return frontend.load(Path(model)) if isinstance(model, str | Path) else from_model(model)


def convert(
    model: Model,
    output: str | Path | None = None,
    policy: Policy | str = "all:bf16",
    *,
    engine: str | None = None,
    target: Emulation | str | None = None,
    data: DataOptions | Data | None = None,
    dims: Mapping[str, int] | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    verify: bool = True,
    force: bool = False,
    external_data: bool | None = None,
) -> Conversion:
    """Convert a model by a policy, verify it in an engine, and write it.

    Args:
        model: The model, or its path.
        output: Where the converted model goes; None: to the ``model`` of what is returned.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        engine: ``NAME[:DEVICE]``; by default the first installed one that runs the model, or
            the target's emulator.
        target: A device that is not here, by name or with its options: its formats count.
        data: An npz with the model's inputs, arrays by name, or batches: their ranges guide
            the rules, the first batch verifies. Without it random feeds verify.
        dims: Sizes of free dimensions, for random feeds.
        user_rules: Rule functions by name.
        verify: Whether the model has to load and run before it is written.
        force: Whether an existing output may be replaced.
        external_data: Whether tensors go to ``NAME.data`` beside the output; None: if they
            are more than fit one file, or came in that form.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    file = load(model)
    written = _destination(output, force=force, external_data=external_data)
    _claim(file, written, data=data)
    device = _device(target)
    engines = _engines(engine, device)
    first = engines[0]
    if device is None and isinstance(first, EmulatorEngine):
        device = first.emulation
    batches = _batches(file, data)
    done = conversion.convert(
        file,
        written,
        Policy.parse(policy) if isinstance(policy, str) else policy,
        engines,
        target=device,
        feeds=_feeds(file, batches, dims),
        data=batches,
        user_rules=tuple((user_rules or {}).items()),
        verify=verify,
    )
    said = without_opinion(user_rules or (), done.plan)
    return replace(done, warnings=(*done.warnings, *said))


def apply(
    plan: Plan | str | Path,
    model: Model,
    output: str | Path | None = None,
    *,
    engine: str | None = None,
    data: DataOptions | Data | None = None,
    dims: Mapping[str, int] | None = None,
    verify: bool = True,
    force: bool = False,
    external_data: bool | None = None,
) -> Conversion:
    """Write the model that a plan gives; without ``output`` it is in what is returned.

    Raises:
        FinecastError: If the plan was made for another model, or as for ``convert``.
    """
    file = load(model)
    written = _destination(output, force=force, external_data=external_data)
    _claim(file, written, data=data, plan=None if isinstance(plan, Plan) else plan)
    given = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    return conversion.replay(
        file,
        given,
        written,
        candidates(engine),
        feeds=_feeds(file, _batches(file, data), dims),
        verify=verify,
    )


def tune(
    model: Model,
    output: str | Path | None = None,
    *,
    data: DataOptions | Data | None = None,
    metric: str | None = None,
    labels: str | None = None,
    evaluate: EvalFunction | None = None,
    calib: Data | Callable[[], Iterable[Feeds]] | None = None,
    criterion: str = "relative",
    tolerance: float = 0.01,
    lower_is_better: bool = False,
    policy: Policy | str = "auto:bf16",
    engine: str | None = None,
    target: Emulation | str | None = None,
    batch: int = DEFAULT_BATCH,
    user_rules: Mapping[str, UserRule] | None = None,
    study: str | Path | None = None,
    resume: bool = False,
    force: bool = False,
    external_data: bool | None = None,
    progress: Progress = silent,
) -> Outcome:
    """Find the fastest mixed-precision model that keeps the criterion; write it if it helps.

    Nothing is written where the outcome's verdict is UNCHANGED: use the fp32 model. With a
    ``target`` accuracy is that of its emulation and times are modelled, not measured.
    ``data`` is an npz file, arrays by name, or batches that can be iterated again and again (a
    list of feeds, a DataLoader); as DataOptions it stands for metric, labels, calib and the
    like too. ``calib`` is any of these, or a function that yields feeds. Trials are kept in
    ``study``; ``resume`` takes those of an earlier run of the same model, data, code and
    baseline for granted, but for the winner's.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    file = load(model)
    written = None
    if output is not None:
        written = _destination(output, force=force, external_data=external_data)
    options = data
    if not isinstance(options, DataOptions):
        options = DataOptions(
            data=options,
            labels=labels,
            metric=metric,
            evaluate=evaluate,
            evaluate_name=getattr(evaluate, "__qualname__", ""),
            calib=calib,
            batch=batch,
            lower_is_better=lower_is_better,
        )
    files = _claim(file, written, data=options, study=study)
    device = _device(target)
    chosen, session = _runner(file, engine, device)
    workload = workload_of(options, session)
    goal = Criterion(
        kind=CriterionKind.parse(criterion),
        tolerance=tolerance,
        higher_is_better=workload.higher_is_better,
    )
    asked = Policy.parse(policy) if isinstance(policy, str) else policy
    kept = Study(Path(study), resume=resume) if study is not None else None
    rules = tuple((user_rules or {}).items())
    if device is not None:
        outcome = tune_for(
            file, workload, goal, asked, device, rules, study=kept, progress=progress
        )
    else:
        outcome = _tune(
            file,
            workload,
            goal,
            asked,
            chosen,
            reference=session,
            user_rules=rules,
            study=kept,
            progress=progress,
        )
    if written is not None and outcome.verdict is Verdict.IMPROVED:
        timing = workload.timing()
        conversion.replay(
            file, outcome.plan, written, [chosen], feeds=FeedMaker(batches=timing)
        )
    said = without_opinion(user_rules or (), outcome.plan)
    warnings = (*outcome.warnings, *workload.warnings, *said)
    return replace(outcome, warnings=warnings, stale=files.stale())


def _claim(
    file: OnnxFile,
    output: Destination | None,
    *,
    data: DataOptions | Data | None = None,
    plan: str | Path | None = None,
    study: str | Path | None = None,
) -> CommandFiles:
    """Every file of a call; UsageError if one that is read would be written."""
    files = CommandFiles(force=output is not None and output.force)
    files.read("the model", file.path)
    files.read("the model's external data", *file.external)
    options = _data_options(data)
    if options is not None:
        for role, source in (("data", options.data), ("calibration data", options.calib)):
            if isinstance(source, str | Path):
                files.read(f"the {role}", source)
    files.read("the plan", plan)
    if output is not None:
        files.write("the output", output.path, beside=output.beside)
        output.check(file)
    files.write("the study", study, beside=(JOURNAL_SUFFIX,), replaces=False)
    return files


def _runner(
    file: OnnxFile, engine: str | None, device: Emulation | None
) -> tuple[Engine, Session]:
    """The engine that tuned models run in, and the fp32 model loaded."""
    if device is not None:
        if engine is not None:
            raise UsageError(
                f"--engine {engine} with --target {device.target.name}: a device that is not"
                " here runs in its emulator",
                fix="keep one of them",
            )
        return EmulatorEngine(emulation=device), exact_session(file.path)
    if engine is not None and get_engine(engine).name == EMULATOR:
        raise UsageError(
            "the emulator's time says nothing of the device",
            where="--engine",
            fix="give --target: its times are modelled",
        )
    return first_that_loads(file.path, engine)


def inspect(
    model: Model,
    *,
    data: DataOptions | Data | None = None,
    labels: str | None = None,
    batch: int = 1,
    dims: Mapping[str, int] | None = None,
    low: Format = Format.BF16,
) -> Census:
    """Count a model's ops by class; with ``data``, report values that ``low`` cannot hold.

    Shapes are those observed on data, else on one random batch where the model runs on it.

    Raises:
        FinecastError: If the model or the data cannot be read.
    """
    with frontend.paused_collection():
        file = load(model)
        if dims:
            feeds = FeedMaker(batches=[{}] if data is not None else (), dims=dims)
            feeds.check_dims(file.model)
        prepared = frontend.prepare(file, Policy(scope=Scope.NONE), own=file is not model)
        return _census(prepared, _data_options(data, labels), batch, dims, low)


def _census(
    prepared: Prepared,
    options: DataOptions | None,
    batch: int,
    dims: Mapping[str, int] | None,
    low: Format,
) -> Census:
    file = prepared.file
    facts: dict[int, ValueFacts] = {}
    if options is not None:
        batches = _batches(file, options)
        facts = observe(prepared, lambda: batches)
        shapes = {i: f.shape for i, f in facts.items()}
    else:
        shapes = _drawn_shapes(prepared, batch, dims)
    classes = count_classes(prepared.graph, shapes)
    return Census(
        name=file.name,
        opset=frontend.opset_of(file.model),
        nodes=len(prepared.graph.nodes),
        parameters=sum(c.parameters for c in classes),
        size_bytes=file.size_bytes,
        classes=classes,
        notes=notes(prepared.graph, facts),
        warnings=risks(prepared.graph, facts, low) if options is not None else (),
    )


def _drawn_shapes(
    prepared: Prepared, batch: int, dims: Mapping[str, int] | None
) -> dict[int, tuple[int, ...]]:
    """Shapes of float values on one random batch; none where there can be none."""
    try:
        inputs = [
            TensorSpec(name=v.name, dtype=v.dtype, shape=v.shape)
            for v in prepared.graph.inputs
        ]
        sizes = {**guessed_dims(inputs), **(dims or {})}
        feeds = synthetic_feeds(inputs, batch=batch, dims=sizes)
        return shapes_for(prepared, inputs, feeds)
    except (EngineError, UsageError):
        if dims:
            raise
        return {}  # no shapes: the table shows what can be told without them


def judge(
    model: Model,
    policy: Policy,
    *,
    engine: str | None = None,
    target: Emulation | str | None = None,
    data: DataOptions | Data | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
) -> tuple[Graph, Plan]:
    """What the rules alone say of each op, as the lowest plan they permit.

    With ``data`` they see the ranges that its values have, as ``convert`` does.

    Raises:
        FinecastError: If the model cannot be read or rules conflict.
    """
    file = load(model)
    device = _device(target)
    judge_of_kernels = _engines(engine, device)[0]
    if device is None:
        policy, _ = worthwhile(policy, judge_of_kernels, tuple(user_rules or ()))
    prepared = frontend.prepare(file, policy)
    batches = _batches(file, data)
    planner = make_planner(
        prepared,
        policy,
        judge_of_kernels,
        facts=observe(prepared, lambda: batches) if batches else {},
        user_rules=tuple((user_rules or {}).items()),
    )
    return prepared.graph, planner.lowest()


def graph_for(file: OnnxFile, plan: Plan) -> Graph:
    """The graph whose nodes ``plan`` names.

    Raises:
        ModelError: If the plan was made for another model.
    """
    graph = frontend.apply(file, plan).graph
    plan.check_complete(graph, where=file.name)
    return graph


def _data_options(
    data: DataOptions | Data | None, labels: str | None = None
) -> DataOptions | None:
    """Data as options."""
    if data is None or isinstance(data, DataOptions):
        return data
    return DataOptions(data=data, labels=labels)


def _batches(file: OnnxFile, data: DataOptions | Data | None) -> list[Feeds]:
    """The first feeds of the data; none without."""
    options = _data_options(data)
    if options is None:
        return []
    return calibration_batches(first_that_loads(file.path, None)[1], options)


def _destination(
    output: str | Path | None, *, force: bool, external_data: bool | None
) -> Destination:
    path = Path(output) if output is not None else None
    return Destination(path=path, force=force, external_data=external_data)


def _feeds(
    file: OnnxFile, batches: Sequence[Feeds], dims: Mapping[str, int] | None
) -> FeedMaker:
    """What the converted model is verified on."""
    feeds = FeedMaker(batches=batches, dims=dims or {})
    feeds.check_dims(file.model)
    return feeds


def _device(target: Emulation | str | None) -> Emulation | None:
    return explicit_casts(target) if isinstance(target, str) else target


def _engines(engine: str | None, device: Emulation | None) -> list[Engine]:
    """What verifies: the engine that is asked for, else the device's emulator or any here."""
    if engine is None and device is not None:
        return [EmulatorEngine(emulation=device)]
    return candidates(engine)
