"""``finecast profile``: latency, throughput, memory and per-op times of models, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finecast.cli.common import Json, SizedSamples
from finecast.cli.output import warn, write_report
from finecast.native.profiling import Rounds
from finecast.plugin import engines
from finecast.progress import shown

_Runner = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME[:DEVICE]",
        help=f"{', '.join(entry.name for entry in engines())}; :DEVICE if not CPU.",
    ),
]
_Trusted = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run code that a .keras file contains. Only for files whose author you trust.",
    ),
]


def run(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="ONNX files, SavedModels, .pt2 files, or what OpenVINO reads.",
        ),
    ],
    data: SizedSamples,
    rounds: Rounds,
    engine: _Runner = None,
    trust: _Trusted = False,
    as_json: Json = False,
) -> None:
    """Latency (median, spread), throughput and peak memory of models, compared.

    Several models run in turns, so that their ratio to the first holds on a noisy machine.

    Examples:
      finecast profile model.onnx tuned.onnx --data val.npz

      finecast profile tuned.onnx --engine onnxruntime --ops
    """
    from finecast import api

    with shown("profiling") as bar:
        report = api.profile(
            models, data=data, engine=engine, rounds=rounds, progress=bar, trust=trust
        )
    warn(*report.warnings)
    write_report(report, as_json=as_json)
