"""Ops that OpenVINO computes wrongly in any format: models with them are refused by name.

Law: a function here names an op by which a known fault of OpenVINO shows, and nothing where
the installed release does not have the fault.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.devices.faults import is_here

TIED: Final = "openvino-tied-weights"
PADDING: Final = "openvino-computed-padding"
STACKED: Final = "openvino-stacked-scales"
LENGTHS: Final = "openvino-sequence-lengths"
BROADCAST: Final = "openvino-broadcast-stacks"


def _reaches(start: Any, judge: Callable[[Any], bool | Iterable[Any]]) -> bool:
    """Whether an op behind a port is what is looked for, back to constants.

    ``judge`` says so of an op, or gives the ports behind which to look on.
    """
    waiting, seen = [start.get_node()], set[str]()
    while waiting:
        op = waiting.pop()
        if op.get_friendly_name() in seen or op.get_type_name() == "Constant":
            continue
        seen.add(op.get_friendly_name())
        verdict = judge(op)
        if isinstance(verdict, bool):
            if verdict:
                return True
            continue
        waiting += [port.get_node() for port in verdict]
    return False


# Products whose weights OpenVINO confuses.
#
# ``x @ w @ w.T`` of a tied autoencoder has two. OpenVINO keeps the packed weights of an fp32
# product by their address and sizes, and not by whether they are transposed: of two products
# by one square constant, the second gets the weights of the first. OpenVINO's IR has equal
# constants once, so that constants count as one if their numbers are equal.


def confused_products(ops: Iterable[Any]) -> str:
    """Which products among a model's ops OpenVINO confuses; empty for none."""
    if not is_here(TIED):
        return ""
    weights = [(op, *read) for op in ops if (read := _square_weights(op))]
    for key in (_form, _numbers):  # numbers are read only of weights of the same form
        alike: dict[Hashable, list[tuple[Any, Any, bool]]] = defaultdict(list)
        for product, constant, transposed in weights:
            alike[key(constant)].append((product, constant, transposed))
        both = (group for group in alike.values() if len({t for *_, t in group}) > 1)
        weights = [reading for group in both for reading in group]
    if not weights:
        return ""
    names = [
        next(op.get_friendly_name() for op, _, turned in weights if turned is transposed)
        for transposed in (False, True)
    ]
    return (
        f"{names[0]!r} multiplies by square weights, {names[1]!r} by the same ones transposed,"
        f" and OpenVINO computes one of them with the weights of the other, a known fault"
        f" ({TIED})"
    )


def _square_weights(product: Any) -> tuple[Any, bool] | None:
    """The square constant that an fp32 product multiplies by, and whether transposed."""
    transposed = _transposes(product)
    if transposed is None or product.get_output_element_type(0).get_type_name() != "f32":
        return None
    op = product.input_value(1).get_node()
    while op.get_type_name() in ("Convert", "Transpose"):
        transposed ^= op.get_type_name() == "Transpose"
        op = op.input_value(0).get_node()
    shape = list(op.get_shape()) if op.get_type_name() == "Constant" else []
    square = len(shape) > 1 and shape[-1] == shape[-2] > 1 and {*shape[:-2]} <= {1}
    return (op, transposed) if square else None


def _transposes(product: Any) -> bool | None:
    """Whether a product itself transposes its weights; None for other ops."""
    if product.get_type_name() == "MatMul":
        return bool(product.get_attributes()["transpose_b"])
    if product.get_type_name() == "Einsum" and product.get_input_size() == 2:
        terms, _, result = product.get_attributes()["equation"].partition("->")
        weights = terms.partition(",")[2].strip()
        columns = [label for label in weights if label in result]
        return weights[0] == columns[0] if len(weights) == 2 and len(columns) == 1 else None
    return None


def _form(constant: Any) -> Hashable:
    return constant.get_element_type().get_type_name(), constant.get_shape()[-1]


def _numbers(constant: Any) -> Hashable:
    return hashlib.blake2b(np.ascontiguousarray(constant.data).data).hexdigest()


# Pads by a number that the model computes: OpenVINO pads by what its buffer has, mostly 0.

_VALUE: Final = 3
"""The input of a Pad that is the number to pad by."""
_NOT_FOLDED: Final = frozenset({"ReadValue", "RandomUniform", "Multinomial"})
"""Ops that OpenVINO does not compute beforehand, whatever they read."""


def computed_padding(ops: Iterable[Any]) -> str:
    """Which Pad among a model's ops pads by a number that is computed; empty if none does.

    What follows from constants alone OpenVINO computes as it compiles a model, and pads by it.
    """
    if not is_here(PADDING):
        return ""
    for op in ops:
        if op.get_type_name() == "Pad" and op.get_input_size() > _VALUE and _is_computed(op):
            return (
                f"{op.get_friendly_name()!r} pads by a number that the model computes, and"
                f" OpenVINO pads by another one, a known fault ({PADDING})"
            )
    return ""


