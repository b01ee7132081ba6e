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
from typing import TYPE_CHECKING, Any, TypeAlias

from finecast.data.criterion import Criterion, CriterionKind
from finecast.devices.emulation import Emulation, check_formats, explicit_casts
from finecast.engines.base import Feeds
from finecast.engines.usage import in_memory_notes
from finecast.errors import UsageError
from finecast.files import CommandFiles, write_text
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.arguments import checked
from finecast.pipeline.artefact import Destination
from finecast.pipeline.census import Census
from finecast.pipeline.conversion import Conversion
from finecast.pipeline.goal import MIN_SPEEDUP, Goal, Objective
from finecast.pipeline.model import OpenedModel, RunOptions, TuneRequest
from finecast.pipeline.outcome import Outcome
from finecast.pipeline.sources import DEFAULT_BATCH, Data, DataOptions, workload_of
from finecast.pipeline.study import Study, journals, study_at
from finecast.pipeline.tuning import tune as search
from finecast.pipeline.workload import EvalFunction
from finecast.planning.plan import Plan
from finecast.progress import Phases, Progress, reporting
from finecast.rules import UserRule
from finecast.rules.policy import DEFAULT_POLICY, Policy
from finecast.rules.user_rules import without_opinion
from finecast.subjects import (
    check_output_name,
    check_written,
    opened,
    plan_beside,
    written_with,
)

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import openvino

Model: TypeAlias = "OpenedModel | str | Path | onnx.ModelProto | ir.Model | openvino.Model"
"""A model as functions here accept it: loaded, a path, or an object of its library."""

__all__ = [
    "DataOptions",
    "apply",
    "convert",
    "graph_for",
    "inspect",
    "judge",
    "load",
    "tune",
    "tuned",
    "workload_of",
]


@checked
def load(
    model: Model, *, trust: bool = False, output: str | Path | None = None
) -> OpenedModel:
    """Read a model from its path, or take one in memory; external data stays on disk.

    Args:
        model: The model, or its path.
        trust: Whether code that a .pt2 or .keras file brings may be unpickled and run.
        output: Where a result will go. Its name decides which library opens a model that
            several read: a SavedModel may give another, or OpenVINO's IR.

    Raises:
        UsageError: If there is no such file, or it is not a model.
        ModelError: If the model is incomplete.
    """
    return opened(model, trust=trust, output=None if output is None else Path(output))


