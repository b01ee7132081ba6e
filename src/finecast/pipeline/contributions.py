"""The share of each op in the output error, and the likely reasons.

Law: each op is rounded alone, in one session whose roundings are switched; to first order
the squared errors of single ops add up to that of all (``planning/sensitivity.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.emulation import Emulation
from finecast.devices.setting import Setting
from finecast.engines.base import Array, EmulatedSession, outputs_on
from finecast.engines.exact import Exact
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import OpKind, by_name
from finecast.ops.flops import Shape, flops
from finecast.planning.sensitivity import measure
from finecast.progress import Progress, silent
from finecast.rules.facts import ValueFacts

# Shares of a value's numbers below this are not reported.
_NOTED_SHARE: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """The relative output error of one op, its share of all squared errors, the reasons."""

    node: Node
    error: float
    share: float
    reasons: tuple[str, ...]


def contributions(
    graph: Graph,
    session: EmulatedSession,
    emulation: Emulation,
    setting: Setting,
    exact: Exact,
    facts: Mapping[int, ValueFacts],
    *,
    progress: Progress = silent,
) -> list[Contribution]:
    """Every cast op that adds to the output error, the worst first."""
    nodes = sorted(setting.reads | setting.writes)
    if not nodes:
        return []

    def probe(bits: NDArray[np.bool_]) -> list[Array]:
        chosen = frozenset(n for n, on in zip(nodes, bits, strict=True) if on)
        session.apply(setting.only(chosen))
        return outputs_on(session, exact.calls)

    found = measure(
        len(nodes),
        probe,
        counted=exact.counted,
        on_probe=lambda done, total: progress("ops", done, total),
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
    """What the facts say against ``fmt`` at ``node``; if nothing, its few digits."""
    found: list[str] = []
    values = [*graph.following_inputs(node), *graph.following_outputs(node)]
    for value in {v.id: v for v in values}.values():
        seen = facts.get(value.id)
        found += _constant_range(value, fmt) if seen is None else _observed(value, seen, fmt)
    if by_name(node.op).accumulates and (depth := _depth(graph, node, facts)) > 1:
        found.append(f"sums {depth} terms")
    if not found:
        size = f"{fmt.unit_roundoff:.2g}"
        of = f"half a step is {size} of the range" if fmt.has_scales else f"rounds to {size}"
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
    """Terms of each sum: of a product by its FLOPs, else elements in over elements out.

    0 if a shape is unknown, or the op computes several products: attention, recurrent cells.
    """
    shapes = {i: f.shape for i, f in facts.items()}
    source, result = (
        _elements(graph, ports[0], shapes) for ports in (node.inputs, node.outputs)
    )
    if not result:
        return 0
    info = by_name(node.op)
    if info.kind in (OpKind.MATMUL, OpKind.CONV):
        operations_per_term = len(node.inputs) if node.op == "einsum" else 2
        return round((flops(graph, node, shapes) or 0) / (operations_per_term * result))
    return 0 if info.matmul_engine else source // result


def _elements(graph: Graph, index: int | None, shapes: Mapping[int, Shape]) -> int:
    """Elements of a value by its observed shape, else its declared one; 0 if unknown."""
    if index is None:
        return 0
    shape = shapes.get(index, graph.values[index].shape)
    if shape is None or not all(isinstance(d, int) for d in shape):
        return 0
    return math.prod(d for d in shape if isinstance(d, int))
