"""``finecast emulate``: what a device you do not have would do to your numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from finecast.cli.common import Evaluation, Json, Model, Trusted
from finecast.cli.output import warn, write_report
from finecast.cli.policy_options import CompilerCasting, NeededTarget, OfDevice
from finecast.devices.choice import emulated
from finecast.progress import shown

_MOST_OPS = 10


def run(
    model: Model,
    casting: CompilerCasting,
    device: OfDevice,
    data: Evaluation,
    how: Trusted,
    target: NeededTarget = None,
    ops: Annotated[int, typer.Option(min=0, help="Ops to show.")] = _MOST_OPS,
    as_json: Json = False,
) -> None:
    r"""Metric and output error on a device that is not here, and the ops that cause the error.

    The options are those of the device's compiler, with its defaults: without --auto-cast
    nothing is cast, on inf1 all.

    Examples:
      finecast emulate m.onnx --target trn1 --auto-cast all \
        --auto-cast-type fp16 --data val.npz --metric top1

      finecast emulate m.onnx --target inf1 --fast-math fp32-cast-matmult \
        no-fast-relayout --data val.npz

      finecast emulate m.pt2 --target trn1 --auto-cast matmult --data val.npz
    """
    from finecast import api

    emulation, options, notes = emulated(casting.request(target), device)
    warn(*notes)
    with shown("emulating") as bar:
        report = api.emulate(model, emulation, data=data, progress=bar, trust=how.trust)
    report = replace(report, options=options)
    warn(*report.warnings)
    write_report(report, report.by_op(ops), as_json=as_json)
