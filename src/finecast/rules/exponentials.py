"""Exponentials that the model undoes: softplus, logsumexp and softmax written by hand.

``log(1 + exp(x))`` is about x, but ``exp(x)`` leaves fp16 from x = 11.1 on, and the result is
Inf where fp32 has 12. ``exp(x) / (1 + exp(x))`` is Inf / Inf there, which is no number. As
long as no data showed the range, the ops from the exponential to the logarithm or the division
keep fp32 where the format has less range. An Inf in a divisor alone does no harm: ``1 / (1 +
exp(-x))`` is 0 then, as in fp32. Nor does the exponential of what is at most 0: of the
difference from a maximum, and of the negative of a magnitude.
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node, Value
from finecast.ops import by_name
from finecast.rules.base import KEEP, Context, Rule, Ruling

_LOGARITHMS: Final = frozenset({"log", "reduce_log_sum"})
# Ops whose results overflow where an operand does.
_CARRIERS: Final = frozenset({"add", "bias_add", "sub", "mul", "reduce_sum", "reduce_mean"})

# Ops by which an exponential is kept from overflowing.
_BOUNDS: Final = frozenset({"neg", "abs", "reduce_max"})


def _judge(node: Node, context: Context) -> Ruling | None:
    low = context.low
    if not low.has_less_range or low.has_scales:
        return None
    pair = context.graph.once(_undone).get(node.id)
    if pair is None:
        return None
    exponential, end = (context.graph.nodes[number] for number in pair)
    if any(v.id in context.facts for v in context.graph.following_outputs(exponential)):
        return None  # the observed range decides
    return Ruling(
        permits=KEEP,
        text=f"{end.name} undoes {exponential.name}, whose result may leave {low.label}:"
        " no data showed its range",
    )


def _undone(graph: Graph) -> dict[int, tuple[int, int]]:
    """The exponential, and what undoes it, by the ids of all ops from one to the other."""
    spans: dict[int, tuple[int, int]] = {}
    for node in graph.float_nodes:
        if node.op == "exp" and not _at_most_zero(graph, node):
            for end, between in _ends(graph, node):
                for number in (node.id, *between, end.id):
                    spans.setdefault(number, (node.id, end.id))
    return spans


def _ends(graph: Graph, exponential: Node) -> list[tuple[Node, set[int]]]:
    """Logarithms and divisions that undo ``exponential``, and the ops before each of them."""
    carriers: dict[int, Node] = {exponential.id: exponential}
    reached = {v.id for v in graph.following_outputs(exponential)}
    ends: dict[int, Node] = {}
    waiting = list(graph.following_outputs(exponential))
    while waiting:
        for reader in graph.readers(waiting.pop()):
            if reader.op in _LOGARITHMS or reader.op == "div":
                ends[reader.id] = reader
            elif reader.id not in carriers and _carries(reader):
                carriers[reader.id] = reader
                results = list(graph.following_outputs(reader))
                reached.update(v.id for v in results)
                waiting += results
    undoing = (end for end in ends.values() if _undoes(end, reached))
    return [(end, _before(graph, end, carriers)) for end in undoing]


def _carries(node: Node) -> bool:
    return node.op in _CARRIERS or by_name(node.op).exact


def _undoes(end: Node, reached: set[int]) -> bool:
    """Whether ``end`` is a logarithm, or divides one value that was reached by another."""
    return end.op in _LOGARITHMS or all(i in reached for i in (*end.inputs, None)[:2])


def _before(graph: Graph, end: Node, carriers: dict[int, Node]) -> set[int]:
    """Those of ``carriers`` from which a value reaches ``end``."""
    node_ids, waiting = set[int](), [end]
    while waiting:
        makers = map(graph.maker, graph.following_inputs(waiting.pop()))
        new = [
            m for m in makers if m is not None and m.id in carriers and m.id not in node_ids
        ]
        node_ids.update(m.id for m in new)
        waiting += new
    return node_ids


def _at_most_zero(graph: Graph, exponential: Node) -> bool:
    """Whether it is exp(x - max(x)) or exp(-abs(x))."""
    maker = _maker(graph, exponential.inputs[0])
    if maker is None:
        return False
    if maker.op == "neg":
        before = _maker(graph, maker.inputs[0])
        return before is not None and before.op == "abs"
    if maker.op != "sub":
        return False
    before = _maker(graph, maker.inputs[1])
    return before is not None and before.op == "reduce_max"


def _maker(graph: Graph, index: int | None) -> Node | None:
    """The node that computes a value, before what only moves it; None if there is none."""
    maker = None if index is None else graph.maker(graph.values[index])
    while maker is not None and by_name(maker.op).exact and maker.op not in _BOUNDS:
        source: Value | None = next(graph.following_inputs(maker), None)
        maker = None if source is None else graph.maker(source)
    return maker


EXPONENTIALS: Final = Rule(name="exponentials", judge=_judge)
