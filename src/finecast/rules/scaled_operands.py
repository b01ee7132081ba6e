"""Which operands of an op are encoded in a format with parameters, and along which axes.

Engines run on integers: products with constant weights, which have a scale for each output
channel (a stack of matrices has one scale: OpenVINO reads past those of channels there, and
ONNX Runtime has no kernel), matrix products of two values, and the addition of another value
to a convolution's result in the convolution's kernel. They compute in floats from weights
stored as codes: products, and lookups of rows in a table, which has a scale for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from finecast.graph import ROUNDS, Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name
from finecast.rules.constants import scalars
from finecast.rules.folded import settled, stored_bits

# By index of an operand: the axes of its channels, each of which has a scale; empty if the
# operand has a single scale.
Axes = Mapping[int, tuple[int, ...]]

ONE_SCALE: Final = (
    "quantize these weights with one scale, or take them to fp32 by --from-type int8"
)
"""What to do about a stack of matrices with a scale for each channel, in any engine."""

_PLACES: Final = frozenset({OpKind.RELAYOUT, OpKind.MOVEMENT, OpKind.POOL})
_PRODUCTS: Final = frozenset({"linear", "matmul", "gemm"})
_MATRIX: Final = 2  # dimensions
_CONVOLUTIONS: Final = frozenset({"conv", "group_conv"})
BIASES_AND_SCALES: Final = frozenset({"add", "sub", "mul", "batch_norm"})


def scaled_operands(graph: Graph, node: Node, fmt: Format) -> Axes:
    """The operands of ``node`` that are encoded in ``fmt``; all others stay as they are.

    Empty if the format is for constants only and the constants are stored as codes already.

    Raises:
        ValueError: If no engine runs the op on such operands; says why.
    """
    if fmt.runs_on_codes:
        find = _OPERANDS.get(node.op)
        if find is None:
            raise ValueError(f"no engine here runs {node.op} on integers")
        _check_sizes(graph, node, fmt)
        axes = find(graph, node)
        return dict.fromkeys(axes, ()) if fmt.has_float_codes else axes
    find = _WEIGHTS.get(node.op)
    if find is None:
        raise ValueError(f"no engine here computes {node.op} from weights in {fmt.label}")
    return {i: a for i, a in find(graph, node).items() if _is_constant(graph, node, i)}


def rounded_operands(graph: Graph, node: Node, fmt: Format) -> tuple[int, ...]:
    """The operands that a kernel in ``fmt`` itself rounds as it reads them; mostly none.

    Raises:
        ValueError: If no engine rounds values for the op; says why.
    """
    group = fmt.dynamic_group
    if group is None:
        return ()
    if node.op not in _PRODUCTS or node.attributes.get("transA"):
        raise ValueError(f"no engine here rounds values for {node.op} as it runs")
    count = summed(graph, node)
    if count is None or (group and count % group):
        raise ValueError(f"its sums of {count} numbers are not whole groups of {group}")
    _check_sizes(graph, node, fmt)
    return (0,)


def _check_sizes(graph: Graph, node: Node, fmt: Format) -> None:
    """Raise ValueError for a matrix of weights that kernels in ``fmt`` do not take."""
    if fmt.size_multiple == 1:
        return
    weights = _operand(graph, node, 1)
    shape = () if weights is None else weights.shape or ()
    if any(not isinstance(d, int) or d % fmt.size_multiple for d in shape):
        sizes = " x ".join(map(str, shape))
        raise ValueError(
            f"its weights are {sizes}, and {fmt.label} takes multiples of {fmt.size_multiple}"
        )


def summed(graph: Graph, node: Node) -> int | None:
    """How many numbers a product by a matrix sums; None if that is unknown, or another op."""
    weights = _operand(graph, node, 1)
    shape = () if weights is None else weights.shape or ()
    by_row = node.op == "linear" or node.attributes.get("transB")
    if node.op not in _PRODUCTS or len(shape) != _MATRIX:
        return None
    count = shape[-1 if by_row else -2]
    return count if isinstance(count, int) else None


def coded_result(graph: Graph, node: Node) -> Value | None:
    """The result that has to be stored as codes for ``node`` to run on integers.

    Engines with this demand (ONNX Runtime) fuse the rounding into the kernel, after the bias
    and a Relu or Clip. None for products without a bias, which may give floats.

    Raises:
        ValueError: If the result is an output of the model, which is never encoded.
    """
    if node.id in graph.once(products_of_values):
        return None  # what is added to it, as a mask, is no bias
    (value,) = graph.following_outputs(node)
    biased = node.op != "gemm" or (len(node.inputs) > 2 and node.inputs[2] is not None)
    if node.op in ("matmul", "linear"):
        added = _only_reader(graph, value, "add")
        constants = () if added is None else graph.following_inputs(added)
        biased = any(v.id in graph.once(settled) for v in constants)
        if added is not None and biased:
            (value,) = graph.following_outputs(added)
    if not biased:
        return None
    cut = _only_reader(graph, value, "relu") or _only_reader(graph, value, "clip")
    if cut is not None:
        (value,) = graph.following_outputs(cut)
    if value.is_output:
        raise ValueError("its result is an output of the model, which is not quantized")
    return value


def reading(graph: Graph, value: Value) -> list[tuple[int, int]]:
    """The (node, index) of inputs that read the value in their node's own format.

    Nodes by which an earlier conversion rounds the value are left out.
    """
    return [
        (node.id, index)
        for node in graph.readers(value)
        for index, source in enumerate(node.inputs)
        if source == value.id and node.follows_in[index] and ROUNDS not in node.attributes
    ]


def _only_reader(graph: Graph, value: Value, op: str) -> Node | None:
    """The value's only reader, if it is an ``op``."""
    if len(value.uses) != 1 or value.is_output:
        return None
    reader = graph.nodes[value.uses[0]]
    return reader if reader.op == op else None


