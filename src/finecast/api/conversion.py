"""Python's verb ``convert``, and what its rules alone say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from finecast import keywords
from finecast.api.application import savable
from finecast.api.models import Model
from finecast.api.outputs import declared
from finecast.api.requests import device_for, on_data
from finecast.arguments import checked, group_of
from finecast.data.golden import chosen
from finecast.data.options import Data, DataOptions
from finecast.data.sources import calibration_batches
from finecast.devices.emulation import Emulation
from finecast.engines import get_engine
from finecast.engines.base import Feeds, Session
from finecast.errors import EngineError, UsageError
from finecast.files import CommandFiles, write_text
from finecast.native.artefact import Destination
from finecast.native.lock import Deployed, Runner, lock_files
from finecast.native.model import OpenedModel, ReadOptions, RunOptions
from finecast.native.opening import lock_beside
from finecast.numbers.encodings import Scaled
from finecast.planning.plan import Plan
from finecast.progress import Progress, reporting
from finecast.rules.policy import DEFAULT_POLICY, Policy
from finecast.rules.user_rules import without_opinion
from finecast.tuning.result import Result


@checked(Destination, RunOptions, DataOptions, ReadOptions)
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
        data: As for ``tune``: its ranges guide the rules, and the result is verified on the
            first batch. Without data it is verified on random feeds.
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
    run = replace(
        group_of(RunOptions, options), engine=engine, device=device_for(asked, target)
    )
    run = on_data(run, group_of(DataOptions, options, data=data))
    how = group_of(ReadOptions, options)
    with reporting(progress, "converting") as report:
        return converted(model, written, asked, replace(run, progress=report), how)


def converted(
    model: Model,
    written: Destination,
    policy: Policy,
    run: RunOptions,
    how: ReadOptions,
    files: CommandFiles | None = None,
) -> Result:
    """``convert`` with its options as values.

    Args:
        model: The model, or its path.
        written: Where the model goes, and its plan.
        policy: What is lowered.
        run: How the model is run.
        how: How it is read.
        files: The files of the call, if the caller has some of its own.

    Raises:
        FinecastError: As ``convert``.
    """
    files = files or CommandFiles(force=written.force)
    for path in _lock_files(written, run):
        files.write("the deployment manifest", path)
    files.write("the plan", written.plan_out)
    given = declared(model, how, written, files, run.data)
    with files.locked() as removed:
        done = given().convert(written, policy, run)
        said = without_opinion(run.user_rules, done.plan.reasons)
        if run.data is not None and run.verify:
            said = (*said, *judged_by_chosen(run.data, done.plan))
        done = replace(done, warnings=(*removed, *done.warnings, *said))
        result = Result.of(done)
        if run.lock:
            result = _locked_by_data(result, given(), run)
        if written.plan_out is not None:
            write_text(written.plan_out, result.plan.to_json())
            result = replace(result, plan_out=written.plan_out)
    return savable(result, given)


def _lock_files(written: Destination, run: RunOptions) -> Sequence[Path]:
    """The files of the lock that is asked for; none if none is.

    Raises:
        UsageError: If there can be none.
    """
    if not run.lock:
        return ()
    if run.device is not None or not run.verify:
        raise UsageError(
            "a deployment manifest is of a model that ran in an engine here",
            where="--lock",
            fix="leave out --target and --no-verify",
        )
    if written.path is None or run.data is None:
        raise UsageError(
            "a deployment manifest has samples of data, and stands beside a file",
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
    return locked(result, runner, reference, chosen(calls[:1], calls))


def locked(
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
        told = f"no deployment manifest was written: {error.what}"
        return replace(outcome, warnings=(*outcome.warnings, told))
    return replace(outcome, lock=lock)


def judged_by_chosen(data: DataOptions, plan: Plan) -> Iterator[str]:
    """A warning if the data by which codes were chosen are among those that judge them."""
    constants = (one for e in plan.encodings.values() for one in e.constants.values())
    moved = (one.shifts for one in constants if isinstance(one, Scaled))
    if not data.calibrates_apart and any(moved):
        yield (
            "gptq chose the integers by the data that also judge the result: on other data it"
            " may lose more than is said here; give data of their own to choose by (--calib)"
        )
