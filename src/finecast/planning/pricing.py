"""Objectives other than time: bytes of the stored model, and bytes in memory while it runs.

An analysis has the seconds of each unit and cast. The functions here put bytes in their
place; the search for plans stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from finecast.graph import Graph, Value
from finecast.numbers.formats import Format
from finecast.planning.memory import alive_at_peak, peak_bytes, rest_in_memory
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Priced
from finecast.rules import Permission

# The model's total time counts as this share of its bytes: among plans of equal size the
# faster one is chosen, and time never outweighs a difference in size that matters (2%).
_TIME_SHARE: Final = 0.01
# An ONNX Cast node with its name and those of two values; one in OpenVINO's IR takes more.
_CAST_NODE_BYTES: Final = 150.0


def by_size(planner: Planner, analysis: Analysis) -> Analysis:
    """``analysis`` priced by the bytes of the stored model: of constants and cast nodes."""
    graph = planner.graph
    stored = sum(_constant_bytes(v) for v in graph.values)
    per_second = _bytes_per_second(analysis, stored)

    def cast_bytes(value: Value, source: Format, to: Format) -> float:
        if source.storage is to.storage or source.has_scales or value.constant is not None:
            return 0.0
        return _CAST_NODE_BYTES + per_second * analysis.cast_time(value, source, to)

    return replace(
        analysis,
        priced=Priced.SIZE,
        times={fmt: per_second * times for fmt, times in analysis.times.items()},
        cast_time=cast_bytes,
        constant_cost=_stored_bytes(graph, planner.permissions),
    )


def by_memory(planner: Planner, analysis: Analysis) -> Analysis:
    """``analysis`` priced by the bytes of the running model, as far as units decide them.

    Counted are the constants, and the values alive at the memory peak of the fp32 model.
    """
    graph, units = planner.graph, analysis.units
    sized = by_size(planner, analysis)
    results = {fmt: np.zeros(len(units.members)) for fmt in analysis.times}
    for one in alive_at_peak(rest_in_memory(graph, {}, analysis.shapes, units.of)):
        producer = graph.values[one.value].producer
        if producer is not None and producer in units.of:
            for fmt, amount in results.items():
                amount[units.of[producer]] += fmt.result.bytes_for(one.elements)
    return replace(
        sized,
        priced=Priced.MEMORY,
        times={fmt: times + results[fmt] for fmt, times in sized.times.items()},
    )


def resident_bytes(planner: Planner, analysis: Analysis, formats: Mapping[str, Format]) -> int:
    """Bytes in memory while a plan's model runs, by the estimate of ``planning.memory``.

    Args:
        planner: The planner that made the plan.
        analysis: Has the shapes and the units.
        formats: The plan's formats, by node name; other nodes keep theirs.
    """
    graph = planner.graph
    stored = _stored_bytes(graph, planner.permissions)
    named = {n.id: formats[n.name] for n in graph.nodes if n.name in formats}
    constants = 0.0
    for value in graph.values:
        if value.constant is None or value.format is None:
            continue
        own = value.format
        read = {named.get(n, own) for n in value.uses} if own is Format.FP32 else {own}
        constants += sum({fmt.storage: stored(value, fmt) for fmt in read}.values())
    return peak_bytes(graph, named, analysis.shapes, analysis.units.of, int(constants))


def _bytes_per_second(analysis: Analysis, stored: float) -> float:
    total_s = float(analysis.times[Format.FP32].sum())
    return (
        _TIME_SHARE * max(stored, 1.0) / total_s if np.isfinite(total_s) and total_s else 0.0
    )


def _constant_bytes(value: Value) -> float:
    if value.constant is None or value.format is None:
        return 0.0
    return float(value.format.bytes_for(value.constant.size))


def _stored_bytes(
    graph: Graph, permissions: Mapping[int, Permission]
) -> Callable[[Value, Format], float]:
    """Gives the bytes of the copy of a constant that ops in a format read.

    An op in a scaled format reads constants that have no encoding, such as a bias, in fp32.
    """

    def coded(value: Value, fmt: Format) -> bool:
        for node in value.uses:
            found = permissions.get(node)
            encodings = None if found is None else found.encodings.get(fmt)
            if encodings and any(
                graph.nodes[node].inputs[port] == value.id for port in encodings.constants
            ):
                return True
        return False

    def stored_bytes(value: Value, fmt: Format) -> float:
        if value.constant is None:
            return 0.0
        if fmt.has_scales and not coded(value, fmt):
            fmt = Format.FP32
        return float(fmt.bytes_for(value.constant.size))

    return stored_bytes
