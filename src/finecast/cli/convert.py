"""``finecast convert``: cast a model by a policy, verify it, save it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli import policy_options as po
from finecast.cli.output import add_row, new_table, progress, warn, write_json, write_table
from finecast.cli.profile import dim_sizes

if TYPE_CHECKING:
    from finecast.tuner.conversion import Conversion

Dim = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=SIZE", help="Size of a free dimension, to verify with."),
]
NoVerify = Annotated[
    bool,
    typer.Option("--no-verify", help="Write the model even if nothing here can run it."),
]


def run(
    model: Annotated[Path, typer.Argument(help="The FP32 ONNX model.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The converted model.")],
    auto_cast: po.AutoCast = "auto",
    auto_cast_type: po.AutoCastType = "bf16",
    include: po.Include = None,
    exclude: po.Exclude = None,
    op: po.OpFormat = None,
    rules: po.Rules = None,
    io: po.Io = None,
    engine: po.EngineName = None,
    data: Annotated[
        Path | None, typer.Option(help="An .npz whose ranges the rules may use.")
    ] = None,
    dim: Dim = None,
    plan_out: Annotated[Path | None, typer.Option(help="Write the plan here too.")] = None,
    no_verify: NoVerify = False,
    force: po.Force = False,
    as_json: po.Json = False,
) -> None:
    """Cast a model by a policy, verify and save it.

    Casts stand where they serve most ops, constants are converted ahead of time, input and
    output types are kept. Nothing is written unless the model is valid and runs.

    Examples:
      finecast convert model.onnx -o low.onnx --auto-cast all --auto-cast-type bf16

      finecast convert model.onnx -o low.onnx --op Softmax=fp32 --exclude 'head/.*'
    """
    from finecast import api
    from finecast.frontends.onnx.model import check_writable

    policy = po.make_policy(
        auto_cast, auto_cast_type, include=include, exclude=exclude, op=op, io=io
    )
    if plan_out is not None:
        check_writable(plan_out, force=force)
    with progress("converting", quiet=as_json):
        result = api.convert(
            model,
            output,
            policy,
            engine=engine,
            data=data,
            dims=dim_sizes(dim or ()),
            user_rules=po.load_rules(rules),
            verify=not no_verify,
            force=force,
        )
    if plan_out is not None:
        from finecast.files import write_text

        write_text(plan_out, result.plan.to_json())
    report(result, output, as_json=as_json)


def report(result: Conversion, output: Path, *, as_json: bool) -> None:
    """Print what was done."""
    for line in result.warnings:
        warn(line)
    if as_json:
        write_json(to_dict(result, output))
        return
    verified = result.verified
    table = new_table(str(output), ("", "value"), fold="value")
    rows = {
        "ops": ", ".join(f"{n} {fmt}" for fmt, n in result.plan.counts.items()) or "none",
        "casts inside": str(result.casts),
        "size": " -> ".join(f"{b / 1e6:.2f} MB" for b in result.size_bytes),
        "opset": str(result.plan.opset),
        "verified in": verified.engine or "nothing",
        "error against fp32": _errors(result) or verified.note,
        "time": f"{result.seconds:.2f} s",
    }
    for name, value in rows.items():
        add_row(table, name, value)
    write_table(table)


def _errors(result: Conversion) -> str:
    found = result.verified
    if found.relative_error is None or found.max_abs_error is None:
        return ""
    return f"relative {found.relative_error:.3g}, largest {found.max_abs_error:.3g}"


def to_dict(result: Conversion, output: Path) -> dict[str, Any]:
    """The report as JSON."""
    before, after = result.size_bytes
    return {
        "output": str(output),
        "nodes": result.nodes,
        "ops": result.plan.counts,
        "casts": result.casts,
        "opset": result.plan.opset,
        "size_bytes": {"before": before, "after": after},
        "seconds": result.seconds,
        "verified": {
            "engine": result.verified.engine,
            "max_abs_error": result.verified.max_abs_error,
            "relative_error": result.verified.relative_error,
            "note": result.verified.note,
        },
        "warnings": list(result.warnings),
    }
