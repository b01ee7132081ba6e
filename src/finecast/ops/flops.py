"""Work of a node: floating-point operations and bytes, from shapes alone.

Law: a multiply and an add count as two operations, whatever the format and whatever the
engine fuses; biases and attention masks are left out. If a shape is unknown the result is
None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from finecast.graph import Attribute, Graph, Node, Value
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.numbers.formats import Format
from finecast.ops import FlopRule, by_name

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[int, Shape]

# One element of exp, tanh or erf in a vector library: range reduction and a polynomial of
# degree 5 to 7 in Horner form, 8 fused multiply-adds. A GPU's special function unit gives one
# result where its cores do 16 operations (CUDA C Programming Guide, arithmetic throughput),
# Trainium's scalar engine one per lane where 16 are claimed: the same figure three times.
TRANSCENDENTAL_FLOPS = 16.0
# Maximum, difference, sum, quotient: one each; and one exponential.
SOFTMAX_FLOPS = 4.0 + TRANSCENDENTAL_FLOPS
# Sum; difference, square, sum; scale by the deviation, by the weight, add: per element.
NORM_FLOPS = 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """One node's shapes, by port; None where unknown or absent."""

    inputs: tuple[Shape | None, ...]
    outputs: tuple[Shape | None, ...]
    attributes: Mapping[str, Attribute]

    def given(self, index: int) -> bool:
        """Whether input ``index`` has a shape."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def x(self, index: int, *, rank: int = 0) -> Shape:
        """Input ``index``; raises ``_UnknownShapeError`` if its shape is not known."""
        return _known(self.inputs, index, rank)

    def y(self, index: int = 0, *, rank: int = 0) -> Shape:
        """Output ``index``; raises ``_UnknownShapeError`` if its shape is not known."""
        return _known(self.outputs, index, rank)

    def integer(self, name: str, default: int | None = None) -> int:
        """An attribute; raises ``_UnknownShapeError`` if it is needed and absent."""
        value = self.attributes.get(name, default)
        if not isinstance(value, int):
            raise _UnknownShapeError
        return value


class _UnknownShapeError(Exception):
    """A count needs a shape that is not known."""


def flops(graph: Graph, node: Node, shapes: Shapes | None = None) -> float | None:
    """Operations that ``node`` performs; None if a shape or the op's count is unknown.

    Args:
        graph: The node's graph.
        node: The node.
        shapes: Observed shapes by value id; they take precedence over the graph's.
    """
    rule = by_name(node.op).flops
    if rule is None:
        return None
    sizes = _Sizes(
        inputs=tuple(_shape(graph, i, shapes) for i in node.inputs),
        outputs=tuple(_shape(graph, i, shapes) for i in node.outputs),
        attributes=node.attributes,
    )
    try:
        return float(COUNTS[rule](sizes))
    except _UnknownShapeError:
        return None


def bytes_moved(
    graph: Graph,
    node: Node,
    formats: Mapping[int, Format] | None = None,
    shapes: Shapes | None = None,
) -> float | None:
    """Bytes that ``node`` reads and writes; None if a shape or a type's size is unknown.

    An input used twice is read once. A view moves nothing; an op that selects elements, as
    gather and slice, reads as many bytes as it writes.

    Args:
        graph: The node's graph.
        node: The node.
        formats: Formats by value id, where they differ from the graph's.
        shapes: Observed shapes by value id; they take precedence over the graph's.
    """
    if is_view(node):
        return 0.0
    sizes = {
        i: _value_bytes(graph.values[i], formats or {}, shapes)
        for i in (*node.inputs, *node.outputs)
        if i is not None
    }
    source, result = (ports[0] if ports else None for ports in (node.inputs, node.outputs))
    if node.op in _PICKS and source is not None and result is not None:
        sizes[source] = sizes[result]
    total = 0.0
    for size in sizes.values():
        if size is None:
            return None
        total += size
    return total


def is_view(node: Node) -> bool:
    """Whether the node moves no bytes: it gives its input in another shape, or a shape."""
    return node.op in _VIEWS


def recurrent_flops(steps_times_batch: float, weights: float) -> float:
    """Operations of recurrent layers: each step multiplies every gate's weights by one vector.

    Args:
        steps_times_batch: Vectors that go through the layers.
        weights: Elements of all weight matrices: of all gates, directions and layers.
    """
    return 2.0 * steps_times_batch * weights


def graph_flops(graph: Graph, shapes: Shapes | None = None) -> float:
    """Operations of all nodes whose count is known."""
    return sum(flops(graph, node, shapes) or 0.0 for node in graph.nodes)


def port_formats(graph: Graph, node: Node, fmt: Format) -> dict[int, Format]:
    """Formats, by value id, of the values that follow ``node``'s format if that is ``fmt``.

    A format for operands only leaves results in the op's own type, one for constants only
    leaves values, too.
    """
    reads = graph.following_inputs(node)
    formats_by_value = {
        value.id: fmt.storage if value.constant is None else fmt
        for value in reads
        if fmt.encodes_values or value.constant is not None
    }
    if fmt.encodes_results:
        formats_by_value |= {value.id: fmt.storage for value in graph.following_outputs(node)}
    return formats_by_value


def resolve_shape(value: Value, shapes: Shapes | None = None) -> Shape | None:
    """The shape of ``value``: as observed, else as declared; None if a dim is symbolic."""
    if shapes is not None and value.id in shapes:
        return shapes[value.id]
    sizes = value.fixed_shape
    return None if sizes is None or min(sizes, default=0) < 0 else sizes


def _shape(graph: Graph, index: int | None, shapes: Shapes | None) -> Shape | None:
    return None if index is None else resolve_shape(graph.values[index], shapes)


def _known(shapes: tuple[Shape | None, ...], index: int, rank: int) -> Shape:
    shape = shapes[index] if index < len(shapes) else None
    if shape is None or len(shape) < rank:
        raise _UnknownShapeError
    return shape


def _value_bytes(
    value: Value, formats: Mapping[int, Format], shapes: Shapes | None
) -> float | None:
    fmt = formats.get(value.id, value.format)
    shape = resolve_shape(value, shapes)
    if shape is None:
        return None
    if fmt is not None:
        return float(fmt.bytes_for(math.prod(shape)))
    width = _OTHER_BYTES.get(value.dtype)
    return None if width is None else math.prod(shape) * float(width)


# Bytes per element of types that are no ``Format``, by the graph's names for them.
_OTHER_BYTES: dict[str, float] = {
    "fp64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
    "int32": 4, "uint32": 4, "int16": 2, "uint16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "int4": 0.5, "uint4": 0.5,
}  # fmt: skip
_VIEWS = READS_SHAPE_ONLY | {"identity", "reshape", "flatten", "squeeze", "unsqueeze"}
_PICKS = frozenset({"gather", "gather_nd", "gather_elements", "slice"})


def _pool(s: _Sizes) -> float:
    window = s.attributes.get("kernel_shape")
    if not isinstance(window, tuple):
        raise _UnknownShapeError
    return math.prod(s.y()) * math.prod(int(w) for w in window)


def _matmul(s: _Sizes) -> float:
    a = s.x(0, rank=1)
    depth = a[-1]
    if s.integer("transA", 0) and len(a) > 1:
        # With ORT's transBatchA the summed axis stands in front of the batch axes.
        depth = a[0] if s.integer("transBatchA", 0) else a[-2]
    return 2.0 * math.prod(s.y()) * depth


def _gemm(s: _Sizes) -> float:
    a = s.x(0, rank=2)
    return 2.0 * math.prod(s.y()) * (a[0] if s.integer("transA", 0) else a[1])


def _einsum(s: _Sizes) -> float:
    equation = s.attributes.get("equation")
    if not isinstance(equation, str):
        raise _UnknownShapeError
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for index, term in enumerate(terms):
        shape = s.x(index)
        for label, extent in zip(_axes(term, len(shape)), shape, strict=True):
            sizes[label] = max(sizes.get(label, 1), extent)
    # For each combination of labels n - 1 multiplies of the n operands, and one add.
    return float(len(terms)) * math.prod(sizes.values())


def _axes(term: str, rank: int) -> list[str]:
    """Labels of an einsum term; the ellipsis' axes are numbered from the right."""
    head, dots, tail = term.partition("...")
    free = rank - len(head) - len(tail)
    if free < 0 or (free and not dots):
        raise _UnknownShapeError
    return [*head, *(f"...{i}" for i in range(free, 0, -1)), *tail]


