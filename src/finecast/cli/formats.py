"""``finecast formats``: range, precision, strengths, weaknesses of floating-point formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.output import add_row, new_table, write_json, write_table
from finecast.errors import UsageError

if TYPE_CHECKING:
    from finecast.numbers.formats import Format

# By the bits of the exponent and of the fraction, and by bytes.
_RANGE_STRENGTH = {8: "dynamic range, extremely small or large numbers"}
_RANGE_WEAKNESS = {3: "very low range", 4: "very low range", 5: "low range"}
_DIGITS_STRENGTH = {
    23: "numeric precision",
    10: "numeric precision for mid-range numbers",
    4: "most digits of the 8-bit formats",
}
_DIGITS_WEAKNESS = {
    10: "medium precision",
    7: "low precision",
    4: "very low precision",
    3: "very low precision",
    2: "very low precision",
}
_SIZE_STRENGTH = {16: "half the size of fp32", 8: "a quarter of the size of fp32"}
_SIZE_WEAKNESS = {32: "size, speed"}


def run(
    values: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,...", help="Show how these numbers come out, as 1e-8,0.1,70000."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Range, precision, strengths and weaknesses of every floating-point format.

    Examples:
      finecast formats --values 1e-8,0.1,70000
    """
    from finecast.numbers.formats import FLOATS

    numbers = _numbers(values)
    if as_json:
        write_json([_json(f, numbers) for f in FLOATS])
        return
    _print_facts(FLOATS)
    if numbers:
        _print_values(FLOATS, numbers)


def strengths(fmt: Format) -> str:
    """What the format is good at, by its bits."""
    parts = (
        _RANGE_STRENGTH.get(fmt.exponent_bits),
        _DIGITS_STRENGTH.get(fmt.mantissa_bits),
        _SIZE_STRENGTH.get(fmt.bits),
    )
    return "; ".join(p for p in parts if p)


def weaknesses(fmt: Format) -> str:
    """What the format is bad at, by its bits."""
    parts = (
        _RANGE_WEAKNESS.get(fmt.exponent_bits),
        _DIGITS_WEAKNESS.get(fmt.mantissa_bits),
        _SIZE_WEAKNESS.get(fmt.bits),
        "no infinities: overflow gives NaN" if fmt.finite_only else None,
    )
    return "; ".join(p for p in parts if p)


def _numbers(text: str | None) -> list[float]:
    items = [t for t in (text or "").replace(",", " ").split() if t]
    try:
        return [float(t) for t in items]
    except ValueError as error:
        raise UsageError(
            f"{error}".removeprefix("could not convert string to float: ") + " is no number",
            where="--values",
            fix="write numbers separated by commas, as 1e-8,0.1,70000",
        ) from None


def _rounded(fmt: Format, numbers: Sequence[float]) -> list[float]:
    """Each number rounded to fp32, as models hold it, and then to ``fmt``."""
    import numpy as np

    from finecast.numbers.rounding import round_to

    with np.errstate(over="ignore"):
        x = np.array(numbers, dtype=np.float64).astype(np.float32)
    return [float(v) for v in round_to(x, fmt)]


def _json(fmt: Format, numbers: Sequence[float]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "format": fmt.label,
        "exponent_bits": fmt.exponent_bits,
        "mantissa_bits": fmt.mantissa_bits,
        "storage_bytes": fmt.bytes_for(1),
        "minimum": -fmt.max,
        "maximum": fmt.max,
        "epsilon": fmt.epsilon,
        "smallest_normal": fmt.smallest_normal,
        "smallest_subnormal": fmt.smallest_subnormal,
        "infinities": not fmt.finite_only,
        "strengths": strengths(fmt),
        "weaknesses": weaknesses(fmt),
    }
    if numbers:
        # As text: JSON has no Inf and NaN, which show that a number overflows.
        pairs = zip(numbers, _rounded(fmt, numbers), strict=True)
        facts["values"] = [{"value": v, "becomes": repr(r)} for v, r in pairs]
    return facts


def _print_facts(formats: Sequence[Format]) -> None:
    facts = new_table(
        "Floating-point formats",
        ("type",),
        ("bits", "largest", "epsilon", "smallest", "subnormal"),
    )
    uses = new_table(
        "What they are good at", ("type", "strength", "weakness"), fold="weakness"
    )
    facts.columns[0].no_wrap = uses.columns[0].no_wrap = True
    uses.columns[1].no_wrap = False
    for fmt in formats:
        add_row(
            facts,
            fmt.label,
            f"1/{fmt.exponent_bits}/{fmt.mantissa_bits}",
            f"{fmt.max:.3g}" if fmt.max >= 1e6 else f"{fmt.max:g}",
            *(f"{x:.3g}" for x in (fmt.epsilon, fmt.smallest_normal, fmt.smallest_subnormal)),
        )
        add_row(uses, fmt.label, strengths(fmt), weaknesses(fmt))
    write_table(
        facts, "bits: sign / exponent / fraction", "smallest: the smallest normal number"
    )
    write_table(
        uses,
        "int8 has no range of its own: 256 steps over the range that data shows of a value,"
        " 255 over each output channel of a weight; nor have int4 and the formats of blocks"
        " (mxfp8, mxfp4, nvfp4, ...), whose numbers share a scale: finecast targets NAME",
    )


def _print_values(formats: Sequence[Format], numbers: Sequence[float]) -> None:
    table = new_table("What becomes of a number", ("type",), [f"{n:g}" for n in numbers])
    table.columns[0].no_wrap = True
    for fmt in formats:
        cells = (_outcome(n, r) for n, r in zip(numbers, _rounded(fmt, numbers), strict=True))
        add_row(table, fmt.label, *cells)
    write_table(table, "in brackets the relative error")


def _outcome(number: float, rounded: float) -> str:
    import math

    if not math.isfinite(number) or not math.isfinite(rounded):
        return f"{rounded:g}"
    if number != 0 and rounded == 0:
        return "0 (underflow)"
    error = abs(rounded - number) / abs(number) if number else 0.0
    return f"{rounded:.6g} ({error:.1g})" if error else f"{rounded:.6g}"
