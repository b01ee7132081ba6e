"""Ops computed from constants alone keep fp32: a standardized weight, a scaled table.

Engines compute them once, when they load the model, so a low format gains no time, while each
op would add a rounding to the resulting weight. An op that only moves a constant may be low,
because that rounds once, unless such an op reads its result.
"""

from __future__ import annotations

import re
from typing import Final

from finecast.graph import Graph, Node, Value
from finecast.graph.worklist import Worklist
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

_INTEGER: Final = re.compile(r"u?int(\d+)")
_MOST_BITS: Final = 8


def _judge(node: Node, context: Context) -> Ruling | None:
    if node.id not in context.graph.once(_folded):
        return None
    return Ruling(
        permits=KEEP, text="it reads constants alone: computed once, when the model is loaded"
    )


def computed_once(graph: Graph) -> frozenset[int]:
    """Ids of the values that are computed from float constants alone."""
    computed = map(graph.nodes.__getitem__, graph.once(computed_from_constants))
    float_ones = (n for n in computed if any(graph.following_inputs(n)))
    return frozenset(i for n in float_ones for i in n.output_ids)


def settled(graph: Graph) -> frozenset[int]:
    """Ids of the values that are the same in every run.

    These are constants, and what engines compute from constants alone when they load the
    model: exporters state a bias as a Reshape of a constant.
    """
    computed = (graph.nodes[n] for n in graph.once(computed_from_constants))
    results = {i for node in computed for i in node.output_ids}
    return frozenset(results | {v.id for v in graph.values if v.constant is not None})


def stored_bits(graph: Graph, value: Value) -> int | None:
    """The bits of the integers that a settled value is decoded from; None if it is not.

    Tools that compress weights store integers of 8 or fewer bits, which a few ops of the model
    scale. Integers of more bits are sizes and positions.
    """
    settled_values, sources, widths = graph.once(settled), Worklist([value.id]), set[int]()
    for source in sources:
        if source not in settled_values:
            continue
        if (width := _INTEGER.fullmatch(graph.values[source].dtype)) is not None:
            widths.add(int(width[1]))
        maker = graph.maker(source)
        sources.add(() if maker is None else maker.inputs)
    return min((bits for bits in widths if bits <= _MOST_BITS), default=None)


def may_be_zeros(graph: Graph, value: Value) -> bool:
    """Whether a settled value may hold zeros alone: a move of a constant has its numbers."""
    sources = Worklist([value.id])
    for source in sources:
        constant, maker = graph.values[source].constant, graph.maker(source)
        if constant is not None and constant.largest > 0:
            return False
        if constant is None and maker is not None and by_name(maker.op).exact:
            sources.add(v.id for v in graph.following_inputs(maker))
    return True


def _folded(graph: Graph) -> frozenset[int]:
    """Ids of the nodes that compute from float constants, or move what those read."""
    computed = [n for n in graph.nodes if n.id in graph.once(computed_from_constants)]
    node_ids: set[int] = set()
    for node in reversed(computed):
        readers = {n for v in graph.following_outputs(node) for n in v.uses}
        if not by_name(node.op).exact or readers & node_ids:
            node_ids.add(node.id)
    return frozenset(node_ids)


def computed_from_constants(graph: Graph) -> frozenset[int]:
    """Ids of the nodes that compute floats from constants alone.

    A node with a format has to read a float. Nodes without a format are included: frontends
    state with them that weights are widened.
    """
    fixed = {v.id for v in graph.values if v.constant is not None}
    node_ids: set[int] = set()
    for node in graph.nodes:
        reads = node.input_ids
        floats = node.format is None or any(graph.following_inputs(node))
        if reads and floats and all(i in fixed for i in reads):
            node_ids.add(node.id)
            fixed.update(node.output_ids)
    return frozenset(node_ids)


FOLDED = Rule(name="folded", judge=_judge)
