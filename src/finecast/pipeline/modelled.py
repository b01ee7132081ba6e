"""Modelled time of a model on a target, under its compiler's options, by the roofline.

Law: casting more ops never makes the modelled time longer where casts are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from finecast.devices.emulation import Emulation, is_relayout
from finecast.devices.targets import Relayout
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.flops import bytes_moved, flops
from finecast.planning.cost import RooflineCost

# A byte move writes each 4-byte element as one burst of 64 bytes and reads it in sequence:
# (16 + 1) / 2 times the traffic of a copy. An estimate; the guides say only "slower".
_BYTE_MOVE_TRAFFIC: Final = 8.5
_TERA: Final = 1e12
_GIGA: Final = 1e9


def plan_time_s(
    graph: Graph, cost: RooflineCost, emulation: Emulation, formats: Mapping[int, Format]
) -> float:
    """Seconds for one run of a plan's model; ``formats`` are the plan's, by node id."""
    low = {n: f for n, f in formats.items() if f is not Format.FP32}
    stored = {n: f for n, f in low.items() if f.encodes_results}
    return modelled_time_s(graph, cost, emulation, low, stored)


def modelled_time_s(
    graph: Graph,
    cost: RooflineCost,
    emulation: Emulation,
    reads: Mapping[int, Format],
    writes: Mapping[int, Format],
) -> float:
    """Seconds for one run: each op's roofline, and the casts that are not free.

    Args:
        graph: The graph.
        cost: The roofline.
        emulation: How the device moves bytes.
        reads: The format that each cast op reads, by node id; others read fp32.
        writes: The format that each cast op writes, by node id; others write fp32.
    """
    stored = _stored_formats(graph, reads, writes)
    ops = sum(
        _op_time_s(graph, cost, emulation, reads.get(n.id, Format.FP32), stored, n)
        for n in graph.nodes
    )
    return ops + _cast_time_s(graph, cost, reads, stored)


def _stored_formats(
    graph: Graph, reads: Mapping[int, Format], writes: Mapping[int, Format]
) -> dict[int, Format]:
    """The format in which each value is stored, by id, where that is not the model's own."""
    stored: dict[int, Format] = {}
    for node in graph.float_nodes:
        if node.id in writes:
            for value in graph.following_outputs(node):
                stored[value.id] = writes[node.id].storage
        if node.id in reads:
            for value in graph.following_inputs(node):
                if value.constant is not None:  # weights are converted ahead of time
                    stored[value.id] = reads[node.id].storage
    return stored


def _op_time_s(
    graph: Graph,
    cost: RooflineCost,
    emulation: Emulation,
    fmt: Format,
    stored: Mapping[int, Format],
    node: Node,
) -> float:
    engine = cost.target.engine_for(by_name(node.op).kind)
    rate = engine.rate_tflops(fmt) or max(engine.rates_tflops.values())
    shapes = cost.node_shapes(graph, node)
    compute_s = (flops(graph, node, shapes) or 0.0) / (rate * _TERA)
    moved = bytes_moved(graph, node, stored, shapes) or 0.0
    if moved == 0.0 and compute_s == 0.0:
        return 0.0  # a view: no kernel at all
    by_matmul = Relayout.MATMUL in cost.target.relayouts
    if is_relayout(node) and emulation.relayout is None and by_matmul:
        moved *= _BYTE_MOVE_TRAFFIC
    memory_s = moved / (cost.target.bandwidth_gb_s * _GIGA)
    return max(compute_s, memory_s) + cost.target.op_overhead_s


def _cast_time_s(
    graph: Graph,
    cost: RooflineCost,
    reads: Mapping[int, Format],
    stored: Mapping[int, Format],
) -> float:
    """Seconds of one cast for each value and each format other than its own that is read."""
    total = 0.0
    for value in graph.values:
        if value.format is not Format.FP32 or value.constant is not None:
            continue
        own = stored.get(value.id, Format.FP32)
        wanted = {
            _read_in(reads.get(n, Format.FP32))
            for n in value.uses
            if any(v.id == value.id for v in graph.following_inputs(graph.nodes[n]))
        }
        total += sum(cost.cast_time_s(value, own, w) for w in wanted if w is not own)
    return total


def _read_in(fmt: Format) -> Format:
    """What an op in ``fmt`` reads values in: as they are, if its constants alone are low."""
    return fmt.storage if fmt.encodes_values else Format.FP32
