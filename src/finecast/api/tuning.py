"""Python's verb ``tune``."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Unpack

from finecast import keywords
from finecast.api.application import savable
from finecast.api.conversion import judged_by_chosen, locked
from finecast.api.models import Model, file_in, plan_of
from finecast.api.other_engines import in_other_engines
from finecast.api.outputs import declared
from finecast.api.requests import data_of, device_of, goal_of
from finecast.arguments import checked, group_of
from finecast.data.criterion import Criterion
from finecast.data.golden import chosen
from finecast.data.options import Data, DataOptions
from finecast.devices.emulation import Emulation
from finecast.engines.base import calls_of
from finecast.errors import UsageError
from finecast.evaluation import workers
from finecast.files import CommandFiles, write_text
from finecast.measure.study import Study, study_at
from finecast.measure.timing_cache import misplaced, remove_damaged
from finecast.naming import number_of
from finecast.native.artefact import Destination
from finecast.native.engine_times import EngineTime, faster
from finecast.native.lock import Runner, lock_files
from finecast.native.model import OpenedModel, OtherSizesError, ReadOptions
from finecast.native.opening import plan_beside, study_beside
from finecast.native.subject import Subject
from finecast.numbers.formats import Format
from finecast.progress import Phases, Progress, reporting
from finecast.reports import drawn
from finecast.rules.policy import DEFAULT_POLICY, Policy
from finecast.rules.user_rules import without_opinion
from finecast.tuning.goal import (
    LOCAL,
    Budget,
    Execution,
    Goal,
    Objective,
    TuneRequest,
    megabytes,
)
from finecast.tuning.result import Result
from finecast.tuning.tune import Place
from finecast.tuning.tune import tune as search

OF_TUNING: Final = (
    Destination,
    TuneRequest,
    Goal,
    Criterion,
    DataOptions,
    ReadOptions,
    Execution,
)
_AS_IT_IS: Final = ReadOptions()
_LOADED_AGAIN_BYTES: Final = 1 << 30
"""The largest model that is loaded in other engines, too."""


@checked(*OF_TUNING)
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
        data: A file (.npz, .csv, .parquet), a folder of images, a table, arrays by name, or
            batches that can be iterated again and again, such as a DataLoader; or
            DataOptions.
        goal: The accuracy to keep, the objective and the budget.
        engine: ``NAME[:DEVICE]``; by default the one in which the fp32 model, or what the
            engine makes of it by its own hint, is fastest.
        target: A device that is not here: accuracy is emulated and times are modelled. With
            ``"h100:90%"`` the accuracy has to be kept in 90% of the orders of summation.
        progress: As for ``convert``.
        options: Single options by name. Of the data (``DataOptions``): ``metric``,
            ``labels``, ``evaluate``, ``calib``, ``batch``, ``of``. Of the accuracy
            (``Criterion``): ``tolerance``, ``criterion``, ``max_drop``, ``keep``. Of the
            search (``Goal``): ``preset``, ``objective``, ``min_speedup``, ``max_size``,
            ``max_bits``, ``max_trials``, ``timeout_s``.
            Of the files (``Destination``, ``TuneRequest``): ``force``, ``external_data``,
            ``plan_out`` (by default beside ``output``: ``m.plan.json`` for ``m.onnx``,
            ``m.pt2.plan.json`` for ``m.pt2``), ``study`` (likewise), ``resume``,
            ``start`` (a plan to begin with), ``report`` (a page of what was found and why,
            or a picture of all plans), ``timing_cache``. Of where plans are evaluated
            (``Execution``): ``jobs``, ``executor``. And ``user_rules``, ``from_type``,
            ``example_inputs``, ``trust``; ``help`` lists all.

    Raises:
        FinecastError: One of its kinds, with what is wrong, where, and what to do.
    """
    written, request, how = asked(
        output, policy=policy, data=data, goal=goal, engine=engine, target=target, **options
    )
    with reporting(progress, "tuning") as report:
        return tuned(model, written, replace(request, progress=report), how)


