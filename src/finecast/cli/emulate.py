"""``finecast emulate``: what a device you do not have would do to your numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.common import Evaluation, Json, Model, Trusted
from finecast.cli.output import (
    add_row,
    new_table,
    output_lines,
    warn,
    write_json,
    write_table,
)
from finecast.cli.policy_options import CompilerCasting, Device, NeededTarget
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.pipeline.emulating import EmulationReport

_MOST_OPS = 10


def run(
    model: Model,
    casting: CompilerCasting,
    device: Device,
    data: Evaluation,
    how: Trusted,
    target: NeededTarget = None,
    ops: Annotated[int, typer.Option(min=0, help="Ops to show.")] = _MOST_OPS,
    as_json: Json = False,
) -> None:
    """Metric and output error on a device, and the ops that cause the error.

    The options are the compiler's own, with its defaults: without --auto-cast
    nothing is cast, on inf1 all.

    Examples:
      finecast emulate m.onnx --target trn1 --auto-cast all --auto-cast-type fp16
      --data val.npz --metric top1

      finecast emulate m.onnx --target inf1 --fast-math fp32-cast-matmult
      no-fast-relayout --data val.npz

      finecast emulate m.pt2 --target trn1 --auto-cast matmult --data val.npz
    """
    from finecast import api
    from finecast.pipeline.emulating import emulate
    from finecast.pipeline.sources import workload_of

    emulation, options = device.emulation(casting, target)
    file = api.load(model, trust=how.trust)
    loaded = file.reference()
    workload = workload_of(data, loaded)
    with shown("emulating", quiet=as_json) as bar:
        report = emulate(file, loaded, emulation, workload, progress=bar)
    for note in workload.warnings:
        warn(note)
    if as_json:
        write_json(
            to_dict(
                report,
                target=emulation.target.name,
                options=options,
                metric=data.label,
            )
        )
    else:
        _print(report, f"{emulation.target.name} {options}", data.label, ops)


def to_dict(
    report: EmulationReport, *, target: str, options: str, metric: str
) -> dict[str, Any]:
    """The report as JSON."""
    from finecast.data.scoring import by_output

    return {
        "target": target,
        "options": options,
        "metric": metric,
        "fp32": report.baseline,
        "emulated": report.metric,
        "output_error": report.error,
        "output_errors": report.errors,
        "left_out": list(report.left_out),
        "outputs": by_output(report.metric),
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
    from finecast.data.scoring import by_output

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
    scores = by_output(report.metric)
    write_table(table, note, *output_lines(report.errors, report.left_out, scores))
