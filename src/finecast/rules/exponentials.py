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
from finecast.graph.worklist import Worklist
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
    carriers, ends = {exponential.id}, dict[int, Node]()
    reached = Worklist(v.id for v in graph.following_outputs(exponential))
    for value in reached:
        for reader in graph.readers(graph.values[value]):
            if reader.op in _LOGARITHMS or reader.op == "div":
                ends[reader.id] = reader
            elif reader.op in _CARRIERS or by_name(reader.op).exact:
                carriers.add(reader.id)
                reached.add(v.id for v in graph.following_outputs(reader))
    # A division undoes it where both operands were reached.
    undoing = (
        end
        for end in ends.values()
        if end.op in _LOGARITHMS or reached.seen.issuperset((*end.inputs, None)[:2])
    )
    return [(end, _before(graph, end, carriers)) for end in undoing]


def _before(graph: Graph, end: Node, carriers: set[int]) -> set[int]:
    """Those of ``carriers`` from which a value reaches ``end``."""
    nodes = Worklist([end.id])
    for number in nodes:
        makers = {v.producer for v in graph.following_inputs(graph.nodes[number])}
        nodes.add(makers & carriers)
    return nodes.seen & carriers


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
