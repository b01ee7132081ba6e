"""Products, convolutions and sums, computed by numpy in an order of summation.

An engine's kernels add up in an order of their own, which may change with shapes, threads
and the processor. Here each op that sums many terms is a function of arrays whose order is
chosen (``numbers/summation.py``). Law: but for the order it computes what the op's definition
says; a bias is added to the sum in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Attribute, Node
from finecast.numbers.formats import Format
from finecast.numbers.summation import Floats, Order, Summation

Arrays: TypeAlias = Sequence[NDArray[Any] | None]
Attributes: TypeAlias = Mapping[str, Any]
_Summed: TypeAlias = Callable[[Summation, Attributes, Arrays], Floats]

# Elements of a convolution's operand that are written out at a time, one for each term.
_WRITTEN_OUT: Final = 1 << 22


@dataclass(slots=True, kw_only=True)
class Summing:
    """The order in which the sums of a model are added up; it may change from run to run."""

    order: Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedOp:
    """An op as a function of its inputs; those that are absent are None.

    Attributes:
        summing: The order.
        op: The op's name.
        attributes: The op's attributes.
        format: The format of its partial sums.
        block: The length of blocks, 0 where the device states none.
    """

    summing: Summing
    op: str
    attributes: Mapping[str, Attribute]
    format: Format = Format.FP32
    block: int = 0

    def __call__(self, *arrays: NDArray[Any] | None) -> Floats:
        """The op's result."""
        accumulator = Summation(order=self.summing.order, format=self.format, block=self.block)
        return _SUMMED[self.op](accumulator, self.attributes, arrays)


_BY_AXIS: Final = ("strides", "dilations")
# Padding by numbers, or none; ONNX and OpenVINO call it otherwise.
_STATED_PADS: Final = frozenset({"NOTSET", "EXPLICIT", "VALID"})


def is_summed(node: Node) -> bool:
    """Whether the order of the op's sums can be chosen: not in a body of control flow."""
    read = node.attributes
    padding = str(read.get("auto_pad", "NOTSET")).upper(), read.get("padding", 0)
    transposed = bool(read.get("transposed", 0))
    plain = padding[0] in _STATED_PADS and padding[1] != "same" and not transposed
    pooled = {*np.atleast_1d(np.asarray(read.get("output_size", 1)))} == {1}
    last = str(read.get("data_format", "NHWC")).endswith("C")  # of TensorFlow alone
    inside = node.region == 0 and node.format is Format.FP32
    return node.op in _SUMMED and plain and pooled and last and inside


