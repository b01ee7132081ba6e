"""``finecast emulate``: what a device you do not have would do to your numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli import neuron_options as no
from finecast.cli.output import add_row, new_table, progress, write_json, write_table

if TYPE_CHECKING:
    from finecast.tuner.emulating import EmulationReport

_MOST_OPS = 10


def run(
    words: no.Words,
    target: Annotated[str, typer.Option(help="A device: see finecast targets.")],
    auto_cast: no.AutoCast = None,
    auto_cast_type: no.AutoCastType = None,
    fast_math: no.FastMath = None,
    fp32_cast: no.Fp32Cast = None,
    mixed_accumulation: no.MixedAccumulation = None,
    saturate_infinity: no.SaturateInfinity = False,
    stochastic_rounding: no.Stochastic = False,
    seed: no.Seed = None,
    sdk: no.Sdk = None,
    from_env: no.FromEnv = False,
    data: no.Data = None,
    labels: no.Labels = None,
    metric: no.MetricName = None,
    evaluate: no.Evaluate = None,
    calib: no.Calib = None,
    lower_is_better: no.LowerIsBetter = False,
    batch: no.Batch = 32,
    ops: Annotated[int, typer.Option(min=0, help="Ops to show.")] = _MOST_OPS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Metric and output error on a device, and the ops that bring the error.

    Examples:
      finecast emulate model.onnx --target trn1 --auto-cast all --auto-cast-type fp16
      --data val.npz --metric top1

      finecast emulate model.onnx --target inf1 --fast-math fp32-cast-matmult
      no-fast-relayout --data val.npz
    """
    from finecast.tuner.emulating import emulate

    model, keywords = no.model_and_keywords(words, fast_math)
    choice = no.Choice(
        auto_cast=auto_cast,
        auto_cast_type=auto_cast_type,
        fast_math=keywords,
        fp32_cast=fp32_cast,
        mixed_accumulation=mixed_accumulation,
        saturate_infinity=saturate_infinity,
        stochastic=stochastic_rounding,
        seed=seed,
        from_env=from_env,
    )
    emulation, options = no.emulation_for(choice, target, sdk)
    source = no.DataChoice(
        data=data,
        labels=labels,
        metric=metric,
        evaluate=evaluate,
        calib=calib,
        lower_is_better=lower_is_better,
        batch=batch,
    )
    with progress("emulating", quiet=as_json) as bar:
        report = emulate(
            model,
            emulation,
            source.workload(model),
            progress=lambda stage, done, total: bar(done, total, stage),
        )
    if as_json:
        write_json(to_dict(report, target=target, options=options, metric=source.label))
    else:
        _print(report, f"{target} {options}", source.label, ops)


def to_dict(
    report: EmulationReport, *, target: str, options: str, metric: str
) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "target": target,
        "options": options,
        "metric": metric,
        "fp32": report.baseline,
        "emulated": report.metric,
        "output_error": report.error,
        "cast_ops": report.cast_ops,
        "seconds": report.seconds,
        "ops": [
            {
                "node": c.node.name,
                "op": c.node.op,
                "error": c.error,
                "share": c.share,
                "reasons": list(c.reasons),
            }
            for c in report.contributions
        ],
    }


def _print(report: EmulationReport, title: str, metric: str, most: int) -> None:
    table = new_table(title, ("op", "node", "why"), ("output error", "share"), fold="why")
    for one in report.contributions[:most]:
        add_row(
            table,
            one.node.op,
            one.node.name,
            "; ".join(one.reasons),
            f"{one.error:.2e}",
            f"{one.share:.1%}",
        )
    note = (
        f"{metric}: fp32 {report.baseline:.6g}, emulated {report.metric:.6g}; relative output"
        f" error {report.error:.3g}; {report.cast_ops} ops cast; {report.seconds:.1f} s"
    )
    write_table(table, note=note)
