"""``finecast tune``: the fastest mixed precision that keeps an accuracy."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from finecast.cli.output import (
    add_row,
    new_table,
    progress,
    warn,
    write_json,
    write_line,
    write_table,
)
from finecast.cli.policy_options import Casting, Device, Narrowing, Target
from finecast.errors import ExitCode, InterruptedRunError
from finecast.files import CommandFiles, write_text
from finecast.pipeline.goal import MIN_SPEEDUP, Goal

if TYPE_CHECKING:
    from finecast.data.criterion import Criterion
    from finecast.pipeline.model import OpenedModel, TuneRequest
    from finecast.pipeline.outcome import Measured, Outcome

_TF32_TIMES = (
    "times are those of tf32 products, which the compiler or runtime has to switch on; the"
    " arithmetic that gives the model their numbers is not counted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What makes a plan worth having, and what its search may cost."""

    min_speedup: Annotated[
        float, typer.Option(help="How many times as fast as fp32 a plan has to be.")
    ] = MIN_SPEEDUP
    max_trials: Annotated[
        int | None,
        typer.Option(
            help="Plans that are evaluated on all data at most; what is left of them goes into"
            " faster plans."
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="After so long no plan is begun."),
    ] = None

    def goal(self, criterion: Criterion) -> Goal:
        """The same for the search.

        Raises:
            UsageError: If a speed is below 1, or there is no budget.
        """
        return Goal(
            criterion=criterion,
            min_speedup=self.min_speedup,
            max_trials=self.max_trials,
            timeout_s=self.timeout,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """What is kept of a search beside the model."""

    plan_out: Annotated[
        Path | None, typer.Option(help="The plan; default OUTPUT with .plan.json.")
    ] = None
    study: Annotated[
        Path | None, typer.Option(help="Keep trials here; default OUTPUT with .study.db.")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Take up the study where it was cut off.")
    ] = False

    def plan_of(self, output: Path) -> Path:
        """Where the plan of ``output`` goes."""
        return self.plan_out or output.with_suffix(".plan.json")

    def study_of(self, output: Path) -> Path:
        """Where the trials go."""
        return self.study or output.with_suffix(".study.db")

    def replacing(self, source: Source, written: Output) -> Output:
        """``written``; a run that is resumed may replace what it made of the model.

        Raises:
            UsageError: If what is at the plan's place is no plan.
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
      finecast tune model.onnx -o tuned.onnx --data val.npz --metric top1 --tolerance 0.005

      finecast tune model.onnx -o tuned.onnx --eval mine.py:accuracy --calib mine.py:feeds

      finecast tune model.onnx -o tuned.onnx --target trn1 --data val.npz --metric top1

      finecast tune model.pt2 -o tuned.pt2 --data val.npz --metric top1
    """
    goal = search.goal(tolerance.stated())  # its seconds count from here on
    from finecast.pipeline.model import TuneRequest

    choice = narrowing.narrowed(device.choice(casting, target))
    written = records.replacing(source, written)
    files = files_of(source.model, data, evaluation, narrowing, force=written.force)
    model = _claimed(files, source, written, records, engine)
    request = TuneRequest(
        data=evaluation.options(data),
        goal=goal,
        policy=choice.policy,
        engine=engine,
        device=choice.emulation,
        user_rules=narrowing.user_rules(),
        study=records.study_of(written.output),
        resume=records.resume,
        from_type=source.from_type,
    )
    plan = records.plan_of(written.output)
    outcome = _searched(files, model, written, request, quiet=as_json)
    outcome = _with_plan(files, outcome, plan)
    _warn(outcome, choice.told(set(outcome.plan.formats.values())), request)
    _report(outcome, evaluation.label, written.output, plan, as_json=as_json)
    return ExitCode.DONE if outcome.improved else ExitCode.NOT_IMPROVED


def _claimed(
    files: CommandFiles,
    source: Source,
    written: Output,
    records: Records,
    engine: str | None,
) -> OpenedModel:
    """The model, when it is known that no output destroys anything."""
    from finecast.pipeline.study import journals

    files.write("--plan-out", records.plan_of(written.output))
    model = open_model(files, source, written, engine=engine)
    study = records.study_of(written.output)
    files.write("--study", study, beside=journals(study), replaces=False)
    if records.resume and not study.exists():
        warn(f"--resume: there is no study at {study}: starting anew")
    return model


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
        _interruptible(request.study),
        progress("tuning", quiet=quiet) as bar,
    ):
        told = replace(request, progress=lambda stage, done, total: bar(done, total, stage))
        return api.tuned(model, written.destination, told)


def _with_plan(files: CommandFiles, outcome: Outcome, plan: Path) -> Outcome:
    """Write the plan, if there is one; what is stale shows after that."""
    if outcome.improved:
        write_text(plan, outcome.plan.to_json())
    return replace(outcome, stale=files.stale())


def _warn(outcome: Outcome, told: Sequence[str], request: TuneRequest) -> None:
    """What makes the answer weak, what is stale, and what a study was not good for."""
    for note in (*told, *outcome.warnings):
        warn(note)
    warn_stale(outcome.stale)
    study = request.study
    if request.resume and study is not None and study.exists() and not outcome.reused:
        warn(
            f"--resume: no trial in {study} was of use: it has none of this model, data,"
            " code and baseline, or they no longer hold"
        )


