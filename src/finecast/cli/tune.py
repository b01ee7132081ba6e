"""``finecast tune``: the fastest mixed precision that keeps an accuracy."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.cli.common import (
    EVALUATION,
    Json,
    Model,
    Read,
    Tuned,
    telling_stale,
    warn_stale,
)
from finecast.cli.groups import Only
from finecast.cli.output import warn, write_report
from finecast.cli.policy_options import (
    Casting,
    OfDevice,
    Rules,
    TunedFor,
    narrowed,
    rule_files,
    user_rules,
)
from finecast.data.criterion import Criterion
from finecast.data.options import DataOptions
from finecast.devices.choice import choose
from finecast.errors import ExitCode, InterruptedRunError
from finecast.files import CommandFiles
from finecast.measure.study import Study
from finecast.native.artefact import Destination
from finecast.native.model import ReadOptions
from finecast.native.opening import plan_beside, study_beside
from finecast.progress import shown
from finecast.rules.policy import Policy
from finecast.tuning.goal import Execution, Goal, TuneRequest

if TYPE_CHECKING:
    from finecast.tuning.result import Result

Records = Annotated[
    TuneRequest,
    Only(
        *("engine", "resume", "start", "report", "lock"),
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print each measurement of the search: what it was expected to gain, and what it"
        " showed.",
    ),
]
Proven = Annotated[Criterion, Only("tolerance", "max_drop", "confidence", "score_range")]
Certified = Annotated[DataOptions, Only(*EVALUATION, "groups")]
Search = Annotated[
    Goal,
    Only(
        *("objective", "preset", "max_size", "max_bits", "max_trials", "timeout_s"),
    ),
]
Searched = Annotated[Policy, Only("exclude", "op_formats", "io")]
"""Narrows what is searched; how it is written and calibrated the search finds by itself."""


def run(
    source: Model,
    how: Read,
    written: Tuned,
    data: Certified,
    criterion: Proven,
    goal: Search,
    casting: Casting,
    narrowing: Searched,
    rules: Rules,
    device: OfDevice,
    request: Records,
    execution: Annotated[Execution, Only("executor")],
    target: TunedFor = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Find the fastest mixed-precision model that keeps your accuracy.

    If no model is faster than fp32 within the limit, nothing is written and the exit code is
    1. With --target accuracy is emulated, and times are modelled from the device's data sheet.

    Examples:
      finecast tune m.onnx -o fast.onnx --data val.npz --metric f1 --max-drop 0.02

      finecast tune m.onnx -o fast.xml --eval mine.py:score --calib mine.py:inputs

      finecast tune m.pt2 -o fast.pt2 --target trn1 --data val.npz --metric top1
    """
    choice = narrowed(choose(casting.request(target), device), narrowing)
    output = written.path
    assert output is not None
    plan, study = plan_beside(output), study_beside(output)
    written = _replacing(source, how, written, plan, study, resume=request.resume)
    files = CommandFiles(force=written.force)
    files.read("--rules", *rule_files(rules))
    request = replace(
        request,
        data=data,
        goal=replace(goal, criterion=criterion),
        policy=choice.policy,
        device=choice.emulation,
        user_rules=user_rules(rules),
        study=study,
        execution=execution,
    )
    request = replace(request, resume=request.resume and _has_trials(study))
    outcome = _searched(files, source, written, how, request, steps=verbose)
    _warn(outcome, choice.told(set(outcome.plan.formats.values())), request)
    write_report(outcome, outcome.comparison, as_json=as_json)
    return ExitCode.DONE if outcome.improved else ExitCode.NOT_IMPROVED


def _replacing(
    source: Path,
    how: ReadOptions,
    written: Destination,
    plan: Path,
    study: Path,
    *,
    resume: bool,
) -> Destination:
    """``written``, which a resumed run may overwrite if that run finished before.

    It finished if its output, plan and study exist and the plan is for the model.

    Raises:
        UsageError: If the file at the plan's path is not a plan.
    """
    from finecast import api
    from finecast.planning.plan import Plan

    assert written.path is not None
    there = all(path.is_file() for path in (written.path, plan, study))
    if not (resume and there) or written.force:
        return written
    if Plan.load(plan).model != api.load(source, trust=how.trust).digest:
        return written
    warn(f"--resume: an earlier run finished: {written.path} is made anew")
    return replace(written, force=True)


def _has_trials(study: Path) -> bool:
    """Whether there is a study with trials to resume; warns if not."""
    if not study.exists():
        warn(f"--resume: there is no study at {study}: starting anew")
        return False
    if not Study(study).count():
        warn(f"--resume: {study} has no trial: starting anew")
        return False
    return True


def _searched(
    files: CommandFiles,
    source: Path,
    written: Destination,
    how: ReadOptions,
    request: TuneRequest,
    *,
    steps: bool,
) -> Result:
    from finecast import api

    with (
        telling_stale(files),
        _interruptible(),
        shown("tuning", steps=steps) as bar,
    ):
        return api.tuned(source, written, replace(request, progress=bar), how, files)


def _warn(outcome: Result, notes: Sequence[str], request: TuneRequest) -> None:
    """Warn of what weakens the result, of stale files, and of a study without use."""
    warn(*notes, *outcome.warnings)
    warn_stale(outcome.stale)
    study = request.study
    if request.resume and study is not None and not outcome.reused:
        warn(
            f"--resume: no trial in {study} could be reused: it has none of this model, data,"
            " code, objective and baseline, or they no longer hold"
        )


@contextmanager
def _interruptible() -> Generator[None]:
    """On Ctrl-C, say how many trials of the model the study keeps and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = "; ".join(getattr(error, "__notes__", ()))
        advice = (
            f"{kept}: the same command with --resume goes on from there"
            if kept
            else "no trial was finished, nothing was written"
        )
        raise InterruptedRunError("interrupted", fix=advice) from error
