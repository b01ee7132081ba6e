"""``finecast export``: a plan in the words of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from finecast.cli import Json, Verbatim, warn, write_json, write_note
from finecast.errors import UsageError

# Left-out ops that are told, without --json.
_TOLD: Final = 8


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of tune or convert.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="TOOL",
            help="torchao, nncf, onnxruntime, onnxconverter-common, modelopt-autocast,"
            " llm-compressor, coremltools, neuron or tensorrt.",
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="MODEL", help="For tensorrt: the plan's model, as ONNX in FP32."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="By default it is printed."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Write a plan in the words of another tool, whose kernels then run it.

    For most tools that is a module of Python with one function. llm-compressor gets a recipe,
    neuron a line of flags, tensorrt a script with a strongly typed model beside it.
    No tool has to be installed here. Ops that a tool cannot express as they are planned are
    listed; they are in FP32 in what it makes.

    Examples:
      finecast export tuned.plan.json --to onnxconverter-common -o to_fp16.py

      finecast export module.plan.json --to torchao -o quantize.py

      finecast export tuned.plan.json --to tensorrt --model m.onnx -o trt.py
    """
    from finecast_export.exporting import export

    exported = export(plan, to, output, model=model, force=force)
    if as_json:
        write_json(exported.to_dict())
        return
    left = exported.left_out
    warn(*(one.text for one in left[:_TOLD]))
    if len(left) > _TOLD:
        warn(f"{len(left) - _TOLD} more ops cannot be expressed: --json lists all")
    if output is None and exported.write_model is not None:
        raise UsageError(
            f"{exported.tool} gets a model, too, which cannot be printed",
            where="-o",
            fix="name the script that is written; the model goes beside it",
        )
    warn(*exported.notes)
    if output is None:
        for line in exported.text.splitlines():
            write_note(Verbatim(line))
        return
    counts = ", ".join(f"{count} {label}" for label, count in exported.stated.items())
    write_note(Verbatim(f"wrote {output}, for {exported.tool}: {counts or 'no op'} exported"))