@checked
def convert(
    model: Model,
    output: str | Path | None = None,
    policy: Policy | str = DEFAULT_POLICY,
    *,
    engine: str | None = None,
    target: Emulation | str | None = None,
    data: DataOptions | Data | None = None,
    dims: Mapping[str, int] | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    verify: bool = True,
    force: bool = False,
    external_data: bool | None = None,
    clean: bool = False,
    from_type: str | None = None,
    progress: Progress | bool = True,
) -> Conversion:
    """Convert a model by a policy, verify it in an engine, and write it.

    Args:
        model: The model, or its path.
        output: Where the converted model goes; None: it is only the result's ``model``.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        engine: ``NAME[:DEVICE]``; by default the first that runs the model, or an emulator.
        target: A device that is not here, by name or with options: the model has its formats.
        data: An npz with the model's inputs, arrays by name, or batches: their ranges guide
            the rules, and the result is verified on the first batch. Without data it is
            verified on random feeds.
        dims: Sizes of free dimensions, for random feeds.
        user_rules: Rule functions by name.
        verify: Whether the model has to load and run before it is written.
        force: Whether an existing output may be replaced.
        external_data: Whether tensors go to ``NAME.data`` beside the output; None: only if
            they do not fit one file, or the model has them in that form.
        clean: Whether nodes, initializers and functions of the model that no output needs are
            left out, though they came with it.
        from_type: Take ops in this type (fp64, fp16, bf16) to fp32 first; ports keep theirs.
        progress: True shows progress on a terminal and in a notebook, False nothing; or a
            function that is told of each step.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    given = load(model, output=output)
    written = replace(_destination(output, force, external_data), clean=clean)
    files = _declare_files(given, written, data=data)
    asked = Policy.of(policy)
    with reporting(progress, "converting") as report, files.locked() as removed:
        done = _taken(given, from_type).convert(
            written,
            asked,
            RunOptions(
                engine=engine,
                device=_device_for(asked, target),
                data=_data_options(data),
                dims=dims or {},
                user_rules=user_rules or {},
                verify=verify,
                progress=report,
            ),
        )
    said = without_opinion(user_rules or (), done.plan.reasons)
    return replace(done, warnings=(*removed, *done.warnings, *said))


@checked
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
    """Write the model that a plan gives; without ``output`` it is only the result's ``model``.

    Raises:
        FinecastError: If the plan was made for another model, or as for ``convert``.
    """
    given = load(model, output=output)
    written = _destination(output, force, external_data)
    files = _declare_files(given, written, data=data, plan=plan)
    options = RunOptions(
        engine=engine, data=_data_options(data), dims=dims or {}, verify=verify
    )
    stated = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    with files.locked() as removed:
        done = given.apply(written, stated, options)
    return replace(done, warnings=(*removed, *done.warnings))


@checked
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
    policy: Policy | str = DEFAULT_POLICY,
    of: str | Sequence[str] = (),
    engine: str | None = None,
    target: Emulation | str | None = None,
    batch: int = DEFAULT_BATCH,
    user_rules: Mapping[str, UserRule] | None = None,
    objective: Objective | str = Objective.LATENCY,
    min_speedup: float = MIN_SPEEDUP,
    max_trials: int | None = None,
    timeout_s: float | None = None,
    study: str | Path | None = None,
    resume: bool = False,
    plan_out: str | Path | None = None,
    force: bool = False,
    external_data: bool | None = None,
    from_type: str | None = None,
    progress: Progress | bool = True,
) -> Outcome:
    """Find the fastest mixed-precision model that keeps the criterion; write it if it helps.

    Its plan is written to ``plan_out``, by default beside ``output``: ``m.plan.json`` for
    ``m.onnx``, ``m.pt2.plan.json`` for ``m.pt2``, ``m.saved_model.plan.json`` for a folder
    ``m``. Nothing is written where the verdict is UNCHANGED.
    ``data`` and ``calib`` are an npz file, arrays by name, or batches that can be iterated
    again and again, such as a DataLoader; ``calib`` may also be a function that yields feeds.
    ``objective`` is what to minimise: "latency", time under load ("throughput"), or
    bytes ("size", "memory"). ``of`` names the output that the metric and the error are of; of
    several the worst counts. By default it is the worst of all
    for a metric of distance and for the error, else the first; outputs that copy an input do
    not count. With a ``target`` accuracy is emulated and times are modelled. Trials are kept
    in ``study``; ``resume`` uses those of the same model, data, code and baseline, and
    evaluates the winner again.
    ``progress=True`` shows progress on a terminal and in a notebook, False nothing; a function
    is told of each step.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    beside: dict[str, Any] = {"labels": labels, "metric": metric, "evaluate": evaluate}
    beside |= {"calib": calib, "batch": batch, "lower_is_better": lower_is_better}
    beside |= {"of": (of,) if isinstance(of, str) else tuple(of)}
    kept = Criterion(kind=CriterionKind.parse(criterion), tolerance=tolerance)
    goal = Goal(criterion=kept, objective=Objective.of(objective), min_speedup=min_speedup)
    goal = replace(goal, max_trials=max_trials, timeout_s=timeout_s)
    options = TuneRequest(
        data=_with_options(data, beside),
        goal=goal,
        policy=Policy.of(policy),
        engine=engine,
        device=_device(target),
        user_rules=user_rules or {},
        study=None if study is None else Path(study),
        resume=resume,
        plan=_plan_path(plan_out, output),
        from_type=from_type,
    )
    destination = _destination(output, force, external_data)
    with reporting(progress, "tuning") as report:
        opened = load(model, output=output)
        return tuned(opened, destination, replace(options, progress=report))


def _plan_path(plan: str | Path | None, output: str | Path | None) -> Path | None:
    """Where the plan goes: to ``plan`` if that is given, else beside the output."""
    if plan is not None:
        return Path(plan)
    return None if output is None else plan_beside(Path(output))


def tuned(model: OpenedModel, output: Destination, options: TuneRequest) -> Outcome:
    """``tune`` with its options as one value.

    Raises:
        FinecastError: As ``tune``.
    """
    files = _declare_files(model, output, data=options.data, study=options.study)
    files.write("the plan", options.plan)
    with files.locked() as removed, study_at(options.study, resume=options.resume) as study:
        outcome = _searched(_taken(model, options.from_type), output, options, study)
    return replace(outcome, stale=files.stale(), warnings=(*removed, *outcome.warnings))


def _searched(
    model: OpenedModel, output: Destination, options: TuneRequest, study: Study | None
) -> Outcome:
    """The outcome of a search, its model written if it is better."""
    subject = model.subject(options.engine, options.device)
    workload = workload_of(options.data, subject.reference)
    criterion = replace(options.goal.criterion, higher_is_better=workload.higher_is_better)
    outcome = search(
        subject,
        workload,
        replace(options.goal, criterion=criterion),
        options.policy,
        user_rules=tuple(options.user_rules.items()),
        study=study,
        progress=options.progress,
    )
    phases = Phases(options.progress, "write", options.goal.start_s + outcome.seconds)
    if output.path is not None and outcome.improved:
        size, _ = model.write(outcome, output, subject, workload)
        outcome = replace(outcome, tuned=replace(outcome.tuned, size_bytes=size))
    if options.plan is not None and outcome.improved:
        write_text(options.plan, outcome.plan.to_json())
    outcome = outcome.and_then(phases.seconds())
    said = without_opinion(options.user_rules, outcome.plan.reasons)
    run = () if output.path is not None else in_memory_notes(outcome.plan)
    return replace(outcome, warnings=(*outcome.warnings, *workload.warnings, *said, *run))


