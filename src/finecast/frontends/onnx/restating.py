"""Rewrites low ops as equivalent ops that their definition or an engine asks for.

ONNX's Einsum has no bf16, its MatMul has. Engines fuse patterns of ops: a Swish after a
convolution, a norm written out in steps. Some of their matchers recognise a pattern with fp32
constants only, or are stopped by a cast that the definition of an op implies. Here the nodes
of such a pattern become other ops that compute the same, each in the place and with the name
of the one it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.errors import ModelError
from finecast.frontends.onnx.coded_products import is_coded, write_product
from finecast.frontends.onnx.constants import (
    DATA_TYPES,
    ConvertedTensor,
    constant_reader,
    constant_tensor,
    unrounded,
)
from finecast.frontends.onnx.editor import Editor, drop_unread, is_read, turn_into
from finecast.frontends.onnx.opset import opset_of, raise_opset, trains
from finecast.frontends.onnx.types import infer
from finecast.frontends.replaying import Restated
from finecast.numbers.formats import Format
from finecast.ops.einsum import Move, Moves, Product, as_product

# --------------------------------------------- constants that an engine folds into one another
#
# When an engine loads a model, it folds a batch norm's four vectors into one scale and shift,
# and these into the weights of the convolution before it. From low constants it would get
# products of rounded numbers, and round them again.

Array = NDArray[Any]
_EPSILON: Final = 1e-5  # ONNX's default for a batch norm
_LOW: Final = {DATA_TYPES[fmt]: fmt for fmt in (Format.BF16, Format.FP16)}
_ROLES: Final = {
    "Conv": ("", "weights", "bias"),
    "BatchNormalization": ("", "scale", "shift", "mean", "variance"),
}


def combine_norm(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Combine the constants of a low batch norm, and of the convolution before it.

    Nothing changes if the norm trains, so that its mean and variance are not its constants,
    or if the combined numbers do not fit the format.

    Returns:
        The nodes whose constants changed.
    """
    fmt = _LOW.get(node.outputs[0].dtype or ir.DataType.UNDEFINED)
    vectors = [v for v in map(_numbers, node.inputs[1:]) if v is not None]
    if fmt is None or node.domain or trains(node) or len(vectors) != 4:
        return ()
    scale, shift, mean, variance = vectors
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + node.attributes.get_float("epsilon", _EPSILON))
        offset = shift - mean * factor
    if not _fits(fmt, factor, offset):
        return ()
    changed: list[ir.Node] = []
    product = _product_before(node)
    if product is not None:
        changed.append(product)
        moved = _into_product(editor, product, factor, offset, fmt)
        if moved is not None:
            factor, offset = np.ones_like(factor), moved
    parts = (factor, offset, np.zeros_like(offset), np.ones_like(factor))
    for index, array in enumerate(parts, 1):
        _give(editor, node, index, array, fmt)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.0)
    return (*changed, node)


def _product_before(node: ir.Node) -> ir.Node | None:
    """The convolution of constant weights, in the norm's type, whose result only it reads."""
    value = node.inputs[0]
    before = value.producer() if value is not None else None
    if before is None or value is None or before.op_type != "Conv":
        return None
    if before.domain or len(value.uses()) != 1 or value.is_graph_output():
        return None
    constant = all(_numbers(v) is not None for v in before.inputs[1:] if v is not None)
    same = before.outputs[0].dtype == node.outputs[0].dtype
    return before if constant and same else None


def _into_product(
    editor: Editor, product: ir.Node, factor: Array, offset: Array, fmt: Format
) -> Array | None:
    """Move the norm's ``factor`` into the weights of ``product``, and its bias to the norm.

    Returns the norm's new offset; None if nothing moves, as the numbers do not fit ``fmt``.
    """
    weights = _numbers(product.inputs[1])
    assert weights is not None
    scaled = weights * factor.reshape(-1, *[1] * (weights.ndim - 1))
    bias = _numbers(product.inputs[2]) if len(product.inputs) > 2 else None
    shift = offset if bias is None else offset + bias * factor
    if not _fits(fmt, scaled, shift):
        return None
    _give(editor, product, 1, scaled, fmt)
    if bias is not None:
        _give(editor, product, 2, np.zeros_like(bias), fmt)
    return shift


