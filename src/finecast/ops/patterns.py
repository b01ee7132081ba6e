"""Sets of nodes that a device computes in one kernel, found by patterns in the graph.

A bias is added in fp32, as the sum leaves the matmul engine; norms and activations that are
written out in several nodes run as one kernel. Between the nodes of a kernel nothing is
rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from finecast.graph import Graph, Node, Value
from finecast.ops import OpKind, by_name

_NORM_TAIL = (("pow", "mul"), ("reduce_mean",), ("add",), ("sqrt",), ("div", "reciprocal"))
_GELU_TAIL = (("add",), ("mul",), ("mul",))
_SCALES = ("mul", "div")
_RESHAPES = ("reshape", "squeeze", "unsqueeze")


def bias_kernels(graph: Graph) -> list[frozenset[int]]:
    """Products with the constant that is added to their result."""
    kernels: list[frozenset[int]] = []
    for node in graph.float_nodes:
        if by_name(node.op).matmul_engine:
            after = _only_reader(graph, node)
            if after is not None and after.op == "add" and _has_constant(graph, after):
                kernels.append(frozenset({node.id, after.id}))
    return kernels


def adds_bias(graph: Graph, node: Node) -> bool:
    """Whether ``node`` adds a vector along the channels of what a product gives.

    The vector is a constant or an input of the graph, as parameters are in training. A
    residual is no bias: it is computed, or has the shape of the product's result.
    """
    if node.op == "bias_add":
        return True
    if node.op != "add" or len(node.inputs) != 2:
        return False
    a, b = node.inputs
    return _is_bias_of(graph, a, b) or _is_bias_of(graph, b, a)


def norm_kernels(graph: Graph) -> list[frozenset[int]]:
    """Layer norms written out, from the mean to the scale and shift."""
    return [k for node in graph.float_nodes if (k := _norm(graph, node))]


def activation_kernels(graph: Graph) -> list[frozenset[int]]:
    """GELU written out with erf."""
    return [k for node in graph.float_nodes if node.op == "erf" and (k := _gelu(graph, node))]


def affine_kernels(graph: Graph) -> list[frozenset[int]]:
    """The scale and shift after a norm: one multiply-add."""
    kernels: list[frozenset[int]] = []
    for node in graph.float_nodes:
        source = graph.maker(node.inputs[0]) if node.op == "mul" else None
        after = _only_reader(graph, node)
        if source is None or by_name(source.op).kind is not OpKind.NORM or after is None:
            continue
        if after.op == "add" and _has_constant(graph, node) and _has_constant(graph, after):
            kernels.append(frozenset({node.id, after.id}))
    return kernels


def merged(kernels: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """``kernels``, where those that share a node are one."""
    result: list[frozenset[int]] = []
    for kernel in kernels:
        apart = [k for k in result if not k & kernel]
        joined = frozenset().union(kernel, *(k for k in result if k & kernel))
        result = [*apart, joined]
    return result


def stays_inside(value: Value, kernels: Mapping[int, int]) -> bool:
    """Whether ``value`` never leaves one kernel; ``kernels`` has their numbers by node id."""
    if value.producer is None or value.is_output or not value.uses:
        return False
    kernel = kernels.get(value.producer)
    return kernel is not None and all(kernels.get(n) == kernel for n in value.uses)


def _is_bias_of(graph: Graph, vector: int | None, result: int | None) -> bool:
    """Whether ``vector`` is a bias, and ``result`` what a product gives."""
    if vector is None or result is None:
        return False
    source, product_result = _unshaped(graph, vector), _unshaped(graph, result)
    product = graph.maker(product_result)
    kind = None if product is None else by_name(product.op).kind
    if product is None or kind not in (OpKind.MATMUL, OpKind.CONV):
        return False
    shape, sizes = graph.values[vector].shape or (), graph.values[result].shape or ()
    if product_result.id != result and (
        kind is OpKind.CONV or (product_result.shape or ())[-1:] != sizes[-1:]
    ):
        return False  # the channels are no longer where the product gave them
    layout = str(product.attributes.get("data_format", ""))  # TensorFlow's; others have none
    axis = -1 if kind is OpKind.MATMUL or layout.endswith("C") else 1 - len(sizes)
    held = source.constant is not None or (source.is_input and len(source.shape or ()) == 1)
    if not held or not -len(shape) <= axis < 0:
        return False
    channels = sizes[axis] if sizes else None
    fits = shape[axis] == channels or not isinstance(channels, int)
    others = (size for at, size in enumerate(shape, -len(shape)) if at != axis)
    return fits and all(size == 1 for size in others)


def _unshaped(graph: Graph, value: int) -> Value:
    """What ``value`` is a reshaped view of: most values are their own."""
    node = graph.maker(value)
    while node is not None and node.op in _RESHAPES and node.inputs[0] is not None:
        value = node.inputs[0]
        node = graph.maker(value)
    return graph.values[value]


def _norm(graph: Graph, mean: Node) -> frozenset[int] | None:
    if mean.op != "reduce_mean":
        return None
    centred = next((n for n in _readers(graph, mean) if n.op == "sub"), None)
    if centred is None or mean.inputs[0] not in centred.inputs:
        return None
    members = {mean.id, centred.id}
    at = centred
    for names in _NORM_TAIL:
        following = next((n for n in _readers(graph, at) if n.op in names), None)
        if following is None:
            return None
        members.add(following.id)
        at = following
    if at.op == "reciprocal":
        product = next((n for n in _readers(graph, at) if n.op == "mul"), None)
        if product is None:
            return None
        members.add(product.id)
        at = product
    if not set(centred.outputs) & set(at.inputs):
        return None
    for name in ("mul", "add"):
        following = _only_reader(graph, at)
        if following is None or following.op != name or not _has_constant(graph, following):
            break
        members.add(following.id)
        at = following
    return frozenset(members)


def _gelu(graph: Graph, erf: Node) -> frozenset[int] | None:
    scale = graph.maker(erf.inputs[0])
    if scale is None or scale.op not in _SCALES or not _has_constant(graph, scale):
        return None
    members = {scale.id, erf.id}
    at = erf
    for names in _GELU_TAIL:
        following = _only_reader(graph, at)
        if following is None or following.op not in names:
            return None
        members.add(following.id)
        at = following
    # The product may be (x * 0.5) * (1 + erf): then the halving of x belongs to it, too.
    read = {i for n in members for i in graph.nodes[n].inputs}
    for value in graph.following_inputs(scale):
        for node in graph.readers(value):
            halves = node.op in _SCALES and _has_constant(graph, node)
            if halves and not read.isdisjoint(node.outputs):
                members.add(node.id)
    return frozenset(members)


def _readers(graph: Graph, node: Node) -> Iterator[Node]:
    for value in graph.following_outputs(node):
        yield from graph.readers(value)


def _only_reader(graph: Graph, node: Node) -> Node | None:
    outputs = list(graph.following_outputs(node))
    if len(outputs) != 1 or outputs[0].is_output or len(outputs[0].uses) != 1:
        return None
    return graph.nodes[outputs[0].uses[0]]


def _has_constant(graph: Graph, node: Node) -> bool:
    return any(v.constant is not None for v in graph.following_inputs(node))
