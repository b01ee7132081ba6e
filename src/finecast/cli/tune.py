"""``finecast tune``: the fastest mixed precision that keeps an accuracy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli import policy_options as po
from finecast.cli.output import (
    add_row,
    new_table,
    progress,
    write_json,
    write_line,
    write_table,
)
from finecast.errors import ExitCode

if TYPE_CHECKING:
    from finecast.tuner.tuning import Measured, Outcome


def run(
    model: Annotated[Path, typer.Argument(help="The FP32 ONNX model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The tuned model.")],
    data: Annotated[
        Path | None,
        typer.Option(help="An .npz with the inputs' names, and labels."),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="Array of labels in --data; default 'label'.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="top1, top5, agreement, cosine, spearman, snr_db, max_abs; default agreement."
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="FILE.py:FUNCTION",
            help="Your own metric: gets run(feeds) -> outputs by name, returns a number.",
        ),
    ] = None,
    calib: Annotated[
        str | None,
        typer.Option(
            metavar="NPZ|FILE.py:FUNCTION",
            help="Calibration feeds: an unlabelled .npz, or a function that yields them.",
        ),
    ] = None,
    criterion: Annotated[
        str, typer.Option(help="How --tolerance is read: relative or absolute.")
    ] = "relative",
    tolerance: Annotated[
        float, typer.Option(help="Loss of the metric that is allowed.")
    ] = 0.01,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="The --eval metric is a loss.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Samples a call.")] = 32,
    auto_cast: po.AutoCast = "auto",
    auto_cast_type: po.AutoCastType = "bf16",
    include: po.Include = None,
    exclude: po.Exclude = None,
    op: po.OpFormat = None,
    rules: po.Rules = None,
    io: po.Io = None,
    engine: po.EngineName = None,
    plan_out: Annotated[
        Path | None, typer.Option(help="The plan; default OUTPUT with .plan.json.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option(help="Keep trials here; default OUTPUT with .study.db.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Take up the study where it was cut off.")
    ] = False,
    force: po.Force = False,
    as_json: po.Json = False,
) -> int:
    """Find the fastest mixed-precision model that keeps your accuracy.

    Never writes a model that misses the criterion or is slower than fp32: then it says so,
    writes nothing and exits with 1.

    Examples:
      finecast tune model.onnx -o tuned.onnx --data val.npz --metric top1 --tolerance 0.005

      finecast tune model.onnx -o tuned.onnx --eval mine.py:accuracy --calib mine.py:feeds
    """
    from finecast import api
    from finecast.files import write_text
    from finecast.frontends.onnx.model import check_writable
    from finecast.measure.functions import load_function

    policy = po.make_policy(
        auto_cast, auto_cast_type, include=include, exclude=exclude, op=op, io=io
    )
    plan_path = plan_out or output.with_suffix(".plan.json")
    study_path = study or output.with_suffix(".study.db")
    for path in (output, plan_path):
        check_writable(path, force=force)
    if not resume:
        study_path.unlink(missing_ok=True)
    function = load_function(evaluate) if evaluate else None
    with progress("tuning", quiet=as_json) as bar:
        outcome = api.tune(
            model,
            output,
            data=data,
            labels=labels,
            metric=metric,
            evaluate=function,
            calib=_calib(calib),
            criterion=criterion,
            tolerance=tolerance,
            lower_is_better=lower_is_better,
            policy=policy,
            engine=engine,
            batch=batch,
            user_rules=po.load_rules(rules),
            study=study_path,
            force=force,
            progress=lambda stage, done, total: bar(done, total, stage),
        )
    improved = outcome.verdict.value == "improved"
    if improved:
        write_text(plan_path, outcome.plan.to_json())
    if as_json:
        write_json(to_dict(outcome))
    else:
        _print(outcome, metric or evaluate or "agreement", output, plan_path)
    return ExitCode.DONE if improved else ExitCode.NOT_IMPROVED


def _calib(spec: str | None) -> Any:
    """A path of an npz, or the user's function."""
    from finecast.measure.functions import load_function

    if spec is None or spec.endswith(".npz"):
        return spec
    return functools.partial(load_function(spec))


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "verdict": outcome.verdict.value,
        "why": outcome.why,
        "baseline": _measured(outcome.baseline),
        "tuned": _measured(outcome.tuned),
        "speedup": outcome.speedup,
        "speedup_spread": outcome.speedup_spread,
        "evaluations": outcome.evaluations,
        "probes": outcome.probes,
        "seconds": outcome.seconds,
        "ops": outcome.plan.counts,
        "casts": outcome.casts,
        "relative_error": {
            "predicted": outcome.predicted_error,
            "measured": outcome.measured_error,
        },
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


def _measured(one: Measured) -> dict[str, Any]:
    return {
        "metric": one.metric,
        "latency_ms": one.latency_s * 1e3,
        "size_bytes": one.size_bytes,
    }


def _print(outcome: Outcome, metric: str, output: Path, plan: Path) -> None:
    from finecast.measure.environment import environment

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
    errors = (
        f"relative output error: predicted {outcome.predicted_error:.3g},"
        f" measured {outcome.measured_error:.3g}\n"
    )
    ops = ", ".join(f"{n} {fmt}" for fmt, n in outcome.plan.counts.items())
    where = f"wrote {output} and {plan}" if improved else "nothing written: use the fp32 model"
    note = (
        f"{ops}; {outcome.casts} casts inside; {outcome.evaluations} evaluations on all data,"
        f" {outcome.probes} probes, {outcome.seconds:.1f} s on {environment().cpu}\n"
        f"{errors if improved else ''}{where}"
    )
    write_table(table, note=note)
