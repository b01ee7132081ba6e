"""What a graph says of the numbers that its inputs have, so that random ones look like them.

A model that gets numbers it never saw in training computes numbers that cancel or grow, and
random inputs then refuse good conversions. Three things in a graph say what it saw:

1. A table of rows: an integer input that looks up rows has at most as many values.
2. A batch normalization: its running statistics are those of the data in training, of the
   input itself or of a product with it, from which the input's own are estimated.
3. Constants that bring an input to about 0 and 1 before it is used: a mean that is
   subtracted, a deviation that is divided by, 255 for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from finecast.graph import SCALARS, Graph, Node, Value
from finecast.graph.structure import SAME_NUMBERS, turned_axes
from finecast.graph.worklist import Worklist
from finecast.ops import MOVES, OpKind, by_name

Floats: TypeAlias = NDArray[np.float64]

_INDEX_TYPES: Final = frozenset({"int64", "int32"})
_HASHED: Final = {"int64": (1 << 48) - 1, "int32": (1 << 31) - 1}
"""The largest ids: those of network cards have 48 bits."""
_HASHES: Final = frozenset({"add", "sub", "mul", "div", "floor_divide"})
_MOVES: Final = MOVES | {OpKind.CAST}
_TOP_BYTE: Final = 255
_MOST_READ: Final = 1 << 22
"""Elements of the largest weight that is read: the first layers of networks have fewer."""
_MOST_STEPS: Final = 64
"""Ops behind an input that are looked at: normalization is among the first."""
_MOST_SCALE: Final = 100.0
"""An input that is divided by more, and nothing else, goes from 0 to that number, as bytes go
to 255. The scale of attention, the root of a head's size, is smaller."""
_FAR: Final = 16.0
"""An input from which so much is subtracted is no standard normal one: the means of bytes are
above 100. Of what is added nothing is known: learned positions are below 1, and 273 makes
kelvins of degrees around 0."""