@checked(*OF_TUNING, verb="tune")
def asked(
    output: Destination | str | Path | None = None,
    **options: Unpack[keywords.RequestKeywords],
) -> tuple[Destination, TuneRequest, ReadOptions]:
    """What ``tune`` is asked for, as values; the model is not looked at.

    Raises:
        UsageError: If it can be asked of no model.
    """
    goal = goal_of(options.get("goal"), options)
    request = replace(
        group_of(TuneRequest, options),
        data=data_of(options.get("data"), options, goal.criterion),
        goal=goal,
        policy=Policy.of(options.get("policy", DEFAULT_POLICY)),
        engine=options.get("engine"),
        device=device_of(options.get("target")),
        execution=group_of(Execution, options),
    )
    return group_of(Destination, options, path=output), request, group_of(ReadOptions, options)


def tuned(
    model: Model,
    output: Destination,
    request: TuneRequest,
    how: ReadOptions = _AS_IT_IS,
    files: CommandFiles | None = None,
) -> Result:
    """``tune`` with its options as values; ``files`` are those of the call, if there are.

    Raises:
        FinecastError: As ``tune``.
    """
    path = output.path
    if path is not None:
        output = replace(output, plan_out=output.plan_out or plan_beside(path))
        study = request.study or study_beside(path)
        request = replace(request, study=study)
    files = files or CommandFiles(force=output.force)
    files.read("the plan to start with", file_in(request.start))
    files.write("the plan", output.plan_out)
    for part in lock_files(path) if path is not None and request.lock else ():
        files.write("the deployment manifest", part)
    files.write("the report", request.report)
    given = declared(model, how, output, files, request.data, request.study)
    with files.locked() as removed, study_at(request.study, resume=request.resume) as study:
        removed += [*misplaced(), *remove_damaged()] if request.timing_cache else []
        with _noting_trials(study, given):
            source = given().fitted(request.data)
            try:
                outcome = _searched(source, how, output, request, study)
            except OtherSizesError as error:
                source = error.freed()
                outcome = _searched(source, how, output, request, study)
        requested_files = filter(None, (request.study, request.report))
        outcome = replace(
            outcome, source=source.source, files=(*requested_files, *outcome.files)
        )
        if study is not None or request.report is not None:
            report = outcome.report()
            if study is not None:
                study.keep(outcome.plan.model, outcome.plan.digest, report.to_json())
            if request.report is not None and request.report.suffix.lower() == ".svg":
                picture = drawn("picture")(outcome.to_dict(), source.source.name)
                write_text(request.report, picture)
            elif request.report is not None:
                report.save(request.report, force=output.force)
    warnings = (*removed, *_told(request, outcome))
    return savable(replace(outcome, stale=files.stale(), warnings=warnings), lambda: source)


