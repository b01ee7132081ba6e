"""The Python API: the command line's power with Python objects.

For example::

    model = finecast.load("model.onnx")
    finecast.convert(model, "low.onnx", policy="all:bf16")
    outcome = finecast.tune(model, "tuned.onnx", data="data.npz", metric="top1")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Unpack

from finecast import keywords
from finecast.arguments import checked, group_of
from finecast.data.criterion import Criterion
from finecast.data.golden import chosen
from finecast.data.sources import Data, DataOptions, calibration_batches
from finecast.devices.emulation import Emulation, check, check_formats, explicit_casts
from finecast.devices.targets import list_targets
from finecast.engines import ENGINES, get_engine
from finecast.engines.base import Feeds, Session
from finecast.engines.exact import CachedSession
from finecast.errors import EngineError, UsageError
from finecast.files import CommandFiles, holds_object, write_text
from finecast.graph import Graph
from finecast.measure.prices import misplaced, remove_damaged
from finecast.measure.study import Study, journals, study_at
from finecast.naming import unknown_name
from finecast.native.artefact import Destination
from finecast.native.census import Census
from finecast.native.drift import Verification, VerifyOptions
from finecast.native.drift import verify as verified
from finecast.native.lock import Deployed, Runner, lock_files
from finecast.native.model import EmulatedLow, LowModel, OpenedModel, ReadOptions, RunOptions
from finecast.native.opening import (
    check_output_name,
    check_written,
    lock_beside,
    opened,
    plan_beside,
    study_beside,
    written_with,
)
from finecast.native.profiling import ProfileReport, Rounds
from finecast.native.profiling import profile as profiled
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.progress import Phases, Progress, reporting
from finecast.reports import drawn
from finecast.reports.content import Sources, content_of
from finecast.reports.plan_report import PlanReport, read_part, report_path
from finecast.rules.policy import DEFAULT_POLICY, Policy, Scope
from finecast.rules.user_rules import without_opinion
from finecast.tuning import workers
from finecast.tuning.blaming import Blame, samples_of
from finecast.tuning.blaming import blame as blamed
from finecast.tuning.difference import Difference, Side, difference
from finecast.tuning.emulating import EmulationReport
from finecast.tuning.emulating import emulate as emulated
from finecast.tuning.explanation import Explanation
from finecast.tuning.goal import Execution, Goal, Objective, TuneRequest
from finecast.tuning.judging import BlameOptions, MetricJudge, judge_of
from finecast.tuning.recorded import is_plan, recorded
from finecast.tuning.result import Result
from finecast.tuning.tune import tune as search

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import openvino
    import torch
    from torch.export import ExportedProgram

ModelInMemory: TypeAlias = (
    "onnx.ModelProto | ir.Model | openvino.Model | torch.nn.Module | ExportedProgram"
)
"""An object of a library that is a model; so is one of Keras, which has no types."""
Model: TypeAlias = "OpenedModel | str | Path | ModelInMemory"
"""A model as functions here accept it: loaded, a path, or an object of its library."""

_OF_METRICS: Final = ("metric", "evaluate", "lower_is_better", "of", "groups", "baseline")
_OF_JUDGING: Final = (*_OF_METRICS, "verify", "lock")
_OF_READING: Final = ("from_type", "example_inputs", "example_kwargs", "dynamic_shapes")
_OF_TUNING: Final = (
    Destination,
    TuneRequest,
    Goal,
    Criterion,
    DataOptions,
    ReadOptions,
    Execution,
)
_AS_IT_IS: Final = ReadOptions()


@checked(ReadOptions, without=("from_type",))
def load(
    model: Model, *, output: str | Path | None = None, **options: Unpack[keywords.LoadKeywords]
) -> OpenedModel:
    """Read a model from its path, or take one in memory; external data stays on disk.

    Args:
        model: The model, or its path.
        output: Where a result will go. Its name decides which library opens a model that
            several read: a SavedModel may give another, or OpenVINO's IR.
        options: ``trust``, for files that bring code; ``example_inputs``, ``example_kwargs``
            and ``dynamic_shapes`` of a PyTorch module, as in ``ReadOptions``.

    Raises:
        UsageError: If there is no such file, or it is not a model.
        ModelError: If the model is incomplete.
    """
    return _opened(model, group_of(ReadOptions, options), output)


def _opened(model: Model, how: ReadOptions, output: str | Path | None = None) -> OpenedModel:
    """The model as a verb works on it: its ops in ``how.from_type`` are taken to fp32."""
    found = opened(model, how, output=None if output is None else Path(output))
    return found if how.from_type is None else found.to_fp32(how.from_type)


@checked(Destination, RunOptions, DataOptions, ReadOptions, without=_OF_METRICS)
def convert(
    model: Model,
    output: Destination | str | Path | None = None,
    policy: Policy | str = DEFAULT_POLICY,
    *,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    target: Emulation | str | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.ConvertKeywords],
) -> Result:
    """Convert a model by a policy, verify it in an engine, and write it.

    Args:
        model: The model, or its path.
        output: Where the converted model goes; None: it is only the result's ``model``.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        data: An npz with the model's inputs, arrays by name, or batches: their ranges guide
            the rules, and the result is verified on the first batch. Without data it is
            verified on random feeds.
        engine: ``NAME[:DEVICE]``; by default the first that runs the model, or an emulator.
        target: A device that is not here, by name or with options: the model has its formats.
        progress: True shows progress on a terminal and in a notebook, False nothing; or a
            function that is told of each step.
        options: Options of ``Destination``, ``RunOptions``, ``DataOptions`` and
            ``ReadOptions`` by name, such as ``force``, ``verify``, ``dims``, ``calib``,
            ``from_type``, ``user_rules``, ``example_inputs``; ``help`` lists them.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    written = group_of(Destination, options, path=output)
    asked = Policy.of(policy)
    run = _run_options(options, data, engine=engine, device=_device_for(asked, target))
    given, files = declared(model, group_of(ReadOptions, options), written, run.data)
    for path in _lock_files(written, run):
        files.write("the lock", path)
    with reporting(progress, "converting") as report, files.locked() as removed:
        done = given().convert(written, asked, replace(run, progress=report))
        said = without_opinion(run.user_rules, done.plan.reasons)
        if run.data is not None and run.verify:
            said = (*said, *_judged_by_chosen(run.data, done.plan))
        done = replace(done, warnings=(*removed, *done.warnings, *said))
        result = Result.of(done)
        if run.lock:
            result = _locked_by_data(result, given(), run)
    return _savable(result, given)