@contextmanager
def _interruptible(study: Path) -> Generator[None]:
    """Ctrl-C says what is kept."""
    try:
        yield
    except KeyboardInterrupt as error:
        from finecast.pipeline.study import Study

        kept = Study(study).count() if study.exists() else 0
        advice = (
            f"{study} keeps {kept} trial{'s' if kept > 1 else ''}: the same command with"
            " --resume goes on from there"
            if kept
            else "no trial was finished, nothing was written"
        )
        raise InterruptedRunError("interrupted", fix=advice) from error


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "verdict": outcome.verdict.value,
        "why": outcome.why,
        "target": outcome.target or None,
        "times": _times(outcome),
        "baseline": _measured(outcome.baseline),
        "tuned": _measured(outcome.tuned),
        "speedup": outcome.speedup,
        "speedup_spread": outcome.speedup_spread,
        "evaluations": outcome.evaluations,
        "reused_trials": outcome.reused,
        "probes": outcome.probes,
        "seconds": outcome.seconds,
        "ops": outcome.plan.counts,
        "casts": outcome.casts,
        "relative_error": {
            "predicted": outcome.predicted_error,
            "measured": outcome.measured_error,
        },
        "correction": outcome.correction.to_dict() if outcome.correction else None,
        "anchors": [
            {
                "name": a.name,
                "metric": a.metric,
                "latency_ms": a.latency_s * 1e3,
                "passed": a.passed,
            }
            for a in outcome.anchors
        ],
        "warnings": list(outcome.warnings),
        "stale": [str(path) for path in outcome.stale],
        "trials": [
            {
                "plan": t.key.plan,
                "name": t.name,
                "metric": t.metric,
                "latency_ms": None if t.latency_s is None else t.latency_s * 1e3,
                "passed": t.passed,
            }
            for t in outcome.trials
        ],
    }


def _times(outcome: Outcome) -> str:
    text = f"modelled for {outcome.target}, not measured" if outcome.target else "measured"
    return f"{text}; {_TF32_TIMES}" if "tf32" in outcome.plan.counts else text


def _measured(one: Measured) -> dict[str, Any]:
    return {
        "metric": one.metric,
        "latency_ms": one.latency_s * 1e3,
        "size_bytes": one.size_bytes,
    }


def _errors(outcome: Outcome) -> list[str]:
    """The tuned model's, and what corrected biases gained."""
    seen = "emulated" if outcome.target else "measured"
    text = (
        f"relative output error: predicted {outcome.predicted_error:.3g},"
        f" {seen} {outcome.measured_error:.3g}"
    )
    return [text, *([outcome.correction.text] if outcome.correction else [])]


def _report(outcome: Outcome, metric: str, output: Path, plan: Path, *, as_json: bool) -> None:
    if as_json:
        write_json(to_dict(outcome))
        return
    from finecast.devices.neuron import casts_off
    from finecast.engines.usage import how_to_run
    from finecast.measure.environment import environment, limited

    improved = outcome.verdict.value == "improved"
    write_line(f"{outcome.verdict.value}: {outcome.why}")
    table = new_table("", ("",), (metric, "ms a call", "MB", "speed"))
    rows = [("fp32", outcome.baseline, 1.0)]
    if improved:
        rows.append(("tuned", outcome.tuned, outcome.speedup))
    for name, one, speed in rows:
        add_row(
            table,
            name,
            f"{one.metric:.6g}",
            f"{one.latency_s * 1e3:.3f}",
            f"{one.size_bytes / 1e6:.2f}",
            f"x{speed:.2f}",
        )
    for anchor in outcome.anchors:
        add_row(
            table,
            anchor.name if anchor.passed else f"{anchor.name} (misses the criterion)",
            f"{anchor.metric:.6g}",
            f"{anchor.latency_s * 1e3:.3f}",
            f"{outcome.baseline.size_bytes / 1e6:.2f}",
            f"x{outcome.baseline.latency_s / anchor.latency_s:.2f}",
        )
    ops = ", ".join(f"{n} {fmt}" for fmt, n in outcome.plan.counts.items())
    lines = _errors(outcome) if improved else []
    if outcome.target:
        off = casts_off(outcome.target)
        lines.append(
            f"for {outcome.target}: accuracy emulated, times modelled, not measured"
            + (f"; compile it with {off}" if off else "")
        )
    if "tf32" in outcome.plan.counts:
        lines.append(_TF32_TIMES)
    where = f"wrote {output} and {plan}" if improved else "nothing written: use the fp32 model"
    lines.append(where)
    if improved and not outcome.target:
        run = how_to_run(output, outcome.plan.engine, outcome.plan.counts)
        lines += run.splitlines()
    reused = f", {outcome.reused} trials of the study reused" if outcome.reused else ""
    note = (
        f"{ops or 'no op in fp32'}; {outcome.casts} casts inside;"
        f" {outcome.evaluations} evaluations on all data{reused}, {outcome.probes} probes,"
        f" {outcome.seconds:.1f} s on {limited(environment())}"
    )
    write_table(table, note, *lines)