@contextmanager
def _noting_trials(study: Study | None, given: Callable[[], OpenedModel]) -> Generator[None]:
    """Note on an interruption how many trials of the model the study keeps, if any."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = 0 if study is None else study.count(given().digest)
        if study is not None and kept:
            error.add_note(f"{study.path} keeps {number_of(kept, 'trial')}")
        raise


def _told(request: TuneRequest, outcome: Result) -> Iterator[str]:
    """The warnings of a search, and those that its options and its time give."""
    yield from judged_by_chosen(request.data, outcome.plan)
    yield from outcome.warnings
    goal, written = request.goal, outcome.output is not None and outcome.improved
    if written and goal.max_size is not None and outcome.tuned.size_bytes > goal.max_size:
        takes, most = megabytes(outcome.tuned.size_bytes), megabytes(goal.max_size)
        yield (
            f"the written model takes {takes}, more than the {most} of --max-size: it took"
            " less as it was searched; give a smaller size"
        )
    timeout_s = request.goal.timeout_s
    if timeout_s is not None and outcome.seconds > timeout_s:
        yield (
            f"took {outcome.seconds:.1f} s, longer than the --timeout of {timeout_s:g} s:"
            " what comes before the first trial, a trial, and writing are not cut short"
        )


@dataclass(slots=True, kw_only=True)
class _Places:
    """The engine that a search is in, and how another one is opened.

    Attributes:
        place: Where the search is.
        opened: Opens the model in an engine.
        times: How fast the fp32 model is in each engine, where that was asked.
    """

    place: Place
    opened: Callable[[str | None], Place]
    times: Sequence[EngineTime] = field(default=())

    def elsewhere(
        self, request: TuneRequest, size_bytes: int, progress: Progress
    ) -> Place | None:
        """The place in another engine, if that is expected to end faster.

        A user who names an engine keeps it, and so does one who counts other things than the
        latency of this machine.
        """
        goal, policy = request.goal, request.policy
        stated = request.engine is not None or request.device is not None
        stated |= request.execution.executor != LOCAL
        here = goal.objective is Objective.LATENCY and size_bytes <= _LOADED_AGAIN_BYTES
        if stated or not here:
            return None
        progress("engines", 0, 1)
        hint = policy.open_formats or Format.BF16 in policy.formats
        self.times = self.place.subject.engine_times(self.place.workload, hint=hint)
        better = faster(self.times)
        if better is None:
            return None
        place = self.opened(better.engine)
        if not policy.open_formats and not _gains(place.subject, policy):
            return None
        self.place = place
        return place


def _gains(subject: Subject, policy: Policy) -> bool:
    """Whether an engine has all formats of the policy, and one of them is faster there."""
    try:
        subject.check_formats(policy)
    except UsageError:
        return False
    return any(subject.speed(fmt).gains for fmt in policy.formats)


def _searched(
    model: OpenedModel,
    how: ReadOptions,
    output: Destination,
    options: TuneRequest,
    study: Study | None,
) -> Result:
    """The outcome of a search, its model written if it is better."""
    with workers.evaluating(model, how, output.path, options) as worker:

        def opened(engine: str | None) -> Place:
            subject = model.subject(engine, options.device)
            subject.uses_timing_cache, subject.study = options.timing_cache, study
            executor = worker(subject)
            data = options.data.loaded() if executor is None else executor.data()
            workload = model.workload(data, subject.reference)
            afresh = workers.timing_afresh(model, how, output.path, options, subject)
            return Place(subject=subject, workload=workload, executor=executor, afresh=afresh)

        places = _Places(place=opened(options.engine), opened=opened)
        workload = places.place.workload
        criterion = replace(options.goal.criterion, higher_is_better=workload.higher_is_better)
        outcome = search(
            places.place,
            replace(options.goal, criterion=criterion),
            options.policy,
            user_rules=tuple(options.user_rules.items()),
            start=plan_of(options.start),
            progress=options.progress,
            elsewhere=partial(places.elsewhere, options, model.size_bytes),
        )
        subject, workload = places.place.subject, places.place.workload
        outcome = replace(outcome, engine_times=places.times)
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
            outcome = locked(outcome, runner, subject.reference, calls, speedup)
        small = max(outcome.size_bytes) <= _LOADED_AGAIN_BYTES
        if small and not subject.target and Budget(goal=options.goal).left_s:
            phases("look at other engines", 0, 1)
            first = calls_of(workload.timing()[0])[0]
            others = in_other_engines(model.path, output.path, outcome.engine, first)
            outcome = replace(outcome, other_engines=tuple(others))
    if output.plan_out is not None and outcome.improved:
        write_text(output.plan_out, outcome.plan.to_json())
        outcome = replace(outcome, plan_out=output.plan_out)
    if study is not None or options.report is not None:
        phases("kernels", 0, 1)
        outcome = replace(outcome, fp32_kernels=tuple(subject.kernels(None, workload)))
    outcome = replace(outcome, model=model.given_back(outcome.built))
    outcome = outcome.and_then(phases.seconds())
    said = without_opinion(options.user_rules, outcome.plan.reasons)
    run = outcome.run_notes if outcome.output is None else ()
    warnings = (*outcome.warnings, *workload.warnings, *said, *run)
    return replace(outcome, warnings=warnings)
