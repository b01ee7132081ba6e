"""``finecast profile``: latency, throughput, memory and per-op times of models, compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finecast.cli.common import Json, SizedSamples
from finecast.cli.output import (
    add_row,
    new_table,
    warn,
    write_json,
    write_line,
    write_table,
)
from finecast.native.profiling import Rounds
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.native.profiling import Figures, ProfileReport

_Runner = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME[:DEVICE]",
        help="openvino, onnxruntime, tensorflow, torch or torch-eager; with :DEVICE if not the"
        " CPU.",
    ),
]
_Trusted = Annotated[
    bool,
    typer.Option("--trust", help="Run code in a .keras file, if you know who made the file."),
]
_MOST_KERNELS = 25
_MIB = 2**20


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

    with shown("profiling", quiet=as_json) as report:
        found = api.profile(
            models, data=data, engine=engine, rounds=rounds, progress=report, trust=trust
        )
    for note in found.warnings:
        warn(note)
    if as_json:
        write_json(found.to_dict())
    else:
        _print(found)


def _print(found: ProfileReport) -> None:
    figures = found.figures
    table = new_table(
        f"{found.engine}, batch {figures[0].model.batch}",
        ("model",),
        ("median\nms", "p10 to p90\nms", "spread", "samples/s", "peak\nMiB", "speedup"),
        fold="model",
    )
    for f in figures:
        time = f.latency
        peak = "" if f.memory is None else f"{f.memory.peak_bytes / _MIB:.0f}"
        add_row(
            table,
            f.model.label,
            f"{time.median_s * 1e3:.3f}",
            f"{time.p10_s * 1e3:.3f} to {time.p90_s * 1e3:.3f}",
            f"{time.spread:.0%}",
            f"{f.throughput_per_s:.1f}",
            peak,
            f"x{f.speedup.median:.2f}",
        )
    write_table(table)
    for f in figures:
        if f.kernels:
            _print_kernels(f)
            lines = [one.text for one in found.apart(f)]
            for line in lines[:_MOST_KERNELS]:
                write_line(f"beside {figures[0].model.label}: {line}")


def _print_kernels(f: Figures) -> None:
    total = sum(k.time_s for k in f.kernels)
    table = new_table(
        f"{f.model.label}: kernels, {total * 1e3:.3f} ms",
        ("ops", "kernel kind", "format"),
        ("ms", "share"),
        fold=("ops", "kernel kind"),
    )
    for k in f.kernels[:_MOST_KERNELS]:
        names = " ".join(k.ops) or "(added by the engine)"
        share = f"{k.time_s / total:.1%}"
        add_row(table, names, k.kind, k.format, f"{k.time_s * 1e3:.3f}", share)
    rest = len(f.kernels) - _MOST_KERNELS
    more = [f"and {rest} faster ones: --json lists all"] if rest > 0 else []
    write_table(table, *more)