_NEAR: Final = 0.02
"""Bytes are taken to -1 and 1 by 127.5 or by 128, which differ by less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Whole numbers from 0 to ``last``, which is among those drawn."""

    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal:
    """Normal numbers; both arrays broadcast to the input's shape."""

    mean: Floats
    deviation: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Bools, the last of several rows all False: a query that may attend to no key."""


Range: TypeAlias = Whole | Normal | Mask


def input_ranges(graph: Graph) -> dict[str, Range]:
    """What is known of the numbers of inputs, by the inputs' names.

    Law: an integer input is listed if it is only moved, converted, compared and used to look
    up rows of tables of known size; it goes up to the last row of the smallest table.
    Positions and tokens at a model's limits show errors that small ones hide. An input of
    bytes is listed, too, if it is only moved until it is converted to floats, and one of ids
    that are reduced by a remainder: such ids have many digits. A float input is
    listed if batch normalizations or constants say what it is scaled from. Of bools in rows
    one row is False: engines differ in what is attended to there.
    """
    ranges: dict[str, Range | None] = {}
    for value in graph.inputs:
        if value.dtype == "uint8":
            ranges[value.name] = _bytes(graph, value)
        elif value.dtype == "bool" and len(value.shape or ()) > 1:
            ranges[value.name] = Mask()
        elif value.dtype in _INDEX_TYPES or value.format is not None:
            ranges[value.name] = (
                _rows_indexed(graph, value)
                or _hashed(graph, value)
                or _seen_in_training(graph, value)
            )
    return {name: one for name, one in ranges.items() if one is not None}


def _bytes(graph: Graph, value: Value) -> Range | None:
    """All bytes if ``value`` is only moved, measured and converted to floats."""
    moved, converted = Worklist([value.id]), False
    for index in moved:
        for node in _readers(graph, index):
            kind = by_name(node.op).kind
            output_ids = node.output_ids
            if kind is OpKind.CAST and all(graph.values[i].format for i in output_ids):
                converted = True
            elif kind in MOVES:
                moved.add(output_ids)
            elif node.op != "shape":
                return None
    return Whole(last=_TOP_BYTE) if converted else None


def _rows_indexed(graph: Graph, value: Value) -> Range | None:
    """The rows that ``value`` can index; None if it has another use, or none is known.

    A constant may be added before: positions of RoBERTa begin at 2. An index to which so much
    is added that no row is left is one from the end, of which Keras takes the other branch.
    """
    last_rows: list[int] = []
    waiting, seen = [(value.id, 0)], {value.id}
    while waiting:
        index, added = waiting.pop()
        for node in _readers(graph, index):
            kind = by_name(node.op).kind
            if node.op == "gather" and node.inputs[0] != index:
                rows = _rows(graph, node)
                if rows is None:
                    return None
                last_rows.append(rows - 1 - added)
            elif node.op == "shape" or kind is OpKind.COMPARISON:
                continue
            elif kind in _MOVES or node.op in ("where", "add"):
                more = _added(graph, node, index) if node.op == "add" else 0
                if more is None:
                    return None
                output_ids = [i for i in node.output_ids if i not in seen]
                seen.update(output_ids)
                waiting.extend((i, added + more) for i in output_ids)
            else:
                return None
    return (
        Whole(last=min(last_rows))
        if (last_rows := [last for last in last_rows if last >= 0])
        else None
    )


def _hashed(graph: Graph, value: Value) -> Range | None:
    """Ids of any size, if ``value`` is an integer of which only remainders are used."""
    if value.dtype not in _HASHED:
        return None
    ids, reduced = Worklist([value.id]), False
    for index in ids:
        for node in _readers(graph, index):
            if node.op == "mod" and _other_operand(graph, node, index) is not None:
                reduced = True
            elif by_name(node.op).kind in _MOVES or node.op in _HASHES:
                if any(graph.values[i].format for i in node.output_ids):
                    return None
                ids.add(node.outputs)
            elif node.op != "shape":
                return None
    return Whole(last=_HASHED[value.dtype]) if reduced else None


def rows_read(graph: Graph) -> dict[str, range]:
    """The numbers that may be in each integer input that reads rows of a constant table.

    Of several tables the smallest counts. Ops of ONNX and OpenVINO count from a table's end,
    too, so that -1 is its last row; those of PyTorch and TensorFlow do not.
    """
    rows_by_input: dict[str, range] = {}
    for value in graph.inputs:
        limits = [*_limits(graph, value)] if value.dtype in _INDEX_TYPES else []
        if limits:
            first, end = max(one.start for one in limits), min(one.stop for one in limits)
            rows_by_input[value.name] = range(first, end)
    return rows_by_input


def _limits(graph: Graph, value: Value) -> Iterator[range]:
    """The numbers that each table takes whose rows ``value`` reads, in another shape or type.

    Bodies of control flow may not run, and so take any.
    """
    indices = Worklist([value.id])
    for index in indices:
        for node in _readers(graph, index):
            if node.op == "gather" and index in node.inputs[1:2] and not node.region:
                table, rows = graph.read(node, 0), _rows(graph, node)
                if rows is not None and table is not None and table.constant is not None:
                    from_end = node.native.startswith(("onnx::", "openvino::"))
                    yield range(-rows if from_end else 0, rows)
            elif node.inputs[0] == index and (node.op in SAME_NUMBERS or _widens(graph, node)):
                indices.add(node.outputs)


def _widens(graph: Graph, node: Node) -> bool:
    """Whether a cast makes indices of indices."""
    dtypes = [graph.values[i].dtype for i in node.output_ids]
    return by_name(node.op).kind is OpKind.CAST and {*dtypes} <= _INDEX_TYPES


def _added(graph: Graph, node: Node, value: int) -> int | None:
    """The whole number that an Add adds to indices; None if it adds anything else."""
    constant = _other_operand(graph, node, value)
    if constant is None or constant.size != 1 or constant.item() != round(constant.item()):
        return None
    return max(round(constant.item()), 0)


def _rows(graph: Graph, node: Node) -> int | None:
    """The number of rows of the table that a Gather reads; None if unknown."""
    table = graph.read(node, 0)
    axis = node.attributes.get("axis", 0)
    if table is None or not table.shape or not isinstance(axis, int):
        return None
    size = table.shape[axis] if -len(table.shape) <= axis < len(table.shape) else None
    return size if isinstance(size, int) and size > 0 else None


def without_masks(ranges: Mapping[str, Range]) -> dict[str, Range]:
    """``ranges`` without rows that are masked: some models have numbers for none."""
    return {name: one for name, one in ranges.items() if not isinstance(one, Mask)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled:
    """A value that is ``scale`` times the input, plus ``shift``.

    Both arrays broadcast to the input's shape. ``axes`` are the input's axes in the order that
    the value has them; None where they were taken apart or joined, so that only the scales and
    shifts of all channels together are known. ``scales`` and ``shifts`` tell which of both a
    constant was seen for.
    """

    value: int
    scale: Floats
    shift: Floats
    axes: tuple[int, ...] | None
    scales: bool = False
    shifts: bool = False

    def at_input(self, array: Floats) -> Floats:
        """An array that broadcasts to the value, as one that broadcasts to the input."""
        if array.size == 1:
            return array.reshape([1] * self.scale.ndim)
        if self.axes is None or array.ndim > len(self.axes):
            return np.full([1] * self.scale.ndim, np.median(array))
        whole = array.reshape([1] * (len(self.axes) - array.ndim) + [*array.shape])
        return whole.transpose(np.argsort(self.axes))

    def by_channel(self, numbers: Floats, axis: int) -> Floats:
        """A number for each channel along ``axis`` of the value, as an array for the input."""
        rank = self.scale.ndim
        shape = [1] * rank
        if -rank <= axis < rank:
            shape[axis] = -1
            return self.at_input(numbers.reshape(shape))
        return self.at_input(np.full([1], np.median(numbers)))

    def normal(self, mean: Floats, deviation: Floats) -> Normal | None:
        """The input's numbers, if the value has this mean and deviation."""
        with np.errstate(all="ignore"):
            numbers = Normal(
                mean=np.asarray((mean - self.shift) / self.scale),
                deviation=np.asarray(np.abs(deviation / self.scale)),
            )
        usable = np.isfinite(numbers.mean).all() and np.isfinite(numbers.deviation).all()
        return numbers if usable and (numbers.deviation > 0).all() else None


