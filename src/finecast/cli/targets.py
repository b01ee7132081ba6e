"""``finecast targets``: the devices that can be emulated, and their documented facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.output import add_row, new_table, write_json, write_table
from finecast.naming import enumerated

if TYPE_CHECKING:
    from finecast.devices.targets import EngineSpec, Target


def run(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One target, in full.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The devices that --target takes; with NAME, one of them in full.

    Example:
      finecast targets trn1
    """
    from finecast.devices.targets import list_targets, load_target

    targets = [load_target(n) for n in ((name,) if name else list_targets())]
    if as_json:
        write_json(_json(targets[0]) if name else [_json(t) for t in targets])
    elif name:
        _print_one(targets[0])
    else:
        _print_all(targets)


def _json(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "description": target.description,
        "unit": target.unit,
        "engines": {role.value: _engine(spec) for role, spec in target.engines.items()},
        "bandwidth_gb_s": target.bandwidth_gb_s,
        "op_overhead_us": target.op_overhead_s * 1e6,
        "cast_overhead_us": target.cast_overhead_s * 1e6,
        "free_casts": target.free_casts,
        "transposes": [r.value for r in target.relayouts],
        "saturate_infinity": target.saturate_infinity,
        "saturating_fp8": target.saturating_fp8,
        "stochastic_rounding": target.stochastic_rounding,
        "widened": sorted(fmt.label for fmt in target.widened),
    }


def _engine(spec: EngineSpec) -> dict[str, Any]:
    return {
        "tflops": {f.label: rate for f, rate in spec.rates_tflops.items()},
        "runs_as": {f.label: real.label for f, real in spec.runs_as.items()},
        "accumulates_in": spec.accumulates_in.label,
        "accumulation": {f.label: a.label for f, a in spec.accumulation.items()},
        "flushes_subnormals": sorted(f.label for f in spec.flushes_subnormals),
        "blocks": {f.label: length for f, length in spec.blocks.items()},
    }


def _print_all(targets: list[Target]) -> None:
    from finecast.devices.targets import EngineRole, products_of

    table = new_table(
        "Targets, with names of products that mean the same",
        ("name", "device", "matmul formats, TFLOPS"),
        ("GB/s",),
        fold=("name", "device", "matmul formats, TFLOPS"),
    )
    for target in targets:
        rates = target.engine(EngineRole.MATMUL).rates_tflops
        add_row(
            table,
            ", ".join((target.name, *products_of(target.name))),
            target.description,
            ", ".join(f"{f.label} {rate:g}" for f, rate in rates.items()),
            f"{target.bandwidth_gb_s:g}",
        )
    write_table(table, "finecast targets NAME shows one in full")


def _print_one(target: Target) -> None:
    table = new_table(
        f"{target.name}: {target.description}, {target.unit}",
        ("engine", "format", "computes in", "sums", "subnormal"),
        ("terms a\nblock", "TFLOPS"),
    )
    for role, spec in target.engines.items():
        for fmt in (*spec.rates_tflops, *spec.runs_as):
            real = spec.computes_in(fmt)
            add_row(
                table,
                role.value,
                fmt.label,
                real.label if real else "",
                spec.accumulation_of(fmt).label,
                "zero" if real in spec.flushes_subnormals else "kept",
                str(spec.blocks.get(real or fmt, "")),
                f"{spec.rate_tflops(fmt):g}",
            )
    flags = {
        "casts at the ports are free": target.free_casts,
        "infinities can be clamped in its transposes": target.saturate_infinity,
        "conversions to fp8 saturate": target.saturating_fp8,
        "stochastic rounding": target.stochastic_rounding,
    }
    lines = [f"{what}: {'yes' if on else 'no'}" for what, on in flags.items()]
    moves = " or ".join(r.value for r in target.relayouts)
    lines.append(f"{target.bandwidth_gb_s:g} GB/s; transposes by {moves}")
    if target.widened:
        labels = enumerated(sorted(fmt.label for fmt in target.widened))
        lines.append(f"stored as fp32, too, once a model is loaded: {labels}")
    write_table(table, *lines)
