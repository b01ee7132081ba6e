"""The plan that ``torch.autocast`` follows, with which finecast's own plans are compared.

Autocast is what users have without finecast. A plan that rounds more than it does would lose
accuracy that nobody asked to give up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from finecast.graph import Graph, Node
from finecast.graph.backward import backward_ops
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.planner import lowest, pick
from finecast.planning.points import moves
from finecast.rules import Permission


def autocast_formats(
    graph: Graph, permissions: Mapping[int, Permission], formats: Sequence[Format]
) -> dict[int, Format]:
    """The plan that ``torch.autocast`` follows, as far as the rules permit.

    Products are low. Other ops are low if all that they read is low, and fp32 if anything is
    fp32, such as a residual or a parameter. An op that only moves numbers is low if all its
    readers are, for that rounds the same numbers. Gradients of an fp32 value are added up in
    fp32: each of its low readers has a cast of its own, whose gradient is fp32. The gradient
    of a product's bias is a sum of what the products of the backward pass read low, and low.
    """
    asked = lowest(graph, permissions, *formats)
    stored: dict[int, Format] = {}
    found: dict[int, Format] = {}
    for node in graph.float_nodes:
        read = {stored.get(v.id, v.format) for v in graph.following_inputs(node)}
        follows = by_name(node.op).matmul_engine or read == {asked[node.id]}
        wanted = asked[node.id] if follows else Format.FP32
        found[node.id] = pick(permissions[node.id], wanted)
        stored |= {v.id: found[node.id] for v in graph.following_outputs(node)}
    for node in _gradients_of_biases(graph, found):
        found[node.id] = pick(permissions[node.id], asked[node.id])
    for node in reversed(graph.float_nodes):
        readers = {found.get(n) for v in graph.following_outputs(node) for n in v.uses}
        shown = any(v.is_output for v in graph.following_outputs(node))
        if moves(node) and readers == {asked[node.id]} and not shown:
            found[node.id] = asked[node.id]
    return found | dict.fromkeys(_sums_of_gradients(graph, found), Format.FP32)


def _gradients_of_biases(graph: Graph, formats: Mapping[int, Format]) -> Iterator[Node]:
    """The sums that give the gradient of a bias which a low product adds itself.

    Such a sum reads the gradient of the product's result. So does a product of the backward
    pass, with an operand of the first. (A bias that is added in fp32 behind a product has an
    fp32 gradient: of that product none has an operand beside a bias.)
    """
    backward = backward_ops(graph)
    products = [n for n in graph.float_nodes if by_name(n.op).matmul_engine]
    operands = {
        source
        for node in products
        if node.op == "addmm" and node.id not in backward
        for source in _sources(graph, node)[1:]
    }
    gradients: set[int] = set()
    for node in products:
        sources = set(_sources(graph, node))
        if node.id in backward and formats[node.id] is not Format.FP32 and sources & operands:
            gradients |= sources - operands
    for node in graph.float_nodes:
        if node.op == "reduce_sum" and gradients.issuperset(_sources(graph, node)):
            yield node


def _sources(graph: Graph, node: Node) -> list[int]:
    """The values that ``node`` reads in its own format, before they were moved."""
    found: list[int] = []
    for value in graph.following_inputs(node):
        source = value
        while source.producer is not None and moves(graph.nodes[source.producer]):
            (source,) = graph.following_inputs(graph.nodes[source.producer])
        found.append(source.id)
    return found


def _sums_of_gradients(graph: Graph, formats: Mapping[int, Format]) -> set[int]:
    """Additions in the backward pass whose results, moved or not, only fp32 ops read."""
    backward = backward_ops(graph)
    sums = set[int]()
    read_as: dict[int, set[Format]] = {}
    for node in reversed(graph.float_nodes):
        outputs = list(graph.following_outputs(node))
        read_as[node.id] = {Format.FP32} if any(v.is_output for v in outputs) else set()
        for reader in (graph.nodes[n] for v in outputs for n in v.uses if n in formats):
            passes_on = moves(reader) or reader.id in sums
            found = read_as[reader.id] if passes_on else {formats[reader.id]}
            read_as[node.id] |= found
        if node.op == "add" and node.id in backward and read_as[node.id] == {Format.FP32}:
            sums.add(node.id)
    return sums


def saved_ops(graph: Graph) -> set[int]:
    """Ops of the forward pass whose results the backward pass reads."""
    backward = backward_ops(graph)
    return {
        node.id
        for node in graph.float_nodes
        if node.id not in backward
        and any(n in backward for v in graph.following_outputs(node) for n in v.uses)
    }
