"""The error that the measured sensitivities predict for any plan."""

from __future__ import annotations

from collections.abc import Mapping

from finecast.numbers.formats import Format
from finecast.planning.problem import Analysis


def predicted_error(analysis: Analysis, formats: Mapping[int, Format]) -> float:
    """Squared relative output error if node i has ``formats[i]``.

    A unit of which any op is low counts as low, so roundings are never left out.
    """
    found = 0.0
    for fmt, rounded in analysis.rounded.items():
        low = {u for node, u in analysis.units.of.items() if formats.get(node) is fmt}
        found += sum(float(rounded.units[u]) for u in low)
        found += sum(
            float(error)
            for units, error in zip(rounded.lists, rounded.errors, strict=True)
            if not low.isdisjoint(units)
        )
    return analysis.saturation.together(found)
