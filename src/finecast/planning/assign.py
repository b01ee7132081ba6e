"""From permissions to the formats of a plan, without a cost model."""

from __future__ import annotations

from collections.abc import Mapping

from finecast.numbers.formats import Format
from finecast.planning.choices import Choice
from finecast.planning.units import Units
from finecast.rules import Permission


def lowest(permissions: Mapping[int, Permission], *lows: Format) -> dict[int, Format]:
    """For each node the first of ``lows`` that is permitted, else fp32, else what is left."""
    return {i: pick(p, *lows, Format.FP32) for i, p in permissions.items()}


def highest(permissions: Mapping[int, Permission]) -> dict[int, Format]:
    """For each node fp32 where it is permitted, else what is left."""
    return {i: pick(p, Format.FP32) for i, p in permissions.items()}


def chosen(
    permissions: Mapping[int, Permission], units: Units, choice: Choice
) -> dict[int, Format]:
    """Units as chosen, all else fp32 where permitted.

    So are a unit's ops that may not have a format for operands that others of it have.
    """
    of = choice.by_node(units)
    fp32 = Format.FP32
    return {i: pick(p, of.get(i, fp32), fp32) for i, p in permissions.items()}


def pick(permission: Permission, *preferred: Format) -> Format:
    """The first of ``preferred`` that is permitted, else the smallest permitted format."""
    for fmt in preferred:
        if fmt in permission.formats:
            return fmt
    return min(permission.formats, key=lambda f: (f.storage_bytes, f.label))
