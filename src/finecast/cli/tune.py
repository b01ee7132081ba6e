"""``finecast tune``: the fastest mixed precision that keeps an accuracy."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.cli.common import (
    EngineName,
    Json,
    Output,
    Source,
    files_of,
    open_model,
    telling_stale,
    warn_stale,
)
from finecast.cli.data_options import Data, Evaluation, Tolerance
from finecast.cli.output import warn
from finecast.cli.policy_options import Casting, Device, Narrowing, Target
from finecast.cli.tune_report import write_report
from finecast.errors import ExitCode, InterruptedRunError
from finecast.files import CommandFiles
from finecast.naming import number_of
from finecast.pipeline.goal import MIN_SPEEDUP, Goal, Objective
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.data.criterion import Criterion
    from finecast.pipeline.model import OpenedModel, TuneRequest
    from finecast.pipeline.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the search minimises, the gain it asks for, and its budget."""

    objective: Annotated[
        str,
        typer.Option(
            help="What to minimise: latency, throughput (time of a request, with as many in"
            " flight as the engine serves best), size (bytes of the written model), or memory"
            " (of the running one, estimated)."
        ),
    ] = Objective.LATENCY.value
    min_speedup: Annotated[
        float,
        typer.Option(
            help="How many times as fast as fp32 a plan has to be; with another --objective,"
            " how many times as good in that."
        ),
    ] = MIN_SPEEDUP
    max_trials: Annotated[
        int | None,
        typer.Option(
            help="The most plans that are evaluated on all data; what is not needed of them is"
            " spent on faster plans."
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="The time after which no plan is tried but the first."
        ),
    ] = None

    def goal(self, criterion: Criterion) -> Goal:
        """These options for the search, with the accuracy to keep.

        Raises:
            UsageError: If the objective is unknown, the speedup is below 1, or a budget leaves
                no trial.
        """
        return Goal(
            criterion=criterion,
            objective=Objective.parse(self.objective),
            min_speedup=self.min_speedup,
            max_trials=self.max_trials,
            timeout_s=self.timeout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Files that a search writes beside the model: its plan and its study."""

    plan_out: Annotated[
        Path | None,
        typer.Option(
            help="The plan; default OUTPUT with .plan.json: m.plan.json for m.onnx,"
            " m.pt2.plan.json for m.pt2, m.saved_model.plan.json for a folder m."
        ),
    ] = None
    study: Annotated[
        Path | None,
        typer.Option(
            help="Keep trials here; default OUTPUT with .study.db in place of its suffix. It"
            " may hold trials of several models."
        ),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Take up the study where it was cut off.")
    ] = False

    def plan_of(self, output: Path) -> Path:
        """The path of the plan for ``output``."""
        from finecast.subjects import plan_beside

        return self.plan_out or plan_beside(output)

    def study_of(self, output: Path) -> Path:
        """The path of the study for ``output``."""
        return self.study or output.parent / f"{output.stem}.study.db"

    def replacing(self, source: Source, written: Output) -> Output:
        """``written``, which a resumed run may overwrite if that run finished before.

        It finished if its output, plan and study exist and the plan is for the model.

        Raises:
            UsageError: If the file at the plan's path is not a plan.
        """
        from finecast import api
        from finecast.planning.plan import Plan

        plan, study = self.plan_of(written.output), self.study_of(written.output)
        there = all(path.is_file() for path in (written.output, plan, study))
        if not (self.resume and there) or written.force:
            return written
        if Plan.load(plan).model != api.load(source.model, trust=source.trust).digest:
            return written
        warn(f"--resume: an earlier run finished: {written.output} is made anew")
        return replace(written, force=True)


def run(
    source: Source,
    written: Output,
    data: Data,
    evaluation: Evaluation,
    tolerance: Tolerance,
    casting: Casting,
    narrowing: Narrowing,
    device: Device,
    records: Records,
    search: Search,
    target: Target = None,
    engine: EngineName = None,
    as_json: Json = False,
) -> int:
    """Find the fastest mixed-precision model that keeps your accuracy.

    Never writes a model that misses the criterion or is slower than fp32: then it says so,
    writes nothing and exits with 1.

    With --target the device need not be here: accuracy is that of its emulation, times are
    modelled from its documented rates, and the plan is stated by casts that its compiler
    respects (--auto-cast none).

    MODEL may be torch.export's .pt2, a SavedModel, or what OpenVINO reads: that gives .xml.

    Examples:
      finecast tune m.onnx -o low.onnx --data val.npz --metric f1 --tolerance 0.02

      finecast tune m.onnx -o low.onnx --eval mine.py:score --calib mine.py:feeds

      finecast tune m.onnx -o low.onnx --target trn1 --data val.npz --metric top1

      finecast tune m.pt2 -o low.pt2 --data val.npz --metric top1
    """
    goal = search.goal(tolerance.stated())  # first, as --timeout counts from here on
    from finecast.pipeline.model import TuneRequest

    choice = narrowing.narrowed(device.choice(casting, target))
    written = records.replacing(source, written)
    files = files_of(source.model, data, evaluation, narrowing, force=written.force)
    model = _opened(files, source, written, records, engine)
    request = TuneRequest(
        data=evaluation.options(data),
        goal=goal,
        policy=choice.policy,
        engine=engine,
        device=choice.emulation,
        user_rules=narrowing.user_rules(),
        study=records.study_of(written.output),
        resume=_resumes(records, written.output),
        plan=records.plan_of(written.output),
        from_type=source.from_type,
    )
    outcome = _searched(files, model, written, request, quiet=as_json)
    _warn(outcome, choice.told(set(outcome.plan.formats.values())), request)
    plan = records.plan_of(written.output)
    write_report(outcome, evaluation.label, written.output, plan, as_json=as_json)
    return ExitCode.DONE if outcome.improved else ExitCode.NOT_IMPROVED


def _opened(
    files: CommandFiles,
    source: Source,
    written: Output,
    records: Records,
    engine: str | None,
) -> OpenedModel:
    """Open the model, once all outputs are known to overwrite nothing that is read."""
    from finecast.pipeline.study import journals

    files.write("--plan-out", records.plan_of(written.output))
    model = open_model(files, source, written, engine=engine)
    study = records.study_of(written.output)
    files.write("--study", study, beside=journals(study), replaces=False)
    return model


def _resumes(records: Records, output: Path) -> bool:
    """Whether there is a study with trials to resume; warns where that is asked in vain."""
    from finecast.pipeline.study import Study

    study = records.study_of(output)
    if not records.resume:
        return False
    if not study.exists():
        warn(f"--resume: there is no study at {study}: starting anew")
        return False
    if not Study(study).count():
        warn(f"--resume: {study} has no trial: starting anew")
        return False
    return True


def _searched(
    files: CommandFiles,
    model: OpenedModel,
    written: Output,
    request: TuneRequest,
    *,
    quiet: bool,
) -> Outcome:
    from finecast import api

    assert request.study is not None
    with (
        telling_stale(files),
        _interruptible(request.study, model.digest),
        shown("tuning", quiet=quiet) as bar,
    ):
        return api.tuned(model, written.destination, replace(request, progress=bar))


def _warn(outcome: Outcome, notes: Sequence[str], request: TuneRequest) -> None:
    """Warn of what weakens the result, of stale files, and of a study without use."""
    for note in (*notes, *outcome.warnings):
        warn(note)
    warn_stale(outcome.stale)
    study = request.study
    if request.resume and study is not None and not outcome.reused:
        warn(
            f"--resume: no trial in {study} was of use: it has none of this model, data,"
            " code, objective and baseline, or they no longer hold"
        )


@contextmanager
def _interruptible(study: Path, model: str) -> Generator[None]:
    """On Ctrl-C, say how many trials of the model the study keeps and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        from finecast.pipeline.study import Study

        kept = Study(study).count(model) if study.exists() else 0
        advice = (
            f"{study} keeps {number_of(kept, 'trial')}: the same command with"
            " --resume goes on from there"
            if kept
            else "no trial was finished, nothing was written"
        )
        raise InterruptedRunError("interrupted", fix=advice) from error