def _matmul(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    a, b = _floats(arrays[:2])
    a = a.swapaxes(-1, -2) if attributes.get("transA") and a.ndim > 1 else a
    b = b.swapaxes(-1, -2) if attributes.get("transB") and b.ndim > 1 else b
    return _product(by, a, b)


def _linear(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    x, weight, *bias = _floats(arrays)
    return _affine(_product(by, x, weight.T), attributes, bias)


def _gemm(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    a, b, *bias = _floats(arrays)
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    return _affine(_product(by, a, b), attributes, bias)


def _addmm(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    bias, a, b = _floats(arrays)
    return _affine(_product(by, a, b), attributes, [bias])


def _affine(total: Floats, attributes: Attributes, bias: Sequence[Floats]) -> Floats:
    alpha, beta = (np.float32(attributes.get(name, 1)) for name in ("alpha", "beta"))
    total = total if alpha == 1 else alpha * total
    if not bias:
        return total
    return total + (bias[0] if beta == 1 else beta * bias[0])


def _product(by: Summation, a: Floats, b: Floats) -> Floats:
    """``a @ b`` as numpy broadcasts it."""
    left, right = (a[None] if a.ndim == 1 else a), (b[:, None] if b.ndim == 1 else b)
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    shape = (*batch, left.shape[-2], right.shape[-1])
    if right.ndim == 2:
        total = by.products(left.reshape(1, -1, left.shape[-1]), right[None])
    else:
        wide = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (left, right))
        total = by.products(*(x.reshape(-1, *x.shape[-2:]) for x in wide))
    kept = [n for n, x in ((-2, a), (-1, b)) if x.ndim > 1]
    return total.reshape(*batch, *(shape[n] for n in kept))


def _conv(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    if "data_format" in attributes:
        return _conv_channels_last(by, attributes, arrays)
    x, weight, *bias = _floats(arrays)
    rank = weight.ndim - 2
    x = x if x.ndim == weight.ndim else x[None]  # PyTorch's takes one sample, too
    groups = _numbers(attributes, ("group", "groups"), 1, 1)[0]
    strides = _numbers(attributes, ("strides", "stride"), 1, rank)
    dilations = _numbers(attributes, ("dilations", "dilation"), 1, rank)
    stated = {} if attributes.get("padding") == "valid" else attributes
    pads = _numbers(stated, ("pads", "padding", "pads_begin"), 0, rank)
    ends = _numbers(stated, ("pads_end",), 0, rank) if "pads_end" in stated else pads[rank:]
    ends = ends or pads
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], ends, strict=True)])
    spans = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilations, strict=True)]
    axes = tuple(range(2, 2 + rank))
    windows = np.lib.stride_tricks.sliding_window_view(x, spans, axis=axes)
    steps = (
        *(slice(None, None, s) for s in strides),
        *(slice(None, None, d) for d in dilations),
    )
    windows = windows[(slice(None), slice(None), *steps)]
    places, taps = windows.shape[2 : 2 + rank], math.prod(weight.shape[2:])
    factors = weight.reshape(groups, weight.shape[0] // groups, -1).transpose(0, 2, 1)
    out = np.empty((len(x), weight.shape[0], *places), np.float32)
    at_once = max(1, _WRITTEN_OUT // max(1, math.prod(places) * taps * x.shape[1]))
    for first in range(0, len(x), at_once):
        some = windows[first : first + at_once]
        # Channels and taps, which are summed, go last; a group is a product by itself.
        split = some.reshape(len(some), groups, -1, *some.shape[2:])
        last = range(3 + rank, 3 + 2 * rank)
        rows = split.transpose(1, 0, *range(3, 3 + rank), 2, *last)
        total = by.products(rows.reshape(groups, -1, factors.shape[1]), factors)
        total = total.reshape(groups, len(some), *places, -1)
        moved = total.transpose(1, 0, 2 + rank, *range(2, 2 + rank))
        out[first : first + at_once] = moved.reshape(len(some), -1, *places)
    return out + bias[0].reshape(-1, *[1] * rank) if bias else out


def _group_conv(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    """A convolution whose weights have an axis of groups, in front, as OpenVINO states it."""
    x, weight = _floats(arrays[:2])
    stated = {**attributes, "group": len(weight)}
    return _conv(by, stated, [x, weight.reshape(-1, *weight.shape[2:])])


def _conv_channels_last(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    """A convolution as TensorFlow states it: channels go last, of filters and values."""
    x, weight = _floats(arrays[:2])
    rank = weight.ndim - 2
    if len(attributes.get("output_axes", ())) > 1:  # depthwise: each channel is a group
        weight = weight.reshape(*weight.shape[:rank], 1, -1)
    strides, dilations = (attributes.get(n, [1] * x.ndim)[1:-1] for n in _BY_AXIS)
    pads = [0] * 2 * rank
    if attributes.get("padding") == "SAME":
        for axis, (step, apart) in enumerate(zip(strides, dilations, strict=True)):
            size = x.shape[1 + axis]
            span = (weight.shape[axis] - 1) * apart + 1
            missing = max(0, (-(-size // step) - 1) * step + span - size)
            pads[axis], pads[rank + axis] = missing // 2, missing - missing // 2
    elif attributes.get("padding") == "EXPLICIT":
        pairs = attributes["explicit_paddings"][2:-2]
        pads = [*pairs[::2], *pairs[1::2]]
    stated = {
        "strides": strides,
        "dilations": dilations,
        "pads": pads,
        "group": x.shape[-1] // weight.shape[rank],
    }
    weight = weight.transpose(rank + 1, rank, *range(rank))
    return np.moveaxis(_conv(by, stated, [np.moveaxis(x, -1, 1), weight]), 1, -1)


def _reduce_mean(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    total, count = _reduced(by, attributes, arrays)
    return total / np.float32(count)


def _average(by: Summation, attributes: Attributes, arrays: Arrays) -> Floats:
    """The mean over all axes but those of samples and channels, which stay."""
    del attributes
    (x,) = _floats(arrays)
    return _reduce_mean(by, {"axes": tuple(range(2, x.ndim)), "keepdims": 1}, [x])


def _reduced(by: Summation, attributes: Attributes, arrays: Arrays) -> tuple[Floats, int]:
    """Sums over axes, and how many terms each has."""
    (x,) = _floats(arrays[:1])
    torch = "dim" in attributes or "keepdim" in attributes
    stated: Any = attributes.get("dim" if torch else "axes")
    if len(arrays) > 1 and arrays[1] is not None:
        stated = arrays[1].tolist()
    if stated is None or (stated in ((), []) and not attributes.get("noop_with_empty_axes")):
        stated = range(x.ndim)
    axes = {int(axis) % x.ndim for axis in np.atleast_1d(np.asarray(stated, np.int64))}
    keeps = attributes.get("keepdim", 0) if torch else attributes.get("keepdims", 1)
    keeps = attributes.get("keep_dims", keeps)  # TensorFlow's
    if not axes:
        return x, 1
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    terms = x.transpose(*sorted(axes), *rest)
    count = math.prod(x.shape[axis] for axis in axes)
    total = by.sums(terms.reshape(count, *(x.shape[axis] for axis in rest)))
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    return (total.reshape(shape) if keeps else total), count


def _floats(arrays: Arrays) -> list[Floats]:
    """The arrays that there are."""
    return [np.asarray(a, np.float32) for a in arrays if a is not None]


def _numbers(
    attributes: Attributes, names: tuple[str, ...], default: int, rank: int
) -> list[int]:
    """A number for each axis, by the name that a library has; some may state one for all."""
    stated: Any = next((attributes[n] for n in names if n in attributes), default)
    numbers = [int(n) for n in np.atleast_1d(np.asarray(stated))]
    return numbers * rank if len(numbers) == 1 else numbers


_SUMMED: Final[Mapping[str, _Summed]] = {
    "matmul": _matmul,
    "linear": _linear,
    "gemm": _gemm,
    "addmm": _addmm,
    "conv": _conv,
    "group_conv": _group_conv,
    "reduce_sum": lambda by, attributes, arrays: _reduced(by, attributes, arrays)[0],
    "reduce_mean": _reduce_mean,
    "global_average_pool": _average,
}
"""How ops are computed that sum many terms, by name; others keep their engine's order."""
