"""Ops whose results are the model's fp32 outputs compute in fp32.

In a low format such a result would be rounded and then cast back at once: digits are lost,
probabilities become equal, and hardly a byte is saved. The rule does not judge products, which
gain by low operands, nor ops that run in a product's kernel, unless they are sensitive.

The rule is what the scope ``like-grappler`` means beside ``all``: Grappler, TensorFlow's own
mixed precision, keeps such ops in fp32, so that no plan of that scope is less accurate.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import POINTWISE, Tier, by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.policy import Policy, Scope

_MOST_FUSED: Final = 3
"""Ops that TensorFlow runs in a product's kernel: a bias, another sum, an activation."""


def _judge(node: Node, context: Context) -> Ruling | None:
    policy, graph = context.policy, context.graph
    if policy.scope is not Scope.LIKE_GRAPPLER or not context.low.encodes_results:
        return None
    if context.measured:
        return None  # the measured error decides
    ends = graph.once(_ends, _low_outputs(graph, policy))
    results = list(graph.following_outputs(node))
    computed = any(v.producer is not None for v in graph.following_inputs(node))
    if not (computed and results and ends.issuperset(v.id for v in results)):
        return None
    if by_name(node.op).tier is not Tier.SENSITIVE and _in_a_product(graph, node):
        return None
    return Ruling(
        permits=KEEP,
        text=f"{results[0].name} is given out in fp32: {context.low.label} would round it,"
        " and be cast back at once",
    )


def _low_outputs(graph: Graph, policy: Policy) -> frozenset[int]:
    """Outputs of the model that are declared in a low format."""
    declared = ((v, policy.io.get(v.name, Format.FP32)) for v in graph.outputs)
    return frozenset(v.id for v, f in declared if policy.io_low or f is not Format.FP32)


def _ends(graph: Graph, low: frozenset[int]) -> frozenset[int]:
    """Values that are fp32 outputs, or are only moved to such; others do not read them."""
    end_ids: set[int] = set()

    def ends(value: Value) -> bool:
        if value.id in low or not (value.is_output or value.uses):
            return False
        readers = [graph.nodes[number] for number in value.uses]
        moved = (v.id for reader in readers for v in graph.following_outputs(reader))
        return all(by_name(r.op).places for r in readers) and end_ids.issuperset(moved)

    for node in reversed(graph.nodes):
        end_ids.update(v.id for v in graph.following_outputs(node) if ends(v))
    return frozenset(end_ids)


def _in_a_product(graph: Graph, node: Node, steps: int = _MOST_FUSED) -> bool:
    """Whether the node is a product, or is fused into the kernel of one in front of it."""
    info = by_name(node.op)
    if info.matmul_engine:
        return True
    if not steps or info.kind not in POINTWISE:
        return False
    before = (v.producer for v in graph.following_inputs(node) if v.uses == (node.id,))
    return any(
        _in_a_product(graph, graph.nodes[i], steps - 1) for i in before if i is not None
    )


ENDS: Final = Rule(name="ends", judge=_judge)