def _seen_in_training(graph: Graph, value: Value) -> Range | None:
    """What the ops behind a float input say of its numbers; None if they say nothing.

    Statistics come before constants, for they were observed, and constants before weights.
    """
    if value.shape is None or value.format is None:
        return None
    ones = np.ones([1] * len(value.shape))
    begun = _Scaled(
        value=value.id, scale=ones, shift=0 * ones, axes=tuple(range(len(value.shape)))
    )
    by_constants: Range | None = None
    by_weights: Range | None = None
    waiting, left = [begun], _MOST_STEPS
    while waiting and left:
        here = waiting.pop(0)
        left -= 1
        for node in _readers(graph, here.value):
            after = _rescaled(graph, node, here)
            if after is not None:
                waiting.append(after)
                continue
            by_statistics, observed = _by_statistics(graph, node, here)
            if by_statistics is not None and observed:
                return by_statistics
            by_constants = by_constants or _by_constants(here)
            by_weights = by_weights or by_statistics
    return by_constants or by_weights


def _rescaled(graph: Graph, node: Node, here: _Scaled) -> _Scaled | None:
    """What ``node`` makes of a value: None if it does more than move, scale and shift it."""
    output_id = node.outputs[0] if node.outputs else None
    if output_id is None or not node.inputs or here.value not in node.inputs:
        return None
    kind = by_name(node.op).kind
    if node.op == "identity" or kind is OpKind.CAST:
        return replace(here, value=output_id) if graph.values[output_id].format else None
    if node.op == "transpose":
        turned = _turned(graph, node, here)
        return None if turned is None else replace(here, value=output_id, axes=turned)
    if node.op in SAME_NUMBERS:
        return replace(here, value=output_id, axes=None)
    if node.op not in ("add", "bias_add", "sub", "mul", "div"):
        return None
    other = _other_operand(graph, node, here.value)
    if other is None:
        return None
    constant, first = here.at_input(other), node.inputs[0] == here.value
    first = first and node.native != "aten::rsub"
    scale, shift = here.scale, here.shift
    if node.op in ("add", "bias_add", "sub"):
        sign = -1.0 if node.op == "sub" and not first else 1.0
        constant = -constant if node.op == "sub" and first else constant
        shifts = here.shifts or bool(constant.any())
        return replace(
            here,
            value=output_id,
            scale=sign * scale,
            shift=sign * shift + constant,
            shifts=shifts,
        )
    if node.op == "div" and not first:
        return None
    with np.errstate(all="ignore"):
        factor = 1 / constant if node.op == "div" else constant
    return replace(
        here, value=output_id, scale=scale * factor, shift=shift * factor, scales=True
    )


