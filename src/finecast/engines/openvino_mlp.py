"""What OpenVINO does wrongly with two small products, one behind the other.

It compiles a chain of small products into one kernel (a *block*), together with as many of
the ops after it as its registers allow. Which numbers of rows it does so for depends on the
number of threads: with one thread up to 8 rows, with two threads 4 and 8.

It crashes while it compiles where an op reads both a block and a kernel of the second kind,
which chains of elementwise ops and casts become, op by op: it follows a null pointer (in
``tokenize_node`` of its snippets: finished kernels are not among the clones that it joins).
Models with such ops of their own crash in fp32, too; the fault here keeps finecast's casts
from being the second kernel.

A block of two products in int8 gives errors of 1e9 times the result where nothing between the
products needs floats: the block then quantizes the first product's sums, which are 32-bit
integers, as if their bits were those of floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name

# Sizes of the largest products that OpenVINO compiles so.
_ROWS = 8
_COLUMNS = 256
_PRODUCTS = frozenset({"matmul", "gemm"})
_JOINS = frozenset(
    {OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL, OpKind.SOFTMAX, OpKind.CAST, OpKind.COMPARISON}
)
_MOVES = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT, OpKind.CAST})
_CODES = frozenset({OpKind.QUANTIZE})
# With one constant these change the scale and the zero point of codes, and need no floats. The
# addition of a vector becomes the bias of the product, which makes floats of its sums.
_SCALES = frozenset({"mul", "div"})
_SHIFTS = frozenset({"add", "sub"})


def sums_behind_products(graph: Graph, low: Format) -> Mapping[int, str]:
    """Ops that read a block and another value, and the ops that compute that other value.

    If all of them have one format, fp32 as that of the graph's inputs, no cast is in between.
    OpenVINO multiplies a value that is subtracted by -1 first, which is such a kernel in any
    format; there the ops of the block stay in fp32 as well, as they are in the original model.
    """
    found: dict[int, str] = {}
    for product in graph.nodes:
        if not _is_small(graph, product) or not _behind_another(graph, product):
            continue
        for before, node in _readers(graph, product):
            others = [v for v in _inputs(graph, node) if v.producer != before.id]
            if not others:
                continue
            kept = {n for v in others for n in _computing(graph, v)}
            if node.op == "sub" and node.inputs[1] in {v.id for v in others}:
                kept |= {n for v in _inputs(graph, node) for n in _computing(graph, v, True)}
            text = f"openvino crashes at {node.name} if it reads a cast to {low.label}"
            found |= dict.fromkeys((*kept, node.id), text)
    return found


def sums_of_codes(graph: Graph, low: Format) -> Mapping[int, str]:
    """Small products of which the one before, in ``low``, would give sums of codes.

    A product is not named if the one before is: that one then computes in floats.
    """
    found: dict[int, str] = {}
    for product in graph.nodes:
        if _is_small(graph, product):
            before = _giving_codes(graph, product)
            if before is not None and before.id not in found:
                found[product.id] = (
                    f"openvino takes the sums of {before.name} in {low.label}, which are"
                    " integers, for floats"
                )
    return found


def _giving_codes(graph: Graph, product: Node) -> Node | None:
    """The small product before, if no op between the two needs its result in floats."""
    index = product.inputs[0]
    while index is not None:
        producer = graph.values[index].producer
        if producer is None:
            return None
        node = graph.nodes[producer]
        if _is_small(graph, node):
            has_bias = (
                node.op == "gemm" and len(node.inputs) > 2 and node.inputs[2] is not None
            )
            return None if has_bias else node
        read = [v.id for v in _inputs(graph, node)]
        if len(read) != 1 or not _keeps_codes(graph, node):
            return None
        (index,) = read
    return None


def _keeps_codes(graph: Graph, node: Node) -> bool:
    """Whether ``node``, which reads one value, can compute on codes of it."""
    if node.op in _SHIFTS:
        return all(constant.size == 1 for constant in graph.constants(node))
    return node.op == "relu" or node.op in _SCALES or by_name(node.op).kind in _MOVES | _CODES


def _is_small(graph: Graph, node: Node) -> bool:
    """Whether ``node`` is a product that OpenVINO may compile into a block."""
    if node.op not in _PRODUCTS or len(node.inputs) < 2:
        return False
    left, right = (graph.values[i] if i is not None else None for i in node.inputs[:2])
    if left is None or right is None or right.constant is None:
        return False
    rows, columns = left.shape or (), right.shape or ()
    if len(rows) != 2 or len(columns) != 2:
        return False
    limits = zip((*rows, *columns), (_ROWS, *[_COLUMNS] * 3), strict=True)
    return all(isinstance(size, int) and size <= most for size, most in limits)


def _behind_another(graph: Graph, product: Node) -> bool:
    """Whether only elementwise ops are between another small product and this one."""
    source = product.inputs[0]
    behind = _computing(graph, graph.values[source]) if source is not None else ()
    return any(_is_small(graph, graph.nodes[i]) for i in behind)


def _readers(graph: Graph, product: Node) -> Iterator[tuple[Node, Node]]:
    """Elementwise ops that may read the block of ``product``, each after the node it reads."""
    node: Node | None = product
    while node is not None:
        users = [graph.nodes[i] for i in _users(graph, node)]
        joined = [u for u in users if by_name(u.op).kind in _JOINS]
        yield from ((node, user) for user in joined)
        node = joined[0] if len(users) == len(joined) == 1 else None


def _users(graph: Graph, node: Node) -> list[int]:
    return sorted({u for i in node.outputs if i is not None for u in graph.values[i].uses})


def _inputs(graph: Graph, node: Node) -> list[Value]:
    values = (graph.values[i] for i in node.inputs if i is not None)
    return [v for v in values if v.constant is None]


def _computing(graph: Graph, value: Value, whole_block: bool = False) -> set[int]:
    """The elementwise ops and moves that compute ``value``, back to the first other ops.

    Those other ops are included. With ``whole_block`` the search goes on past small products.
    """
    found, waiting = set[int](), [value]
    while waiting:
        producer = waiting.pop().producer
        if producer is None or producer in found:
            continue
        found.add(producer)
        node = graph.nodes[producer]
        passed = by_name(node.op).kind in _JOINS | _MOVES
        if passed or (whole_block and _is_small(graph, node)):
            waiting.extend(_inputs(graph, node))
    return found