def _fits(fmt: Format, *arrays: Array) -> bool:
    """Whether all numbers are finite and within the range of ``fmt``."""
    return all(bool((np.abs(a) <= fmt.max).all()) for a in arrays)


def _numbers(value: ir.Value | None) -> Array | None:
    """A constant's numbers before it was converted, in fp64; None if it is not constant."""
    tensor = constant_tensor(value) if value is not None else None
    if value is None or tensor is None or value.is_graph_input():
        return None
    return constant_reader(unrounded(tensor))().astype(np.float64)


def _give(editor: Editor, node: ir.Node, index: int, array: Array, fmt: Format) -> None:
    """Let ``node`` read ``array`` as its input ``index``, stored in ``fmt``."""
    old = node.inputs[index]
    assert old is not None
    exact = ConvertedTensor(ir.tensor(array.astype(np.float32)), fmt)
    role = _ROLES[node.op_type][index]
    node.replace_input_with(index, editor.constant(f"{node.name}_{role}_{fmt.label}", exact))
    if old.is_initializer():
        drop_unread([old])


# ONNX defines HardSwish as x * HardSigmoid(x) with this alpha and beta.
_HARD_SWISH: Final = (1 / 6, 0.5)
_STASHING: Final = frozenset({"LayerNormalization", "RMSNormalization"})


Restatement: TypeAlias = Callable[[Editor, ir.Node], Sequence[ir.Node]]


def is_low(node: ir.Node) -> bool:
    """Whether the node computes in bf16; engines match patterns in fp16 as they do in fp32."""
    outputs = node.outputs
    return not node.domain and bool(outputs) and outputs[0].dtype == ir.DataType.BFLOAT16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One kind of rewriting.

    Attributes:
        restate: Rewrites a node and those around it; returns the nodes that it changed.
        reason: Why, as the user is told.
        since: The first opset that has the new op.
        applies: Whether ``restate`` may change a node: asked before the opset is raised.
    """

    restate: Restatement
    reason: str
    since: int = 0
    applies: Callable[[ir.Node], bool] = is_low


def restate(model: ir.Model, engine: str) -> tuple[ir.Model, tuple[Restated, ...]]:
    """Rewrite low ops of ``model``, in place, for ONNX's definitions and for ``engine``.

    Law: in exact arithmetic the outputs are the same.

    Returns:
        The model, which is another object if its opset had to be raised; and what changed.

    Raises:
        ModelError: If a bf16 Einsum is no matrix product. The rule ``einsum`` keeps such
            Einsums in fp32.
    """
    restatements: list[Restated] = []
    editor = Editor(model)
    for row in (_EINSUM, *RESTATEMENTS.get(engine, ())):
        nodes = [n for n in editor.main.all_nodes() if row.applies(n)]
        if nodes and row.since > opset_of(editor.model):
            try:
                editor = Editor(raise_opset(editor.model, row.since))
            except ModelError:
                continue  # the opset cannot be raised, and the ops stay as they are
            infer(editor.model, shapes=False)
            nodes = [n for n in editor.main.all_nodes() if row.applies(n)]
        changed = [m for n in nodes if row.applies(n) for m in row.restate(editor, n)]
        if changed:
            names = tuple(dict.fromkeys(n.name or "" for n in changed))
            restatements.append(Restated(nodes=names, reason=row.reason))
    return editor.model, tuple(restatements)


def lowered(model: bytes, engine: str) -> bytes:
    """A serialized model with its ops rewritten for ``engine``."""
    restated, _ = restate(ir.from_proto(onnx.ModelProto.FromString(model)), engine)
    return ir.to_proto(restated).SerializeToString()


# Einsums as matrix products.


def _einsum(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Write an Einsum as a MatMul, with nodes that move its operands and its result."""
    first, other, product = _product(node)
    left, right = (other, first) if product.swapped else (first, other)
    operands = [
        _moved(editor, node, left, product.left),
        _moved(editor, node, right, product.right),
    ]
    node.prepend(editor.take())
    turn_into(node, "MatMul", operands)
    if product.after:
        raw = node.outputs[0]
        result = _moved(editor, node, raw, product.after)
        editor.replace_result(raw, result)
        raw.name, result.name = editor.fresh(f"{raw.name}_product"), raw.name
    return (node,)