def _turned(graph: Graph, node: Node, here: _Scaled) -> tuple[int, ...] | None:
    """The input's axes in the order that they have behind a Transpose; None if unknown."""
    if here.axes is None:
        return None
    order = turned_axes(graph, node, len(here.axes))
    return None if order is None else tuple(here.axes[axis] for axis in order)


def _other_operand(graph: Graph, node: Node, value: int) -> Floats | None:
    """The constant that an elementwise op of two operands has beside ``value``."""
    scalars = node.attributes.get(SCALARS)
    if isinstance(scalars, tuple):
        return np.array([float(s) for s in scalars[:1]])
    others = [k for k, index in enumerate(node.inputs[:2]) if index != value]
    return _constant(graph, node, others[0]) if len(others) == 1 else None


def _constant(graph: Graph, node: Node, port: int) -> Floats | None:
    """What ``node`` reads at ``port``, if that is a constant of numbers, and no large one."""
    value = graph.read(node, port)
    constant = None if value is None else value.constant
    if constant is None or not 0 < constant.size <= _MOST_READ:
        return None
    array = constant.read()
    return array.astype(np.float64) if array.dtype.kind not in "OSU" else None


def _by_constants(here: _Scaled) -> Range | None:
    """The input's numbers if constants bring them to 0 and 1; None if there are none."""
    if here.scales and not here.shifts:
        divisor = 1 / float(np.median(np.abs(here.scale)) or 1)
        return Whole(last=round(divisor)) if _MOST_SCALE <= divisor < 1 << 16 else None
    if not here.shifts:
        return None
    zero, one = np.zeros_like(here.scale), np.ones_like(here.scale)
    if here.scales:
        normal = here.normal(zero, one)
        if normal is None:
            return None
        low, high = normal.mean - normal.deviation, normal.mean + normal.deviation
        evenly = np.abs(low).max() < _NEAR * high.min() and _MOST_SCALE <= high.max() < 1 << 16
        return Whole(last=round(float(high.max()))) if evenly else normal
    if here.shift.max() > -_FAR:
        return None
    return here.normal(zero, np.abs(here.shift) / 2)


def _by_statistics(graph: Graph, node: Node, here: _Scaled) -> tuple[Normal | None, bool]:
    """The input's numbers by the batch normalization that ``node`` is, or that follows it.

    And whether a normalization says so, or the weights of a product alone.
    """
    if node.op == "batch_norm":
        observed = _statistics(graph, node, here.value)
        if observed is None:
            return None, False
        mean, variance = observed
        axis = -1 if node.attributes.get("data_format") in ("NHWC", "NDHWC") else 1
        deviation = np.sqrt(np.maximum(variance, 0))
        return here.normal(here.by_channel(mean, axis), here.by_channel(deviation, axis)), True
    weights = _weights(graph, node, here.value)
    if weights is None:
        return None, False
    bias = _constant(graph, node, 2)
    added = np.zeros(1) if bias is None else bias.reshape(-1)
    statistics, before = _normalized(graph, node)
    if statistics is not None:
        known = _flat(added, statistics[0].size)
        return _before_product(
            node, here, weights, (statistics[0] - known, statistics[1])
        ), True
    # Weights that a norm was folded into give numbers about 0 and 1. Without a norm they do
    # so, too, for inputs about 0 and 1: other inputs alone show that there was one.
    mean = -added - (before if added.size == 1 else _flat(before, added.size))
    guess = _before_product(node, here, weights, (mean, np.ones(mean.size)))
    return (guess if guess is not None and guess.mean.min() > _FAR else None), False


def _weights(graph: Graph, node: Node, value: int) -> Floats | None:
    """The constant weights of a product of ``value``; None if ``node`` is no such product."""
    if node.op not in ("conv", "nhwc_conv", "matmul", "linear", "gemm"):
        return None
    if any(node.attributes.get(name, 1) != 1 for name in ("group", "groups")):
        return None
    weights = _constant(graph, node, 1) if node.inputs[0] == value else None
    return weights if weights is not None and weights.ndim > 1 else None