def _conv(s: _Sizes) -> float:
    # An output element sums over W without its output channels. They come first in ONNX and
    # ATen ([out, in / group, kernel...]); else ``output_axes`` has their axes.
    weights, axes = s.x(1, rank=2), s.attributes.get("output_axes", (0,))
    if not isinstance(axes, tuple):
        raise _UnknownShapeError
    return (
        2.0 * math.prod(s.y()) * math.prod(weights) / math.prod(weights[int(a)] for a in axes)
    )


def _recurrent_sequence(s: _Sizes) -> float:
    # The last inputs are W, R and B; x is [batch, steps, size], for a cell [batch, size].
    w, r = len(s.inputs) - 3, len(s.inputs) - 2
    return recurrent_flops(
        math.prod(s.x(0, rank=2)[:-1]), math.prod(s.x(w)) + math.prod(s.x(r))
    )


def _recurrent(s: _Sizes) -> float:
    steps_times_batch = math.prod(s.x(0, rank=3)[:2])
    return recurrent_flops(steps_times_batch, math.prod(s.x(1)) + math.prod(s.x(2)))


def _recurrent_layers(s: _Sizes) -> float:
    # x is [batch, steps, size] or [steps, batch, size], states have three axes, biases one.
    # What is left are the matrices of all gates, directions and layers.
    steps_times_batch = math.prod(s.x(0, rank=3)[:2])
    matrices = (shape for shape in s.inputs[1:] if shape is not None and len(shape) == 2)
    return recurrent_flops(steps_times_batch, sum(map(math.prod, matrices)))


