"""Helpers to observe a model's values: facts of inputs, and groups of values for one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from finecast.engines.base import Feeds, calls_of
from finecast.graph import Graph
from finecast.rules.facts import ValueFacts, merge

SHOWN_BYTES: Final = 256 << 20
"""Bytes of values that one run may output: bounds the memory that observing takes."""


def input_facts(graph: Graph, batches: Iterable[Feeds]) -> dict[int, ValueFacts]:
    """Facts of the float inputs."""
    facts: dict[int, ValueFacts] = {}
    floats = {v.name: v.id for v in graph.inputs if v.format is not None}
    for feeds in (call for batch in batches for call in calls_of(batch)):
        seen = {floats[n]: ValueFacts.of(a) for n, a in feeds.items() if n in floats}
        facts = merge(facts, seen)
    return facts


def packed(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Groups of names, in order, of at most ``limit`` bytes each, or of one larger value."""
    groups: list[list[str]] = []
    total = limit + 1
    for name, size in sizes.items():
        if total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups
