"""Which ops bring the error, and why: range, underflow, reduction depth.

Law: the ops are probed alone, in one switched session; to first order their squared errors
add up to the whole's (see ``sensitivity``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import Array, EmulatedSession, Feeds, outputs_on
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import by_name
from finecast.planning.sensitivity import measure
from finecast.progress import Progress, silent
from finecast.rules.facts import ValueFacts

# Shares below this are not worth a line.
_NOTED_SHARE: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """One op's own relative output error, its share of all squared errors, and the reasons."""

    node: Node
    error: float
    share: float
    reasons: tuple[str, ...]


def contributions(
    graph: Graph,
    session: EmulatedSession,
    emulation: Emulation,
    setting: Setting,
    feeds: Sequence[Feeds],
    facts: Mapping[int, ValueFacts],
    *,
    progress: Progress = silent,
) -> list[Contribution]:
    """Every cast op that brings error, the worst first."""
    nodes = sorted(setting.reads | setting.writes)
    if not nodes:
        return []

    def probe(bits: NDArray[np.bool_]) -> list[Array]:
        chosen = frozenset(n for n, on in zip(nodes, bits, strict=True) if on)
        session.apply(setting.only(chosen))
        return outputs_on(session, feeds)

    found = measure(
        len(nodes), probe, on_probe=lambda done, total: progress("ops", done, total)
    ).shares
    session.apply(setting)
    total = float(found.sum()) or 1.0
    order = np.argsort(found)[::-1]
    return [
        Contribution(
            node=graph.nodes[nodes[k]],
            error=math.sqrt(float(found[k])),
            share=float(found[k]) / total,
            reasons=reasons(graph, graph.nodes[nodes[k]], emulation.format, facts),
        )
        for k in order
        if found[k] > 0
    ]


def reasons(
    graph: Graph, node: Node, fmt: Format, facts: Mapping[int, ValueFacts]
) -> tuple[str, ...]:
    """What the facts say against ``fmt`` at ``node``; its digits alone where nothing else."""
    found: list[str] = []
    values = [*graph.following_inputs(node), *graph.following_outputs(node)]
    for value in {v.id: v for v in values}.values():
        seen = facts.get(value.id)
        found += _constant_range(value, fmt) if seen is None else _observed(value, seen, fmt)
    depth = _depth(graph, node, facts)
    if depth > 1 and by_name(node.op).accumulates:
        found.append(f"sums {depth} terms")
    if not found:
        size = f"{fmt.unit_roundoff:.2g}"
        of = f"half a step is {size} of the range" if fmt.scaled else f"rounds to {size}"
        found.append(f"digits: {fmt.label} {of}")
    return tuple(found)


def _observed(value: Value, seen: ValueFacts, fmt: Format) -> list[str]:
    if seen.largest >= overflow_limit(fmt):
        return [
            f"overflow: {value.name} reaches {seen.largest:.3g}, {fmt.label} {fmt.max:.3g}"
        ]
    flushed, small = seen.flushed_share(fmt), seen.subnormal_share(fmt)
    if flushed > _NOTED_SHARE:
        return [f"underflow: {flushed:.1%} of {value.name} becomes 0"]
    if small > _NOTED_SHARE:
        return [f"underflow: {small:.1%} of {value.name} is subnormal"]
    return []


def _constant_range(value: Value, fmt: Format) -> list[str]:
    stats = value.constant
    if stats is None or stats.largest < overflow_limit(fmt):
        return []
    return [f"overflow: constant {value.name} reaches {stats.largest:.3g}"]


def _depth(graph: Graph, node: Node, facts: Mapping[int, ValueFacts]) -> int:
    """Terms of each sum: by the weight of a product, else elements in over elements out."""
    if by_name(node.op).matmul_engine:
        return _product_depth(graph, node, facts)
    sizes = [
        facts[i].count
        for i in (node.inputs[0], node.outputs[0])
        if i is not None and i in facts
    ]
    return sizes[0] // max(sizes[1], 1) if len(sizes) == 2 else 0


def _product_depth(graph: Graph, node: Node, facts: Mapping[int, ValueFacts]) -> int:
    index = node.inputs[1] if len(node.inputs) > 1 else None
    if index is None:
        return 0
    seen = facts.get(index)
    shape = seen.shape if seen is not None else graph.values[index].shape
    if shape is None or len(shape) < 2 or not all(isinstance(d, int) for d in shape):
        return 0
    dims = [d for d in shape if isinstance(d, int)]
    if node.op.endswith("conv"):
        return math.prod(dims[1:])
    last = node.attributes.get("transB", 0)
    return dims[-1] if last else dims[-2]