def _normalized(graph: Graph, product: Node) -> tuple[tuple[Floats, Floats] | None, Floats]:
    """Mean and variance by channel of what ``product`` gives, by a normalization behind it.

    A batch normalization in one multiplication and one addition, as Keras writes it, still
    says what becomes about 0 and 1. Where none of both is there, None; and what is added.
    """
    output_id = product.outputs[0]
    assert output_id is not None
    rank = len(graph.values[output_id].shape or (0, 0))
    ones = np.ones([1] * rank)
    last = _Scaled(value=output_id, scale=ones, shift=0 * ones, axes=tuple(range(rank)))
    waiting, left = [last], _MOST_STEPS
    while waiting and left:
        here = waiting.pop(0)
        left -= 1
        readers = _readers(graph, here.value)
        for node in readers:
            statistics = (
                _statistics(graph, node, here.value) if node.op == "batch_norm" else None
            )
            if statistics is not None:
                return _undone(statistics, here), np.zeros(1)
        after = [_rescaled(graph, node, here) for node in readers]
        waiting.extend(one for one in after if one is not None)
        last = last if any(after) or last.shifts else here
    if last.scales and last.shifts:
        count = max(last.scale.size, last.shift.size)
        return _undone((np.zeros(count), np.ones(count)), last), np.zeros(1)
    return None, last.shift.reshape(-1)


def _undone(statistics: tuple[Floats, Floats], behind: _Scaled) -> tuple[Floats, Floats]:
    """Mean and variance by channel, before what is done between a product and its norm."""
    count = statistics[0].size
    scale, shift = _flat(behind.scale, count), _flat(behind.shift, count)
    with np.errstate(all="ignore"):
        return (statistics[0] - shift) / scale, statistics[1] / scale**2


def _flat(array: Floats, count: int) -> Floats:
    """One number for each of ``count`` channels, or one for all: their median."""
    return array.reshape(-1) if array.size in (1, count) else np.median(array).reshape(1)


def _before_product(
    node: Node, here: _Scaled, weights: Floats, statistics: tuple[Floats, Floats]
) -> Normal | None:
    """The input's numbers by the mean and variance of a product with ``weights``.

    The mean of a product is the sum of its weights times the mean of what it reads, and its
    variance that of what it reads times the sum of the squared weights, if numbers are
    independent. Those of images are not: of the variances that the product's channels say,
    the median is taken.
    """
    by_output = _outputs_first(node, weights, statistics[1].size)
    if by_output is None:
        return None
    means, variances = statistics
    count = by_output.shape[0]
    with np.errstate(all="ignore"):
        squares = np.square(by_output).reshape(count, -1).sum(axis=1)
        variance = float(np.median(variances / squares))
    if not (np.isfinite(means).all() and np.isfinite(variance) and variance > 0):
        return None
    deviation = np.full([1] * here.scale.ndim, np.sqrt(variance))
    axis = -1 if node.native.startswith("tf::") else 1
    if node.op in ("conv", "nhwc_conv") and by_output.shape[axis] <= count:
        others = tuple(k for k in range(1, by_output.ndim) if k != axis % by_output.ndim)
        sums = by_output.sum(axis=others)
        mean = np.linalg.lstsq(sums, np.broadcast_to(means, count))[0]
        return here.normal(here.by_channel(mean, axis), deviation)
    sums = by_output.reshape(count, -1).sum(axis=1)
    mean = np.full([1] * here.scale.ndim, float(sums @ means) / float(sums @ sums or 1))
    return here.normal(mean, deviation)


def _outputs_first(node: Node, weights: Floats, count: int) -> Floats | None:
    """Weights with the axis of the ``count`` output channels first."""
    last = node.op == "matmul" or node.native.startswith("tf::")
    for axis in (-1, 0) if last else (0, -1):
        if weights.shape[axis] == count:
            return np.moveaxis(weights, axis, 0)
    return None


def _statistics(graph: Graph, node: Node, value: int) -> tuple[Floats, Floats] | None:
    """Running mean and variance of what ``node`` normalizes, if that is ``value``."""
    if value not in (node.inputs[0], node.inputs[2]):
        return None
    mean, variance = _constant(graph, node, 3), _constant(graph, node, 4)
    if mean is None or variance is None or mean.size != variance.size:
        return None
    return mean.reshape(-1), variance.reshape(-1)


def _readers(graph: Graph, value: int) -> list[Node]:
    return [graph.nodes[n] for n in dict.fromkeys(graph.values[value].uses)]