def products_of_values(graph: Graph) -> frozenset[int]:
    """Ids of the matrix products of two values that are computed in every run."""
    known = graph.once(settled)
    product_ids: set[int] = set()
    for node in (n for n in graph.nodes if n.op == "matmul"):
        operands = [_operand(graph, node, index) for index in (0, 1)]
        if all(v is not None and v.id not in known for v in operands):
            product_ids.add(node.id)
    return frozenset(product_ids)


def factors(graph: Graph, index: int) -> frozenset[int]:
    """Ids of the values whose numbers products of two values read at input ``index``.

    Each is the ``origin`` of what the product reads. Left out are values that convolutions or
    other products read, too, as these take unsigned codes.
    """

    def read(nodes: Iterable[int], index: int) -> set[int]:
        operands = (graph.read(graph.nodes[n], index) for n in nodes)
        return {origin(graph, v).id for v in operands if v is not None}

    products, kinds = graph.once(products_of_values), _PRODUCTS | _CONVOLUTIONS
    others = [n.id for n in graph.nodes if n.op in kinds and n.id not in products]
    return frozenset(read(products, index) - read(others, 0))


def origin(graph: Graph, value: Value) -> Value:
    """The value that ``value`` is only moved from; itself if it is computed.

    The ops in between place numbers and zeros only, so one encoding serves all of them.
    """
    while (maker := graph.maker(value)) is not None:
        before = moved_by(graph, maker)
        if before is None:
            break
        value = before
    return value


def moved_by(graph: Graph, node: Node) -> Value | None:
    """The value whose numbers ``node`` places, with zeros at most beside; None if none."""
    info = by_name(node.op)
    rounds = ROUNDS in node.attributes  # the last step of constants decoded by groups
    if rounds or not info.exact or info.kind not in _PLACES or any(scalars(node)):
        return None
    reads = [*graph.following_inputs(node)]
    moved = [v for v in reads if v.constant is None]
    zeros = all(v.constant.largest == 0 for v in reads if v.constant is not None)
    return moved[0] if len(moved) == 1 and zeros else None


def _weighted(*channels: int) -> Callable[[Graph, Node], Axes]:
    return lambda graph, node: _product(graph, node, channels)


