"""``finecast inspect``: what a model is made of, and what its values look like on data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli import policy_options as po
from finecast.cli.output import add_row, new_table, progress, write_json, write_table
from finecast.cli.profile import dim_sizes

if TYPE_CHECKING:
    from finecast.measure.census import Census, Risk


def run(
    model: Annotated[Path, typer.Argument(help="An ONNX model.")],
    data: Annotated[
        Path | None, typer.Option(help="Run it on this .npz and report ranges per value.")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="The array in --data that is no input.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Size of a free batch dimension.")] = 1,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="Size of another free dimension."),
    ] = None,
    auto_cast_type: po.AutoCastType = "bf16",
    as_json: po.Json = False,
) -> None:
    """A model's ops by class and type, parameters, FLOPs and bytes.

    FLOPs and bytes are for one call at --batch and --dim. With --data, values that overflow
    or vanish in the low format are reported, and the first op that gives NaN or Inf.

    Examples:
      finecast inspect model.onnx

      finecast inspect model.onnx --data val.npz --auto-cast-type fp16
    """
    from finecast import api
    from finecast.policy import low_format

    low = low_format(auto_cast_type)
    with progress("inspecting", quiet=as_json):
        census = api.inspect(
            model, data=data, labels=labels, batch=batch, dims=dim_sizes(dim or ()), low=low
        )
    if as_json:
        write_json(_to_dict(census))
    else:
        _print(census, low.label)


def _print(census: Census, low: str) -> None:
    table = new_table(
        f"{census.name}: opset {census.opset}, {census.nodes} nodes,"
        f" {census.parameters:,} parameters, {census.size_bytes / 1e6:.2f} MB",
        ("class", "ops", "types"),
        ("nodes", "MFLOP", "MB moved", "parameters"),
        fold="ops",
    )
    for row in census.classes:
        add_row(
            table,
            row.kind,
            ", ".join(f"{op} {n}" for op, n in row.ops.items()),
            ", ".join(f"{fmt} {n}" for fmt, n in row.types.items()),
            str(row.nodes),
            _number(row.flops, row.unknown),
            _number(row.bytes, row.unknown),
            f"{row.parameters:,}" if row.parameters else "",
        )
    notes = [f"{key}: {text}" for key, text in census.notes.items()]
    write_table(table, note="\n".join(notes))
    if census.warnings:
        _print_warnings(census.warnings, low)


def _print_warnings(warnings: tuple[Risk, ...], low: str) -> None:
    table = new_table(f"values that {low} cannot hold", ("value", "of", "what"), fold="value")
    for one in warnings:
        add_row(table, one.value, one.node, one.text)
    write_table(table)


def _number(value: float, unknown: int) -> str:
    """Millions; a lower bound where nodes of unknown shape are not counted."""
    return f"{'>= ' if unknown else ''}{value / 1e6:,.2f}" if value else ""


def _to_dict(census: Census) -> dict[str, Any]:
    return {
        "model": census.name,
        "opset": census.opset,
        "nodes": census.nodes,
        "parameters": census.parameters,
        "size_bytes": census.size_bytes,
        "classes": [
            {
                "class": row.kind,
                "nodes": row.nodes,
                "ops": row.ops,
                "types": row.types,
                "flops": row.flops,
                "bytes": row.bytes,
                "unknown_shapes": row.unknown,
                "parameters": row.parameters,
            }
            for row in census.classes
        ],
        "notes": census.notes,
        "warnings": [
            {"value": w.value, "node": w.node, "text": w.text} for w in census.warnings
        ],
    }