def _is_computed(pad: Any) -> bool:
    """Whether the number to pad by follows from other values than constants."""

    def judge(op: Any) -> bool | Iterable[Any]:
        free = not op.get_input_size() or op.get_type_name() in _NOT_FOLDED
        return free or op.input_values()

    by_constant = pad.get_attributes()["pad_mode"] == "constant"
    return by_constant and _reaches(pad.input_value(_VALUE), judge)


# Recurrent ops that OpenVINO computes to the end of the tensor, however long sequences are.

_LENGTHS_AT: Final = {"LSTMSequence": 3, "GRUSequence": 2, "RNNSequence": 2}
"""Which input of a recurrent op is the length of each sequence."""


def ignored_lengths(ops: Iterable[Any]) -> str:
    """Which recurrent op among a model's ops ignores the lengths it is given; empty if none.

    It does so where a size of the sequences is free. Lengths that follow from sizes alone, or
    are one number, are those of the whole tensor, as some exporters write them out.
    """
    if not is_here(LENGTHS):
        return ""
    for op in ops:
        port = _LENGTHS_AT.get(op.get_type_name())
        if port is None or not op.get_input_partial_shape(0).is_dynamic:
            continue
        if _differ(op.input_value(port)):
            return (
                f"{op.get_friendly_name()!r} reads lengths of sequences in a tensor of free"
                " sizes, and OpenVINO computes each sequence as if it was as long as the"
                f" longest, a known fault ({LENGTHS})"
            )
    return ""


def _differ(lengths: Any) -> bool:
    """Whether lengths of sequences may be several numbers."""

    def judge(op: Any) -> bool | Iterable[Any]:
        if op.get_type_name() == "ShapeOf":
            return False
        return not op.get_input_size() or op.input_values()

    numbers = _constant(lengths)
    return _reaches(lengths, judge) if numbers is None else len(np.unique(numbers)) > 1


# Products of one operand by each matrix of a constant stack, such as a mixture's experts.

_STACK: Final = 3
"""The number of axes of a stack of matrices."""


def broadcast_stacks(ops: Iterable[Any]) -> str:
    """Which product among a model's ops OpenVINO cannot run; empty for none.

    It multiplies an operand of free sizes by each matrix of a constant stack, and the operand
    itself has no such axis, or has one of it. The model is loaded, and fails in each call.
    """
    if not is_here(BROADCAST):
        return ""
    for op in ops:
        if op.get_type_name() != "MatMul" or not _is_repeated(op.get_input_partial_shape(0)):
            continue
        numbers = _constant(op.input_value(1))
        shape = op.get_input_partial_shape(1)
        stacks = numbers is not None and shape.is_static and len(shape) == _STACK
        if stacks and shape[0].get_length() > 1:
            return (
                f"{op.get_friendly_name()!r} multiplies one operand of free sizes by each"
                " matrix of a constant stack, which OpenVINO loads and cannot run, a known"
                f" fault ({BROADCAST})"
            )
    return ""


def _is_repeated(shape: Any) -> bool:
    """Whether an operand of free sizes is the same for each matrix of a stack."""
    if shape.rank.is_dynamic or shape.is_static or len(shape) > _STACK:
        return False
    return len(shape) < _STACK or (shape[0].is_static and shape[0].get_length() == 1)


# Int8 products by a stack of matrices whose scales OpenVINO reads past.
#
# OpenVINO moves the scales of a product's channels into its kernel. Of a stack of matrices
# that share them, the kernel seems to read as many scales as there are matrices and channels:
# its numbers are arbitrary, and at times the process ends. Finecast's own plans give a stack
# one scale (``rules/scaled_operands.py``); other tools write one for each channel.
#
# The scales stay outside of the kernel, and all is right, where a zero point other than 0 is
# subtracted on either side, and where each matrix has scales of its own.

_CODES: Final = frozenset({"i8", "u8"})
_SCALES: Final = frozenset({"Multiply", "Divide"})
_SHAPES: Final = ("Reshape", "Squeeze", "Unsqueeze")
_MOVES: Final = frozenset(
    {
        *_SHAPES,
        *("Transpose", "Concat", "Split", "VariadicSplit"),
        *("Slice", "StridedSlice", "Gather", "Pad", "Broadcast", "DepthToSpace"),
        *("SpaceToDepth", "BatchToSpace", "SpaceToBatch", "ShuffleChannels", "Interpolate"),
        *("MaxPool", "ReduceMax", "ReduceMin", "Relu", "Negative", "Convert", "Identity"),
    }
)
"""Ops behind which OpenVINO computes on codes that were quantized in front of them."""


