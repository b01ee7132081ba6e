"""``finecast emulate``: what a device you do not have would do to your numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.cli.common import Evaluation, Json, Model, Trusted
from finecast.cli.output import (
    add_row,
    new_table,
    output_lines,
    warn,
    write_json,
    write_note,
    write_table,
)
from finecast.cli.policy_options import CompilerCasting, Device, NeededTarget
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.tuning.emulating import EmulationReport

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

    emulation, options = device.emulation(casting, target)
    with shown("emulating", quiet=as_json) as bar:
        found = api.emulate(model, emulation, data=data, progress=bar, trust=how.trust)
    report = replace(found, options=options)
    for note in report.warnings:
        warn(note)
    if as_json:
        write_json(report.to_dict())
    else:
        _print(report, ops)


def _print(report: EmulationReport, most: int) -> None:
    from finecast.data.scoring import by_output

    title = f"{report.target} {report.options}"
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
    note = "; ".join((*report.summary, f"{report.seconds:.1f} s"))
    scores = by_output(report.metric)
    notes = (note, *output_lines(report.errors, report.left_out, scores))
    if table.row_count:
        write_table(table, *notes)
        return
    for line in (title, *notes):
        write_note(line)
