"""``finecast inspect``: what a model is made of, and what its values look like on data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finecast.cli.common import Json, Model, Read, SizedSamples
from finecast.cli.output import add_row, new_table, write_json, write_table
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.native.census import Census, Risk


def run(
    model: Model,
    data: SizedSamples,
    how: Read,
    auto_cast_type: Annotated[
        str, typer.Option("--auto-cast-type", metavar="FORMAT", help="The low format.")
    ] = "bf16",
    as_json: Json = False,
) -> None:
    """A model's ops by class and type, parameters, FLOPs and bytes.

    FLOPs and bytes are for one call at --batch and --dim. With --data, values that overflow
    or vanish in the low format are reported, and the first op that gives NaN or Inf.

    Examples:
      finecast inspect model.onnx

      finecast inspect model.onnx --data val.npz --auto-cast-type fp16
    """
    from finecast import api
    from finecast.native.opening import check_options
    from finecast.rules.policy import low_format

    low = low_format(auto_cast_type)
    check_options(
        model, {"--data": data.given, "--dim": data.dims, "--from-type": how.from_type}
    )
    with shown("inspecting", quiet=as_json):
        census = api.inspect(
            model, data=data, low=low, from_type=how.from_type, trust=how.trust
        )
    if as_json:
        write_json(census.to_dict())
    else:
        _print(census, low.label)


def _print(census: Census, low: str) -> None:
    opset = f"opset {census.opset}, " if census.opset else ""
    table = new_table(
        f"{census.name}: {opset}{census.nodes} nodes,"
        f" {census.parameters:,} parameters, {census.size_bytes / 1e6:.2f} MB",
        ("class", "ops", "types"),
        ("nodes", "MFLOP", "MB\nmoved", "params"),
        fold=("ops", "types"),
    )
    for row in census.classes:
        add_row(
            table,
            row.kind,
            ", ".join(f"{op} {n}" for op, n in row.ops.items()),
            ", ".join(f"{fmt} {n}" for fmt, n in row.types.items()),
            str(row.nodes),
            _number(row.flops, row.uncounted),
            _number(row.bytes, row.unknown),
            f"{row.parameters:,}" if row.parameters else "",
        )
    notes = [f"{key}: {text}" for key, text in census.notes.items()]
    write_table(table, *notes)
    if census.warnings:
        _print_warnings(census.warnings, low)


def _print_warnings(warnings: tuple[Risk, ...], low: str) -> None:
    table = new_table(f"values that {low} cannot hold", ("value", "of", "what"), fold="value")
    for one in warnings:
        add_row(table, one.value, one.node, one.text)
    write_table(table)


def _number(value: float, unknown: int) -> str:
    """Millions; a lower bound if ``unknown`` nodes are left out, or counted only once."""
    if not value:
        return "unknown" if unknown else ""
    return f"{'>= ' if unknown else ''}{value / 1e6:,.2f}"