def _taken(model: OpenedModel, from_type: str | None) -> OpenedModel:
    """The model with its ops in ``from_type``, if one is named, taken to fp32."""
    return model if from_type is None else model.to_fp32(from_type)


def _declare_files(
    model: OpenedModel,
    output: Destination,
    *,
    data: DataOptions | Data | None = None,
    plan: Plan | str | Path | None = None,
    study: str | Path | None = None,
) -> CommandFiles:
    """All files of a call; UsageError if one that is read would be written."""
    files = CommandFiles(force=output.force)
    files.read("the model", model.path)
    files.read("the model's external data", *model.external)
    options = _data_options(data)
    if options is not None:
        for role, source in (("data", options.data), ("calibration data", options.calib)):
            if isinstance(source, str | Path):
                files.read(f"the {role}", source)
    files.read("the plan", None if isinstance(plan, Plan) else plan)
    result = written_with(model.path, output)
    files.write("the output", output.path, beside=result.beside, folder=result.folder)
    if output.path is not None:
        check_output_name(model.path, output.path)
        check_written(type(model).__module__, output.path)
    model.check(output)
    files.write("the study", study, beside=journals(study), replaces=False)
    return files


@checked
def inspect(
    model: Model,
    *,
    data: DataOptions | Data | None = None,
    labels: str | None = None,
    batch: int = 1,
    dims: Mapping[str, int] | None = None,
    low: Format = Format.BF16,
    from_type: str | None = None,
    trust: bool = False,
) -> Census:
    """Count a model's ops by class; with ``data``, report values that ``low`` cannot hold.

    Shapes are observed on data; without data on one random batch, if the model runs on it.
    ``from_type`` is as for ``convert``.

    Raises:
        FinecastError: If the model or the data cannot be read.
    """
    given = load(model, trust=trust)
    options = RunOptions(
        data=_data_options(data, labels), batch=batch, dims=dims or {}, own=given is not model
    )
    return _taken(given, from_type).census(options, low)


@checked
def judge(
    model: Model,
    policy: Policy | str,
    *,
    engine: str | None = None,
    target: Emulation | str | None = None,
    data: DataOptions | Data | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    from_type: str | None = None,
) -> tuple[Graph, Plan]:
    """What the rules alone say of each op: the model's graph, and the lowest plan they permit.

    With ``data`` the rules see the ranges of the model's values on it. ``data`` and
    ``from_type`` are as for ``convert``.

    Raises:
        FinecastError: If the model cannot be read or rules conflict.
    """
    asked = Policy.of(policy)
    options = RunOptions(
        engine=engine,
        device=_device_for(asked, target),
        data=_data_options(data),
        user_rules=user_rules or {},
    )
    return _taken(load(model), from_type).judge(asked, options)


def graph_for(model: Model, plan: Plan) -> Graph:
    """The graph whose nodes ``plan`` names.

    Raises:
        ModelError: If the plan was made for another model.
    """
    return opened(model, plan=plan).graph_for(plan)


def _data_options(
    data: DataOptions | Data | None, labels: str | None = None
) -> DataOptions | None:
    """``data`` as DataOptions; None stays None."""
    return None if data is None else _with_options(data, {"labels": labels})


def _with_options(data: DataOptions | Data | None, beside: Mapping[str, Any]) -> DataOptions:
    """``data`` with options given ``beside`` it; UsageError if it is a DataOptions itself."""
    if not isinstance(data, DataOptions):
        return DataOptions(data=data, **beside)
    defaults = DataOptions()
    for name, value in beside.items():
        if value != getattr(defaults, name):
            raise UsageError(f"{name} is given beside DataOptions", fix=f"set its {name}")
    return data


def _destination(
    output: str | Path | None, force: bool, external_data: bool | None
) -> Destination:
    path = Path(output) if output is not None else None
    return Destination(path=path, force=force, external_data=external_data)


def _device(target: Emulation | str | None) -> Emulation | None:
    return explicit_casts(target) if isinstance(target, str) else target


def _device_for(policy: Policy, target: Emulation | str | None) -> Emulation | None:
    """The device; UsageError if it does not compute in a format of ``policy``."""
    device = _device(target)
    if device is not None:
        check_formats(device, policy)
    return device