def _product(graph: Graph, node: Node, channels: tuple[int, ...]) -> Axes:
    value, weights = (_operand(graph, node, index) for index in (0, 1))
    if value is None or value.id in graph.once(settled):
        raise ValueError("its first operand is a constant or is missing")
    if weights is not None and _is_stored(graph, weights):
        return {0: ()}
    maker = None if weights is None else graph.maker(weights)
    if weights is not None and maker is not None and weights.id in graph.once(settled):
        if (bits := stored_bits(graph, weights)) is not None:
            raise ValueError(
                f"its weights came quantized in {bits} bits, and stay as they are: give the"
                " model that they were made from"
            )
        raise ValueError(
            f"its weights are computed from constants, by {maker.name}: store the result in"
            " the model, as onnxslim does in an ONNX file"
        )
    if weights is None or weights.constant is None:
        raise ValueError("its weights are not constant")
    rank = len(weights.shape or ())
    return {0: (), 1: tuple(axis % rank for axis in channels) if rank > 1 else ()}


def _is_stored(graph: Graph, value: Value) -> bool:
    """Whether the value is a constant that an earlier conversion stored as codes."""
    maker = graph.maker(value)
    return maker is not None and ROUNDS in maker.attributes


def _any_product(graph: Graph, node: Node) -> Axes:
    """A product by a matrix; values and stacks of matrices have one scale each."""
    if node.id in graph.once(products_of_values):
        return {0: (), 1: ()}
    axes, weights = _matrix_product(graph, node), _operand(graph, node, 1)
    stacked = weights is not None and len(weights.shape or ()) > _MATRIX
    return dict.fromkeys(axes, ()) if stacked else axes


def _matrix_product(graph: Graph, node: Node) -> Axes:
    return _product(graph, node, (-2 if node.attributes.get("transB") else -1,))


def _lookup(graph: Graph, node: Node) -> Axes:
    """A lookup of rows in a table: each row has a scale, and is decoded where it is read."""
    table = _operand(graph, node, 0)
    if table is not None and _is_stored(graph, table):
        return {}
    if table is None or table.constant is None:
        raise ValueError("the table is no constant")
    if len(table.shape or ()) < 2 or node.attributes.get("axis", 0) != 0:
        raise ValueError("it does not look up rows")
    return {0: (0,)}


def _is_constant(graph: Graph, node: Node, index: int) -> bool:
    value = _operand(graph, node, index)
    return value is not None and value.constant is not None


def _addition(graph: Graph, node: Node) -> Axes:
    values = [_operand(graph, node, index) for index in (0, 1)]
    if any(v is None or v.id in graph.once(settled) for v in values):
        raise ValueError("it adds a constant, which runs in the kernel of the op in front")
    if not any(v is not None and _joins(graph, v) for v in values):
        raise ValueError("it does not run in the kernel of a convolution")
    return {0: (), 1: ()}


def _joins(graph: Graph, value: Value) -> bool:
    """Whether the value is the result of a convolution, with no other reader.

    A bias or scale, stated as an op with a constant, and roundings by an earlier conversion
    may stand between.
    """
    maker = graph.maker(value)
    if maker is None or len(value.uses) != 1 or value.is_output:
        return False
    sources = [graph.values[i] for i in maker.input_ids]
    computed_values = [v for v in sources if v.id not in graph.once(settled)]
    if ROUNDS in maker.attributes and sources:
        return _joins(graph, sources[0])
    if maker.op in BIASES_AND_SCALES and len(computed_values) == 1:
        return _joins(graph, computed_values[0])
    return maker.op in _CONVOLUTIONS


def _operand(graph: Graph, node: Node, index: int) -> Value | None:
    """The value at an input that has the op's own format."""
    operand = graph.read(node, index)
    return operand if operand is not None and node.follows_in[index] else None


_OPERANDS: Final[Mapping[str, Callable[[Graph, Node], Axes]]] = {
    "conv": _weighted(0),
    "group_conv": _weighted(0, 1),
    "linear": _weighted(0),
    "matmul": _any_product,
    "gemm": _matrix_product,
    "add": _addition,
}
_WEIGHTS: Final[Mapping[str, Callable[[Graph, Node], Axes]]] = {
    "linear": _weighted(0),
    "matmul": _matrix_product,
    "gemm": _matrix_product,
    "gather": _lookup,
}