def stacked_scales(ops: Iterable[Any]) -> str:
    """Which int8 product among a model's ops reads past its scales; empty for none."""
    if not is_here(STACKED):
        return ""
    for op in ops:
        if op.get_type_name() == "MatMul" and _shares_scales(op) and _has_codes(op):
            return (
                f"the int8 product {op.get_friendly_name()!r} has a scale for each channel of"
                " a stack of matrices, and OpenVINO reads past these scales: numbers are"
                f" arbitrary, and the process may end, a known fault ({STACKED})"
            )
    return ""


def _shares_scales(product: Any) -> bool:
    """Whether the weights are a stack of matrices that share a scale for each channel."""
    weights = product.input_value(1)
    shape = weights.get_partial_shape()
    if shape.is_dynamic or math.prod([*shape.to_shape()][:-2]) <= 1:
        return False
    which = _scales(weights)
    if which is None:
        return False
    if product.get_attributes()["transpose_b"]:
        which = which.swapaxes(-1, -2)
    stack = which.reshape(-1, *which.shape[-2:])
    row = stack[0, 0]
    return row[0] != row[-1] and bool(np.array_equal(stack, np.broadcast_to(row, stack.shape)))


def _scales(port: Any) -> NDArray[np.int32] | None:
    """Which of its scales each of the weights is multiplied by, by number.

    None if the weights are no codes, or have a zero point, or are not scaled in front.
    """
    op = port.get_node()
    kind = op.get_type_name()
    if kind == "FakeQuantize":
        constant = _constant(op.input_value(0)) is not None
        return _numbered(op.input_value(4), port) if constant and _is_symmetric(op) else None
    if kind in _SCALES:
        return next(
            (
                _numbered(op.input_value(1 - index), port)
                for index in (0, 1)
                if _are_codes(op.input_value(index))
            ),
            None,
        )
    passed = kind in ("Convert", "Transpose", *_SHAPES)
    which = _scales(op.input_value(0)) if passed else None
    if which is None or kind == "Convert":
        return which
    order = _constant(op.input_value(1)) if kind == "Transpose" else None
    if kind in _SHAPES:
        return which.reshape(tuple(port.get_shape()))
    return None if order is None else which.transpose(*(order.tolist() or [None]))


def _numbered(scales: Any, of: Any) -> NDArray[np.int32]:
    """The number of the scale at each place of what is scaled."""
    shape = tuple(scales.get_shape())
    numbers = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    return np.broadcast_to(numbers, tuple(of.get_shape()))


def _are_codes(port: Any) -> bool:
    """Whether a port gives constant codes as floats, whose zero point is 0."""
    op = port.get_node()
    if op.get_type_name() == "Subtract" and _is_zero(op.input_value(1)):
        op = op.input_value(0).get_node()
    while op.get_type_name() in ("Convert", "Transpose", *_SHAPES):
        op = op.input_value(0).get_node()
    return (
        op.get_type_name() == "Constant"
        and op.get_output_element_type(0).get_type_name() in _CODES
    )


def _has_codes(product: Any) -> bool:
    """Whether the other operand comes as codes whose zero point is 0."""

    def judge(op: Any) -> bool | Iterable[Any]:
        kind = op.get_type_name()
        if kind == "FakeQuantize":
            return _is_symmetric(op)
        if kind == "Convert" and op.get_input_element_type(0).get_type_name() in _CODES:
            return True  # QuantizeLinear and DequantizeLinear
        if kind in _MOVES:
            return op.input_values()
        scales = kind in _SCALES or (kind == "Subtract" and _is_zero(op.input_value(1)))
        return [op.input_value(0)] if scales else False

    return _reaches(product.input_value(0), judge)


def _is_symmetric(quantize: Any) -> bool:
    """Whether the zero point of a FakeQuantize is 0: its range starts there, or is even."""
    low, high = (_constant(quantize.input_value(index)) for index in (3, 4))
    if low is None or high is None:
        return True
    step = (high - low) / max(quantize.get_attributes()["levels"] - 1, 1)
    return bool(np.all((low == 0) | (np.abs(low + high) < 1.5 * np.abs(step))))


def _is_zero(port: Any) -> bool:
    """Whether a port gives constant zeros."""
    numbers = _constant(port)
    return numbers is not None and not np.any(numbers)


def _constant(port: Any) -> NDArray[Any] | None:
    """The numbers of a constant, whatever its shape becomes; None for other values."""
    op = port.get_node()
    while op.get_type_name() == "Convert" or op.get_type_name() in _SHAPES:
        op = op.input_value(0).get_node()
    return op.data if op.get_type_name() == "Constant" else None