def _lock_files(written: Destination, run: RunOptions) -> Sequence[Path]:
    """The files of the lock that is asked for; none if none is.

    Raises:
        UsageError: If there can be none.
    """
    if not run.lock:
        return ()
    if run.device is not None or not run.verify:
        raise UsageError(
            "a lock is of a model that ran in an engine here",
            where="--lock",
            fix="leave out --target and --no-verify",
        )
    if written.path is None or run.data is None:
        raise UsageError(
            "a lock has samples of data, and stands beside a file",
            where="--lock",
            fix="give --data and -o",
        )
    return lock_files(written.path)


def _locked_by_data(result: Result, given: OpenedModel, run: RunOptions) -> Result:
    """``result``, whose written model has a lock with the first samples of the data."""
    assert run.data is not None
    reference = given.reference()
    calls = calibration_batches(reference, replace(run.data, rows=given.rows_read))
    runner = Runner.of(get_engine(result.verified.engine or "").judges)
    return _locked(result, runner, reference, chosen(calls[:1], calls))


@checked(
    *(Destination, RunOptions, DataOptions, ReadOptions),
    without=(*_OF_METRICS, "user_rules", "lock"),
)
def apply(
    plan: Plan | str | Path,
    model: Model,
    output: Destination | str | Path | None = None,
    *,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    **options: Unpack[keywords.ApplyKeywords],
) -> Result:
    """Write the model that a plan gives; without ``output`` it is only the result's ``model``.

    The model may be another version of the one that the plan was made for: retrained, changed
    or exported anew. Ops that the plan does not know stay fp32, which a warning says.

    ``options`` are as for ``convert``.

    Raises:
        FinecastError: If the plan was made for another model, or as for ``convert``.
    """
    written = group_of(Destination, options, path=output)
    run = _run_options(options, data, engine=engine)
    how = group_of(ReadOptions, options)
    given, files = declared(model, how, written, run.data, plan=plan)
    stated = _plan(plan)
    assert stated is not None
    with files.locked() as removed:
        done = given().apply(written, stated, run)
    done = replace(done, warnings=(*removed, *done.warnings))
    return _savable(Result.of(done), given)