def _contract(*, batch: int, queries: int, keys: int, width: int, v_width: int) -> float:
    """Scores and weighted sums of values; widths are those of all heads together."""
    return 2.0 * batch * queries * keys * (width + v_width)


def _heads(shape: Shape) -> tuple[int, int, int]:
    """(batch, sequence, width over all heads) of [B, L, N*E] or [B, N, L, E]."""
    if len(shape) == 4:
        return shape[0], shape[2], shape[1] * shape[3]
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    raise _UnknownShapeError


def _attention(s: _Sizes) -> float:
    batch, queries, width = _heads(s.x(0))
    keys = _heads(s.x(1))[1]
    if s.given(4) and len(s.x(4)) == 4:  # past keys come before the new ones
        keys += s.x(4)[2]
    v_width = _heads(s.y())[2]
    return _contract(batch=batch, queries=queries, keys=keys, width=width, v_width=v_width)


def _multi_head_attention(s: _Sizes) -> float:
    query = s.x(0, rank=3)
    if len(query) == 5:  # packed: [B, L, heads, 3, head size]
        batch, keys, heads, _, size = query
        width = heads * size
        return _contract(batch=batch, queries=keys, keys=keys, width=width, v_width=width)
    key = s.x(1, rank=3)
    # [B, S, width], [B, N, S, E], or packed with the values: [B, S, N, 2, E].
    keys = key[2] if len(key) == 4 else key[1]
    v_width = s.y(rank=3)[2]
    return _contract(
        batch=query[0], queries=query[1], keys=keys, width=query[2], v_width=v_width
    )


def _fused_attention(s: _Sizes) -> float:
    # The projections to q, k and v are part of the op; W is [hidden, q + k + v].
    batch, tokens, _ = s.x(0, rank=3)
    weights, v_width = s.x(1, rank=2), s.y(rank=3)[2]
    width = (weights[1] - v_width) // 2
    projections = 2.0 * batch * tokens * math.prod(weights)
    return projections + _contract(
        batch=batch, queries=tokens, keys=tokens, width=width, v_width=v_width
    )


def _group_query_attention(s: _Sizes) -> float:
    # The present keys, [B, kv heads, total, E], have the length of the whole sequence.
    batch, queries, width = s.y(rank=3)
    keys = s.y(1, rank=4)[2]
    return _contract(batch=batch, queries=queries, keys=keys, width=width, v_width=width)


COUNTS: Mapping[FlopRule, Callable[[_Sizes], float]] = {
    FlopRule.ZERO: lambda s: 0.0,
    FlopRule.PER_OUTPUT: lambda s: math.prod(s.y()),
    FlopRule.PER_INPUT: lambda s: math.prod(s.x(0)),
    FlopRule.TRANSCENDENTAL: lambda s: TRANSCENDENTAL_FLOPS * math.prod(s.y()),
    FlopRule.SOFTMAX: lambda s: SOFTMAX_FLOPS * math.prod(s.x(0)),
    FlopRule.NORM: lambda s: NORM_FLOPS * math.prod(s.y()),
    FlopRule.POOL: _pool,
    FlopRule.MATMUL: _matmul,
    FlopRule.GEMM: _gemm,
    FlopRule.ADDMM: lambda s: 2.0 * math.prod(s.y()) * s.x(1, rank=1)[-1],
    FlopRule.EINSUM: _einsum,
    FlopRule.CONV: _conv,
    # Each input element is multiplied by W[in], of [in, out / group, kernel...]; with an axis
    # of groups in front W is [groups, out / groups, in / groups, kernel...], and transposed
    # [groups, in / groups, out / groups, kernel...].
    FlopRule.CONV_TRANSPOSE: lambda s: 2.0 * math.prod((*s.x(0), *s.x(1, rank=2)[1:])),
    FlopRule.GROUP_CONV: lambda s: 2.0 * math.prod((*s.y(), *s.x(1, rank=3)[2:])),
    FlopRule.GROUP_CONV_TRANSPOSE: lambda s: 2.0 * math.prod((*s.x(0), *s.x(1, rank=3)[2:])),
    FlopRule.RECURRENT: _recurrent,
    FlopRule.RECURRENT_LAYERS: _recurrent_layers,
    FlopRule.RECURRENT_SEQUENCE: _recurrent_sequence,
    FlopRule.ATTENTION: _attention,
    FlopRule.MULTI_HEAD_ATTENTION: _multi_head_attention,
    FlopRule.FUSED_ATTENTION: _fused_attention,
    FlopRule.GROUP_QUERY_ATTENTION: _group_query_attention,
}
