"""Lines on the outputs that errors and metrics are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

_LISTED: Final = 4
"""Outputs that are named in one line; JSON has all."""


def output_lines(
    errors: Mapping[str, float], left_out: Sequence[str], scores: Mapping[str, float]
) -> list[str]:
    """Lines that name the outputs which errors and metric are of; none if a model has one.

    Args:
        errors: Relative errors by output, the worst first.
        left_out: Outputs that no error is of.
        scores: The metric by output, the worst first.
    """
    if len(errors) + len(left_out) < 2:
        return []
    lines = [f"error by output, worst first: {_listed(errors)}"]
    if len(scores) > 1 or scores.keys() != errors.keys():
        lines += [f"metric by output, worst first: {_listed(scores)}"] if scores else []
    if left_out:
        few = ", ".join(left_out[:_LISTED]) + _more(len(left_out))
        lines.append(f"not counted, as they copy an input or --of names others: {few}")
    return lines


def _listed(figures: Mapping[str, float]) -> str:
    found = [f"{name} {value:.4g}" for name, value in figures.items()]
    return ", ".join(found[:_LISTED]) + _more(len(found))


def _more(count: int) -> str:
    return f" and {count - _LISTED} more" if count > _LISTED else ""