@checked(*_OF_TUNING)
def tune(
    model: Model,
    output: Destination | str | Path | None = None,
    *,
    policy: Policy | str = DEFAULT_POLICY,
    data: DataOptions | Data | None = None,
    goal: Goal | None = None,
    engine: str | None = None,
    target: Emulation | str | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.TuneKeywords],
) -> Result:
    """Find the fastest mixed-precision model that keeps the accuracy; write it if it helps.

    Nothing is written where the verdict is UNCHANGED.

    Args:
        model: The model, or its path.
        output: Where the model goes; None: it is only the result's ``model``.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        data: An npz file, arrays by name, or batches that can be iterated again and again,
            such as a DataLoader; or DataOptions.
        goal: The accuracy to keep, the objective and the budget.
        engine: ``NAME[:DEVICE]``; by default the first that runs the model.
        target: A device that is not here: accuracy is emulated and times are modelled.
        progress: As for ``convert``.
        options: Single options by name. Of the data (``DataOptions``): ``metric``,
            ``labels``, ``evaluate``, ``calib``, ``batch``, ``of``. Of the accuracy
            (``Criterion``): ``tolerance``, ``criterion``, ``max_drop``, ``keep``. Of the
            search (``Goal``): ``objective``, ``min_speedup``, ``max_trials``, ``timeout_s``.
            Of the files (``Destination``, ``TuneRequest``): ``force``, ``external_data``,
            ``plan_out`` (by default beside ``output``: ``m.plan.json`` for ``m.onnx``,
            ``m.pt2.plan.json`` for ``m.pt2``), ``study`` (likewise), ``resume``,
            ``start`` (a plan to begin with), ``report`` (a page of what was found and why,
            or a picture of all plans), ``price_book``. Of where plans are evaluated
            (``Execution``): ``jobs``, ``executor``. And ``user_rules``, ``from_type``,
            ``example_inputs``, ``trust``; ``help`` lists all.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    written, request, how = _asked(
        output, policy=policy, data=data, goal=goal, engine=engine, target=target, **options
    )
    with reporting(progress, "tuning") as report:
        return tuned(model, written, replace(request, progress=report), how)


def _asked(
    output: Destination | str | Path | None = None,
    *,
    policy: Policy | str = DEFAULT_POLICY,
    data: DataOptions | Data | None = None,
    goal: Goal | None = None,
    engine: str | None = None,
    target: Emulation | str | None = None,
    progress: Progress | bool = True,
    **options: Any,
) -> tuple[Destination, TuneRequest, ReadOptions]:
    """What ``tune`` is asked for, as values; the model is not looked at.

    Raises:
        UsageError: If it can be asked of no model.
    """
    written = group_of(Destination, options, path=output)
    request = group_of(TuneRequest, options)
    plan = request.plan_out
    if plan is None and written.path is not None:
        plan = plan_beside(written.path)
    study = request.study
    if study is None and written.path is not None:
        study = study_beside(written.path)
    request = replace(
        request,
        data=group_of(DataOptions, options, data=data),
        goal=_goal(goal, options),
        policy=Policy.of(policy),
        engine=engine,
        device=_device(target),
        plan_out=plan,
        study=study,
        execution=group_of(Execution, options),
    )
    return written, request, group_of(ReadOptions, options)


asked = checked(*_OF_TUNING, verb="tune")(_asked)
"""``_asked``, which checks its arguments as ``tune`` does."""


def _goal(goal: Goal | None, options: Mapping[str, Any]) -> Goal:
    """The goal, whose criterion may be given by itself.

    Raises:
        UsageError: If the goal is given, and a part of it.
    """
    stated = options.get("criterion")
    whole = stated if isinstance(stated, Criterion) else None
    single = {k: v for k, v in options.items() if v is not whole}
    kept = group_of(Criterion, single, kind=whole)
    if goal is not None and kept != Criterion():
        raise UsageError("a criterion is given beside Goal", fix="set its criterion")
    made = group_of(Goal, options, criterion=goal)
    return made if goal is not None else replace(made, criterion=kept)


def uncertified(options: Mapping[str, Any]) -> Criterion:
    """The criterion of a verb that certifies nothing.

    Raises:
        UsageError: If it has a confidence, which would have no effect.
    """
    found = _goal(None, options).criterion
    if found.confidence is not None:
        raise UsageError(
            "only tune certifies what it finds", where="--confidence", fix="leave it out"
        )
    return found


def tuned(
    model: Model,
    output: Destination,
    request: TuneRequest,
    how: ReadOptions = _AS_IT_IS,
) -> Result:
    """``tune`` with its options as values.

    Raises:
        FinecastError: As ``tune``.
    """
    given, files = declared(
        model, how, output, request.data, plan=request.start, study=request.study
    )
    for role, path in _beside(request, output):
        files.write(role, path)
    files.write("the report", request.report)
    with files.locked() as removed, study_at(request.study, resume=request.resume) as study:
        removed += [*misplaced(), *remove_damaged()] if request.price_book else []
        outcome = _searched(given(), how, output, request, study)
        found = filter(None, (request.study, request.report))
        outcome = replace(outcome, source=given().source, files=(*found, *outcome.files))
        if study is not None or request.report is not None:
            report = outcome.report()
            if study is not None:
                study.keep(outcome.plan.model, outcome.plan.digest, report.to_json())
            if request.report is not None and request.report.suffix.lower() == ".svg":
                picture = drawn("picture")(outcome.to_dict(), given().source.name)
                write_text(request.report, picture)
            elif request.report is not None:
                report.save(request.report, force=output.force)
    warnings = (*removed, *_told(request, outcome))
    return _savable(replace(outcome, stale=files.stale(), warnings=warnings), given)


def _told(request: TuneRequest, outcome: Result) -> Iterator[str]:
    """The warnings of a search, and those that its options and its time give."""
    yield from _judged_by_chosen(request.data, outcome.plan)
    yield from outcome.warnings
    timeout_s = request.goal.timeout_s
    if timeout_s is not None and outcome.seconds > timeout_s:
        yield (
            f"took {outcome.seconds:.1f} s, longer than the --timeout of {timeout_s:g} s:"
            " what comes before the first trial, a trial, and writing are not cut short"
        )


def _judged_by_chosen(data: DataOptions, plan: Plan) -> Iterator[str]:
    """A warning if the data by which codes were chosen are among those that judge them."""
    constants = (one for e in plan.encodings.values() for one in e.constants.values())
    if not data.calibrates_apart and any(one.shifts for one in constants):
        yield (
            "gptq chose codes by the data that judge the result: on other data it may lose"
            " more than is stated here; give data of their own to choose by (--calib)"
        )


def _beside(request: TuneRequest, output: Destination) -> Iterator[tuple[str, Path]]:
    """The files beside the output: their roles and their paths."""
    if request.plan_out is not None:
        yield "the plan", request.plan_out
    for path in lock_files(output.path) if output.path is not None and request.lock else ():
        yield "the lock", path


def _savable(result: Result, given: Callable[[], OpenedModel]) -> Result:
    """``result``, which ``save`` writes by its plan."""

    def write(output: Destination) -> object:
        return apply(result.plan, given(), output)

    return replace(result, writer=write)


def _searched(
    model: OpenedModel,
    how: ReadOptions,
    output: Destination,
    options: TuneRequest,
    study: Study | None,
) -> Result:
    """The outcome of a search, its model written if it is better."""
    with workers.evaluating(model, how, output.path, options) as worker:
        subject = model.subject(options.engine, options.device)
        subject.keeps_prices, subject.study = options.price_book, study
        executor = worker(subject)
        data = options.data.loaded() if executor is None else executor.data()
        workload = model.workload(data, subject.reference)
        criterion = replace(options.goal.criterion, higher_is_better=workload.higher_is_better)
        outcome = search(
            subject,
            workload,
            replace(options.goal, criterion=criterion),
            options.policy,
            user_rules=tuple(options.user_rules.items()),
            executor=executor,
            start=_plan(options.start),
            progress=options.progress,
        )
        metric = options.data.label or "metric"
        outcome = replace(outcome, metric=metric, asked=output.path)
    phases = Phases(options.progress, "write", options.goal.start_s + outcome.seconds)
    if output.path is not None and outcome.built is not None:
        size, verified = model.write(outcome.built, output, subject, workload)
        outcome = replace(outcome.of_size(size), verified=verified, output=output.path)
        if options.lock and not subject.target and subject.verifiers:
            throughput = outcome.objective is Objective.THROUGHPUT
            runner = Runner.of(subject.verifiers[0].judges, throughput=throughput)
            calls = chosen(workload.compared(), workload.evaluated())
            # A compiled module's speed is not that of the module as it is, which is locked.
            speedup = outcome.speedup if runner.name == subject.runs_in else None
            outcome = _locked(outcome, runner, subject.reference, calls, speedup)
    if options.plan_out is not None and outcome.improved:
        write_text(options.plan_out, outcome.plan.to_json())
        outcome = replace(outcome, plan_out=options.plan_out)
    if study is not None or options.report is not None:
        phases("kernels", 0, 1)
        outcome = replace(outcome, fp32_kernels=tuple(subject.kernels(None, workload)))
    outcome = replace(outcome, model=model.given_back(outcome.built))
    outcome = outcome.and_then(phases.seconds())
    said = without_opinion(options.user_rules, outcome.plan.reasons)
    run = outcome.run_notes if outcome.output is None else ()
    warnings = (*outcome.warnings, *workload.warnings, *said, *run)
    return replace(outcome, warnings=warnings)


def _locked(
    outcome: Result,
    runner: Runner,
    reference: Session,
    calls: Sequence[Feeds],
    speedup: float | None = None,
) -> Result:
    """``outcome``, whose written model has a lock; a warning where it can have none."""
    assert outcome.output is not None
    deployed = Deployed(path=outcome.output, runner=runner, reference=reference, calls=calls)
    lock = lock_beside(outcome.output)
    try:
        accuracy = outcome.accuracy if outcome.improved else {}  # converted: no metric
        deployed.lock(outcome.plan.digest, accuracy, speedup).write(lock)
    except EngineError as error:
        told = f"no lock was written: {error.what}"
        return replace(outcome, warnings=(*outcome.warnings, told))
    return replace(outcome, lock=lock)


def declared(
    model: Model,
    how: ReadOptions,
    output: Destination,
    data: DataOptions | None,
    *,
    plan: Plan | str | Path | None = None,
    study: Path | None = None,
) -> tuple[Callable[[], OpenedModel], CommandFiles]:
    """A function that gives the model, and all files of a call.

    The function takes the model to fp32 where ``how`` says so, which takes a while.

    Raises:
        UsageError: If a file that is read would be written.
        ModelError: If a conversion made the model.
    """
    found = opened(model, how, output=output.path)
    found.check_original()
    files = CommandFiles(force=output.force)
    files.read("the model", found.path)
    files.read("the model's external data", *found.external)
    for option, path in data.reads if data is not None else ():
        files.read(f"the file of {option}", path)
    files.read("the plan", None if isinstance(plan, Plan) else plan)
    result = written_with(found.path, output)
    files.write("the output", output.path, beside=result.beside, folder=result.folder)
    if output.path is not None:
        check_output_name(found.path, output.path)
        check_written(type(found).__module__, output.path)
    found.check(output)
    files.write("the study", study, beside=journals(study), replaces=False)
    taken = how.from_type
    return cache(lambda: found if taken is None else found.to_fp32(taken)), files


@checked(DataOptions, ReadOptions, without=_OF_METRICS)
def inspect(
    model: Model,
    *,
    data: DataOptions | Data | None = None,
    low: Format = Format.BF16,
    **options: Unpack[keywords.InspectKeywords],
) -> Census:
    """Count a model's ops by class; with ``data``, report values that ``low`` cannot hold.

    Shapes are observed on data; without data on one random batch, of ``batch`` samples and
    the sizes in ``dims``, if the model runs on it. ``options`` are those of ``DataOptions``
    and ``ReadOptions``, such as ``labels``, ``from_type``, ``trust``.

    Raises:
        FinecastError: If the model or the data cannot be read.
    """
    run = _run_options(options, data, sizes_feeds=True)
    given = _opened(model, group_of(ReadOptions, options))
    return given.census(replace(run, own=given is not model), low)


@checked(RunOptions, DataOptions, ReadOptions, without=_OF_JUDGING)
def judge(
    model: Model,
    policy: Policy | str,
    *,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    target: Emulation | str | None = None,
    **options: Unpack[keywords.ExplainKeywords],
) -> tuple[Graph, Plan]:
    """What the rules alone say of each op: the model's graph, and the lowest plan they permit.

    With ``data`` the rules see the ranges of the model's values on it. ``data`` and
    ``options`` are as for ``convert``.

    Raises:
        FinecastError: If the model cannot be read or rules conflict.
    """
    asked = Policy.of(policy)
    run = _run_options(options, data, engine=engine, device=_device_for(asked, target))
    return _opened(model, group_of(ReadOptions, options)).judge(asked, run)[:2]


@checked(RunOptions, DataOptions, ReadOptions, without=_OF_JUDGING)
def explain(
    model: Model,
    node: str | None = None,
    *,
    plan: Plan | str | Path | None = None,
    policy: Policy | str = DEFAULT_POLICY,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    target: Emulation | str | None = None,
    **options: Unpack[keywords.ExplainKeywords],
) -> Explanation:
    """Why an op has its format in a plan: what decided, and every rule's verdict.

    Args:
        model: The model, or its path.
        node: The op's name; None for a summary of all.
        plan: The plan; without it the rules alone are asked, under ``policy``.
        policy: As for ``convert``, like ``data``, ``target`` and ``options``.
        data: Their ranges guide the rules.
        engine: The engine whose kernels are compared; by default that of the plan.
        target: A device that is not here.
        options: Options of ``RunOptions``, ``DataOptions`` and ``ReadOptions`` by name.

    Raises:
        FinecastError: If the model cannot be read, it has no such node, or rules conflict.
    """
    if node is not None and not isinstance(node, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(
            f"node is a {type(node).__name__}, not the name of an op",
            fix="give an op by its name, and a plan by plan=",
        )
    how, stated = group_of(ReadOptions, options), _plan(plan)
    if stated is not None:
        read = opened(model, how, plan=stated)
        found, told = read.placed(stated)
        graph = read.graph_for(found)
    else:
        asked = Policy.of(policy)
        run = _run_options(options, data, engine=engine, device=_device_for(asked, target))
        read = _opened(model, how)
        graph, found, told = read.judge(asked, run)
    if node is None:
        return Explanation(graph=graph, plan=found, warnings=told)
    names = [one.name for one in graph.nodes]
    if node not in names:
        raise unknown_name(node, names, what="node")
    explained = Explanation(graph=graph, plan=found, node=graph.find(node), warnings=told)
    decision = explained.decision
    if target is not None or decision is None or decision.format is Format.FP32:
        return explained
    own = found.engine if found.engine in ENGINES else None
    try:
        broken = read.fallen_apart(found, engine or own)
    except EngineError as error:
        return replace(explained, warnings=(*told, f"kernels were not compared: {error.line}"))
    apart = [one.text for one in broken if any(node in part for part in one.parts)]
    return replace(explained, apart=apart)


def _plan(given: Plan | str | Path | None) -> Plan | None:
    return given if given is None or isinstance(given, Plan) else Plan.load(Path(given))


@checked(DataOptions, ReadOptions, without=("dims", "groups", "baseline", "from_type"))
def emulate(
    model: Model,
    target: Emulation | str,
    policy: Policy | str = "none",
    *,
    data: DataOptions | Data | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.EmulateKeywords],
) -> EmulationReport:
    """What a device that is not here would do to a model's metric and outputs.

    Args:
        model: The model, or its path.
        target: The device, by name (``finecast targets``) or with options.
        policy: What its compiler casts: a scope and one format, such as ``all:bf16``. It is
            for a device by name; one with options has its own.
        data: The data, as for ``tune``.
        progress: As for ``convert``.
        options: Options of ``DataOptions`` and ``ReadOptions`` by name: ``metric``, ``batch``.

    Raises:
        FinecastError: If the model cannot be emulated, or the device cannot do that.
    """
    emulation = _casting(target, Policy.of(policy))
    stated = group_of(DataOptions, options, data=data).loaded()
    given = _opened(model, group_of(ReadOptions, options))
    loaded = given.reference()
    workload = given.workload(stated, loaded)
    with reporting(progress, "emulating") as report:
        found = emulated(given, loaded, emulation, workload, progress=report)
    return replace(
        found,
        target=emulation.target.name,
        metric_name=stated.label,
        warnings=tuple(workload.warnings),
    )


@checked(
    *(BlameOptions, Criterion, DataOptions, ReadOptions),
    without=("dims", "groups", "baseline", "confidence", "score_range"),
)
def blame(
    model: Model,
    low: Model | Plan | Emulation,
    *,
    policy: Policy | str = "none",
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.BlameKeywords],
) -> Blame:
    """Which ops of a low model cost its accuracy: the fewest whose return to fp32 restores it.

    Args:
        model: The fp32 model, or its path.
        low: A low version of it by any tool; or a plan or its path (``.json``), for the model
            that it gives; or a device, by name or with options, that runs the fp32 model.
        policy: What the device's compiler casts, as for ``emulate``.
        data: The data, as for ``tune``. Without a metric the outputs' error is judged.
        engine: ``NAME[:DEVICE]`` that runs both; by default numbers are as the types state.
        progress: As for ``convert``.
        options: Options of ``BlameOptions``, ``Criterion``, ``DataOptions`` and
            ``ReadOptions`` by name: ``check``, ``max_error``, ``metric``, ``max_drop``.

    Raises:
        FinecastError: If the models cannot be compared or run.
    """
    how, asked = group_of(ReadOptions, options), group_of(BlameOptions, options).loaded()
    stated = group_of(DataOptions, options, data=data).loaded()
    criterion = uncertified(options)
    asked.check_beside(stated, criterion)
    given = _opened(model, how)
    given.check_original()
    with reporting(progress, "comparing") as report:
        beside = _low_of(given, how, low, engine=engine, policy=Policy.of(policy))
        reference = CachedSession(given.reference())
        workload = given.workload(stated, reference)
        judge = judge_of(asked, stated, criterion, workload, beside, reference)
        exact = samples_of(workload, reference, len(beside.groups))
        found = blamed(beside, judge, exact, progress=report)
    doubts = workload.warnings if isinstance(judge, MetricJudge) else ()
    return replace(found, warnings=(*doubts, *found.warnings))


def _low_of(
    given: OpenedModel,
    how: ReadOptions,
    low: Model | Plan | Emulation,
    *,
    engine: str | None,
    policy: Policy,
) -> LowModel:
    """The low model beside the fp32 one: that of a plan is built, a device is emulated."""
    if isinstance(low, Emulation) or (isinstance(low, str) and low in list_targets()):
        if engine is not None:
            raise UsageError(
                "a device that is not here runs in its emulator",
                where="--engine",
                fix="leave it out",
            )
        emulation = _casting(low, policy)
        name = f"{given.name} on {emulation.target.name}"
        return EmulatedLow(program=given.program(emulation), emulation=emulation, name=name)
    if policy.scope is not Scope.NONE:
        raise UsageError(
            "what is cast is stated for a device, and a model is given",
            where="policy",
            fix="leave it out",
        )
    stated = _plan_or_model(low, how)
    if isinstance(stated, Plan):
        made = given.given_back(given.build(replace(stated, by_hint=False)))
        stated = opened(made, how)
    return given.beside(stated, engine)


def _casting(target: Emulation | str, policy: Policy) -> Emulation:
    """The device with what its compiler casts, which one with options says itself.

    Raises:
        UsageError: If the device cannot do that.
    """
    if isinstance(target, Emulation):
        return target
    emulation = explicit_casts(target)
    if policy.scope is Scope.NONE:
        return emulation
    check_formats(emulation, policy)
    emulation = replace(emulation, scope=policy.scope, format=policy.format)
    check(emulation)
    return emulation


@checked(Rounds, DataOptions, ReadOptions, without=(*_OF_METRICS, "from_type"))
def profile(
    models: Model | Sequence[Model],
    *,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    rounds: Rounds | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.ProfileKeywords],
) -> ProfileReport:
    """Latency, throughput and peak memory of models, compared with those of the first.

    Args:
        models: A model, or several, which run in turns: paths or objects of their libraries.
        data: The feeds, as for ``convert``; random ones without data.
        engine: ``NAME[:DEVICE]``; by default the first that runs all of them.
        rounds: How long they are timed.
        progress: As for ``convert``.
        options: Options of ``Rounds`` and ``DataOptions`` by name, such as ``ops``,
            ``seconds``, ``batch``, ``dims``; and of ``ReadOptions``: ``trust``, and
            ``example_inputs`` of PyTorch modules.

    Raises:
        FinecastError: If a model cannot be read or run.
    """
    several = models if isinstance(models, list | tuple) else [models]
    stated = group_of(DataOptions, options, data=data)
    how = group_of(Rounds, options, runs=rounds)
    read = group_of(ReadOptions, options)
    with reporting(progress, "profiling") as report:
        return profiled(several, engine, stated, how, read=read, report=report)


@checked(VerifyOptions)
def verify(
    model: str | Path,
    *,
    deployed: object | None = None,
    **options: Unpack[keywords.VerifyKeywords],
) -> Verification:
    """Whether a tuned model does on this machine what it did where it was tuned.

    Its lock, which ``tune`` writes beside it, has what decides numbers (the engine and its
    version, instruction sets, settings, kernels), some samples with their outputs, and the
    time of a call. Neither data nor the fp32 model are needed.

    Args:
        model: The path of the model.
        deployed: What runs the model in production, to be verified itself: a compiled model of
            OpenVINO, an inference session of ONNX Runtime, a PyTorch module, or a function
            that takes arrays by the inputs' names and returns the outputs.
        options: ``lock`` (its path, if it is not beside the model), ``settings`` (of the
            engine, as the model is deployed) and ``strict``.

    Raises:
        FinecastError: If there is no lock, or the model cannot be run here.
    """
    return verified(Path(model), group_of(VerifyOptions, options), deployed)


@checked(ReadOptions, without=_OF_READING)
def diff(
    before: Plan | Model, after: Plan | Model, **options: Unpack[keywords.ReadingKeywords]
) -> Difference:
    """What differs between two plans, two models, or a plan and a new version of its model.

    Ops are matched by name, else by structure: models may be exports of one net by other
    tools or of other formats. Of a plan and a model the result says what ``apply`` would do.

    Args:
        before: A plan or its path, or a model or its path.
        after: The same.
        options: ``trust``, for models in files that bring code.

    Raises:
        FinecastError: If a plan or a model cannot be read.
    """
    how = group_of(ReadOptions, options)
    first, second = _plan_or_model(before, how), _plan_or_model(after, how)
    if isinstance(first, Plan) and not isinstance(second, Plan):
        placement = second.placement(first)
        sides = Side.of_plan(first, _named(before)), Side.of_plan(placement.plan, second.name)
        return replace(difference(*sides), placement=placement)
    return difference(_side(first, _named(before)), _side(second, _named(after)))


def _plan_or_model(given: Plan | Model, how: ReadOptions) -> Plan | OpenedModel:
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | Path):
        path = Path(given)
        if path.suffix.lower() == ".json" or holds_object(path):
            return Plan.load(path)
    return opened(given, how)


def _named(given: Plan | Model) -> str:
    """What a plan or a model is called: its path, if one was given."""
    return str(given) if isinstance(given, str | Path) else type(given).__name__


def _side(given: Plan | OpenedModel, name: str) -> Side:
    plan = isinstance(given, Plan)
    return Side.of_plan(given, name) if plan else Side.of_graph(given.read_graph(), name)


@checked()
def report(
    source: Plan | str | Path,
    output: str | Path | None = None,
    *,
    model: Model | None = None,
    study: str | Path | None = None,
    diff: Plan | Model | None = None,
    blame: Blame | str | Path | None = None,
    force: bool = False,
) -> PlanReport:
    """What is known of a plan, and why each op has its format, for people to look at.

    Nothing is searched or measured: ``tune`` keeps what a report needs in its study.

    Args:
        source: A plan, a study, or the data of a report; or their path. Of a study the last
            run counts.
        output: A page (``.html``) or its data (``.json``) that is written.
        model: The model that the plan was made for: without a study it tells which ops are
            around one another.
        study: The study in which the plan was found; by default the one beside the plan.
        diff: An earlier plan or another version of the model: what differs from it.
        blame: The ops to blame in a low model, or the file of ``finecast blame --json``.
        force: Whether an existing output may be replaced.

    Raises:
        UsageError: If there is no such plan or study, or the output may not be written.
        ModelError: If the plan was made for another model.
    """
    path = report_path(output)
    files = CommandFiles(force=force)
    files.read("the source", None if isinstance(source, Plan) else source)
    files.read("the study", study)
    files.read("the other side", diff if isinstance(diff, str | Path) else None)
    files.read("the blame", blame if isinstance(blame, str | Path) else None)
    files.write("the report", path)
    found = recorded(source, None if study is None else Path(study))
    plan = found if isinstance(found, Plan) else None
    given = None if model is None else opened(model, plan=plan)
    if isinstance(found, Plan):
        if given is not None:
            found, _ = given.placed(found)
        graph = None if given is None else given.graph_for(found)
        name = "model" if given is None else given.source.name
        found = PlanReport(content=content_of(Sources(model=name, plan=found, graph=graph)))
    elif given is not None:
        _check_same_model(given, found, source)
    found = found.beside(
        diff=None if diff is None else _difference_from(diff, source).to_dict(),
        blame=blame.to_dict() if isinstance(blame, Blame) else _part_at(blame),
    )
    with files.locked():
        if path is not None:
            found.save(path, force=force)
    return found


def _part_at(path: str | Path | None) -> dict[str, Any] | None:
    """A part of a report that a file has; None without one."""
    return None if path is None else read_part(Path(path))


def _difference_from(before: Plan | Model, source: Plan | str | Path) -> Difference:
    """What differs from ``before`` in the plan of a report.

    Raises:
        UsageError: If the report is of a study or of data, which have no plan to compare.
    """
    if isinstance(source, str | Path) and not is_plan(Path(source)):
        raise UsageError(
            "a study or a report's data has no plan that can be compared",
            where=str(source),
            fix="give the plan",
        )
    return diff(before, source)


def _check_same_model(
    given: OpenedModel, found: PlanReport, source: Plan | str | Path
) -> None:
    """Raise UsageError unless a report is of this model, be it from memory or another file."""
    stated = found.content["model"]
    if given.digest == stated["digest"]:
        return
    differs = ""
    if isinstance(source, Plan) or is_plan(Path(source)):
        placement = given.placement(
            source if isinstance(source, Plan) else Plan.load(Path(source))
        )
        if placement.same:
            return
        differs = f"; the plan is {placement.note}"
    raise UsageError(
        f"the report is of another model: {stated['name']}{differs}",
        where=str(given.source),
        fix="leave the model out: the report has all that it shows",
    )


def graph_for(model: Model, plan: Plan) -> Graph:
    """The graph whose nodes ``plan`` names.

    Raises:
        ModelError: If the plan was made for another model.
    """
    return opened(model, plan=plan).graph_for(plan)


def _run_options(
    options: Mapping[str, Any],
    data: DataOptions | Data | None,
    *,
    engine: str | None = None,
    device: Emulation | None = None,
    sizes_feeds: bool = False,
) -> RunOptions:
    """How a verb runs a model; ``sizes_feeds`` says that ``batch`` sizes random feeds."""
    stated = group_of(DataOptions, options, data=data)
    return replace(
        group_of(RunOptions, options),
        engine=engine,
        device=device,
        data=stated.if_given(sizes_feeds=sizes_feeds),
        dims=stated.dims,
        batch=(stated.batch or 1) if sizes_feeds else 1,
    )


def _device(target: Emulation | str | None) -> Emulation | None:
    return explicit_casts(target) if isinstance(target, str) else target


def _device_for(policy: Policy, target: Emulation | str | None) -> Emulation | None:
    """The device; UsageError if it does not compute in a format of ``policy``."""
    device = _device(target)
    if device is not None:
        check_formats(device, policy)
    return device