def _product(node: ir.Node) -> tuple[ir.Value, ir.Value, Product]:
    """The two operands of the Einsum, and the matrix product that it is of them."""
    equation = node.attributes["equation"].as_string()
    operands = [v for v in node.inputs if v is not None]
    known = [constant_tensor(v) for v in operands]
    lengths = [t.shape.numpy() for t in known if t is not None]
    try:
        product = as_product(
            equation,
            constant=[t is not None for t in known],
            lengths=lengths[0] if len(lengths) == 1 else None,
        )
    except ValueError as error:
        raise ModelError(
            f"Einsum {equation!r} in bf16 cannot be written: {error}",
            where=f"node {node.name!r}",
            fix="keep it in fp32",
        ) from error
    first, other = operands
    return first, other, product


def _moved(editor: Editor, node: ir.Node, value: ir.Value, moves: Moves) -> ir.Value:
    """``value`` after ``moves``, for the product ``node``."""

    def op(kind: str, inputs: list[ir.Value], **attributes: object) -> ir.Value:
        name = editor.fresh(f"{node.name}_{kind}")
        dtype = value.dtype if inputs else ir.DataType.INT64
        output = editor.fresh(f"{name}_output")
        return editor.op(kind, inputs, attributes, name=output, node=name, dtype=dtype)

    for move, argument in moves:
        if move is Move.TRANSPOSE:
            value = op(move.value, [value], perm=list(argument))
        else:
            array = ir.tensor(np.array(argument, np.int64))
            value = op(move.value, [value, op("Constant", [], value=array)])
    return value


# Patterns of OpenVINO.


def _statistics(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Let a norm compute its statistics in bf16 by its definition (``stash_type``).

    Its mean and deviation have that type, too: where they are read, they keep fp32.
    """
    statistics = node.outputs[1:]
    if node.op_type not in _STASHING or any(map(is_read, statistics)):
        return ()
    dtype = node.outputs[0].dtype
    assert dtype is not None
    attributes = {k: a.value for k, a in node.attributes.items()}
    if attributes.get("stash_type", int(ir.DataType.FLOAT)) != ir.DataType.FLOAT:
        return ()
    for value in statistics:
        value.type = None  # the stated one would contradict the attribute
    return (
        turn_into(node, node.op_type, node.inputs, {**attributes, "stash_type": int(dtype)}),
    )


def _neutral(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Replace a product with 1 or a sum with 0 by Identity."""
    if node.op_type not in _NEUTRAL or len(node.inputs) != 2:
        return ()
    number, indices = _NEUTRAL[node.op_type]
    for index in indices:
        if _scalar(node.inputs[index]) == number:
            return (turn_into(node, "Identity", [node.inputs[1 - index]]),)
    return ()


# The neutral element of each op, and the operands that it may be.
_NEUTRAL: Final[Mapping[str, tuple[float, tuple[int, ...]]]] = {
    "Mul": (1.0, (1, 0)),
    "Div": (1.0, (1,)),
    "Add": (0.0, (1, 0)),
    "Sub": (0.0, (1,)),
}


def _scalar(value: ir.Value | None) -> float | None:
    """The number of a constant of rank 0: broadcasting it never makes the result larger."""
    tensor = constant_tensor(value) if value is not None else None
    if tensor is None or tensor.shape.rank():
        return None
    return float(np.asarray(tensor.numpy()).astype(np.float32))


def _quotient(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Rewrite x * (1 / sqrt(v)) as x / sqrt(v)."""
    if node.op_type == "Reciprocal":
        root = node.inputs[0]
    elif node.op_type == "Div" and _scalar(node.inputs[0]) == 1.0:
        root = node.inputs[1]
    else:
        return ()
    producer = root.producer() if root is not None else None
    inverse = node.outputs[0]
    readers = [u.node for u in inverse.uses()]
    only_products = all(_is_product(n, inverse) for n in readers)
    if producer is None or producer.op_type != "Sqrt" or not readers or not only_products:
        return ()
    if inverse.is_graph_output():
        return ()
    changed = [turn_into(node, "Identity", [root])]
    for reader in readers:
        other = reader.inputs[1 if reader.inputs[0] is inverse else 0]
        changed.append(turn_into(reader, "Div", [other, inverse]))
    return changed


def _is_product(node: ir.Node, operand: ir.Value) -> bool:
    return node.op_type == "Mul" and is_low(node) and list(node.inputs).count(operand) == 1


def _gated(gate: ir.Value) -> ir.Node | None:
    """The product that alone reads ``gate``; None if other ops read it, too."""
    uses = list(gate.uses())
    if len(uses) != 1 or gate.is_graph_output() or not _is_product(uses[0].node, gate):
        return None
    return uses[0].node


def _hard_swish(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Rewrite x * HardSigmoid(x) as HardSwish(x), if nothing else reads the HardSigmoid."""
    if node.op_type != "HardSigmoid":
        return ()
    stated = node.attributes.get_float("alpha", 0.2), node.attributes.get_float("beta", 0.5)
    x, product = node.inputs[0], _gated(node.outputs[0])
    if product is None or x not in product.inputs:
        return ()
    if not np.allclose(stated, _HARD_SWISH, rtol=1e-6):
        return ()
    gate = node.outputs[0]
    return turn_into(node, "Identity", [x]), turn_into(product, "HardSwish", [gate])


def _is_scaled_swish(node: ir.Node) -> bool:
    """Whether ``node`` is the Sigmoid of x * Sigmoid(b * x), with b a constant number."""
    scaled = node.inputs[0] if node.op_type == "Sigmoid" and is_low(node) else None
    product = scaled.producer() if scaled is not None else None
    reader = _gated(node.outputs[0]) if product is not None else None
    if scaled is None or product is None or reader is None:
        return False
    if product.op_type != "Mul" or len(scaled.uses()) != 1:
        return False
    x, _ = _scaling(product)
    return x is not None and x in reader.inputs


def _scaling(product: ir.Node) -> tuple[ir.Value | None, float]:
    """The operand beside a constant number, and that number before it was rounded to bf16."""
    for index in (1, 0):
        value = product.inputs[index]
        if value is not None and _scalar(value) is not None:
            tensor = constant_tensor(value)
            assert tensor is not None
            number = np.asarray(unrounded(tensor).numpy()).astype(np.float32)
            return product.inputs[1 - index], float(number)
    return None, 1.0


def _swish(editor: Editor, node: ir.Node) -> Sequence[ir.Node]:
    """Rewrite x * Sigmoid(b * x) as a Swish."""
    gate, scaled = node.outputs[0], node.inputs[0]
    product, reader = scaled.producer() if scaled is not None else None, _gated(gate)
    assert product is not None
    assert reader is not None
    x, alpha = _scaling(product)
    return (
        turn_into(product, "Identity", [x]),
        turn_into(node, "Identity", [scaled]),
        turn_into(reader, "Swish", [gate], {"alpha": alpha}),
    )


_EINSUM: Final = _Row(
    restate=_einsum,
    reason="ONNX's Einsum has no bf16, its MatMul has",
    applies=lambda node: node.op_type == "Einsum" and is_low(node),
)

RESTATEMENTS: Final[Mapping[str, Iterable[_Row]]] = {
    "openvino": (
        _Row(
            restate=combine_norm,
            reason="a batch norm's four vectors are one scale and one shift: combined in fp32,"
            " rounded once",
            applies=lambda node: node.op_type == "BatchNormalization",
        ),
        _Row(
            restate=_statistics,
            reason="statistics in fp32 put casts around the norm's kernel, which computes them"
            " in fp32 anyway",
        ),
        _Row(
            restate=_neutral,
            reason="a bf16 product with 1 or sum with 0 is not removed, and keeps the ops"
            " around it from being fused",
        ),
        _Row(
            restate=_quotient,
            reason="a norm is recognised by its quotient, not by the product with an inverse",
        ),
        _Row(restate=_hard_swish, reason="one kernel, or part of the one before it"),
        _Row(
            restate=_swish,
            reason="a bf16 Swish is recognised without a factor inside, or as one op",
            since=24,
            applies=_is_scaled_swish,
        ),
    ),
    "onnxruntime": (
        _Row(
            restate=write_product,
            reason="quantized weights are read by MatMulNBits, which says of each product"
            " whether it rounds what it reads; other nodes for it may be far slower than fp32",
            applies=is_coded,
        ),
    ),
}
"""Rewritings for each engine, by its name; for other engines ops stay as they are."""
