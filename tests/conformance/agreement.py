"""How far a converted model may be from the suite's expected outputs, derived from the format.

Let y be what the suite expects, f the original model in fp32, u the format's unit roundoff.
The low model reads rounded inputs and weights, rounds each op's result, and accumulates n
terms. So, per output tensor and element by element,

    |got - y| <= |f(rounded) - y|  +  c * u * max|y|  +  k * d

1. f(rounded): the original on inputs and weights rounded to the format. It is computed, not
   estimated, and covers what the op itself makes of rounding: ties in ArgMax, steps in Ceil.
2. c = 4 + sqrt(n): each op rounds its operands' product and its result, with room for an
   expansion into a few steps; sums of n terms err like sqrt(n) (Higham & Mary, "A New
   Approach to Probabilistic Rounding Error Analysis", 2019) where the engine does not
   accumulate in fp32. n is the operations per output element that ``flops`` counts, halved.
3. d: the largest change of f in each output when inputs and weights move by at most u at
   random, three draws; k is the number of low ops, each of which does that to the next.

A result beyond the format's largest number may be infinite; an integer that a Cast or a
quantiser makes of a float may be a step more off; other integers, booleans and strings are y
or f(rounded), and NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from finecast.numbers.formats import Format
from finecast.ops.flops import flops
from tests.conformance.conversion import Converted

_DRAWS: Final = 3
_STEPS: Final = 4.0
_TO_INTEGER: Final = frozenset({"Cast", "QuantizeLinear"})


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Per output: what is expected, what the original gives on rounded data, room beside."""

    expected: Sequence[Any]
    rounded: Sequence[Any]
    moved: Sequence[Sequence[Any]]
    steps: float
    low_ops: int
    format: Format
    numbers: frozenset[int] = frozenset()
    """Integer outputs that a Cast made of a float: a step more or less is a rounding error."""

    def disagreement(self, got: Sequence[Any]) -> str:
        """What is wrong with ``got``; nothing if all outputs are within the bound."""
        if len(got) != len(self.expected):
            return f"{len(got)} outputs instead of {len(self.expected)}"
        for index, value in enumerate(got):
            moved = [m[index] for m in self.moved]
            want, rounded = self.expected[index], self.rounded[index]
            found = self._compare(
                value, want, rounded, moved, step=float(index in self.numbers)
            )
            if found:
                return f"output {index}: {found}"
        return ""

    def _compare(
        self, got: Any, want: Any, rounded: Any, moved: Sequence[Any], *, step: float
    ) -> str:
        if want is None or got is None:
            return "" if want is got else "an optional that is missing"
        if isinstance(want, list):
            if not isinstance(got, list) or len(got) != len(want):
                return "a sequence of another length"
            parts = (
                self._compare(g, w, r, [m[i] for m in moved], step=step)
                for i, (g, w, r) in enumerate(zip(got, want, rounded, strict=True))
            )
            return next((p for p in parts if p), "")
        g, w, r = (np.asarray(a) for a in (got, want, rounded))
        return self._compare_arrays(g, w, r, moved, step=step)

    def _compare_arrays(
        self,
        got: NDArray[Any],
        want: NDArray[Any],
        rounded: NDArray[Any],
        moved: Sequence[Any],
        *,
        step: float,
    ) -> str:
        if got.shape != want.shape and got.size != want.size:
            shapes = {np.shape(rounded), *(np.shape(m) for m in moved)}
            return "" if got.shape in shapes else f"shape {got.shape} instead of {want.shape}"
        got = got.reshape(want.shape)
        # A value such as NonZero's changes shape with its input: nothing to compare it with.
        rounded = rounded.reshape(want.shape) if rounded.size == want.size else want
        moved = [np.reshape(m, want.shape) for m in moved if np.size(m) == want.size]
        if not _is_float(want) and not (step and want.dtype.kind in "iu"):
            same = (got == want) | (got == rounded)
            for other in moved:
                same |= got == other
            return "" if np.all(same) else f"{np.sum(~same)} of {same.size} elements differ"
        g, w, r = (np.asarray(a, np.float64) for a in (got, want, rounded))
        return self._compare_floats(g, w, r, moved, step=0.0 if _is_float(want) else step)

    def _compare_floats(
        self,
        got: NDArray[Any],
        want: NDArray[Any],
        rounded: NDArray[Any],
        moved: Sequence[Any],
        *,
        step: float,
    ) -> str:
        if not want.size:
            return ""
        u = self.format.unit_roundoff
        finite = np.isfinite(want) & np.isfinite(rounded)
        scale = float(np.max(np.abs(want[finite]), initial=0.0))
        with np.errstate(invalid="ignore", over="ignore"):
            own = np.abs(rounded - want)
            draws = [np.abs(np.asarray(m, np.float64) - want) for m in moved]
            # Any element of a tensor may get the error that the worst of it got.
            spread = max(
                (float(np.max(d[np.isfinite(d)], initial=0.0)) for d in draws), default=0
            )
            bound = own + self.steps * u * scale + self.low_ops * spread
            bound += self.format.smallest_subnormal + step
            error = np.abs(got - want)
            wrong = ~(error <= bound)
        same = (
            (got == want)
            | (got == rounded)
            | (np.isnan(got) & (np.isnan(want) | np.isnan(rounded)))
        )
        over = (
            np.isinf(got)
            & (np.abs(want) + bound >= self.format.max)
            & (np.sign(got) == np.sign(want))
        )
        wrong &= ~(same | over)
        if not wrong.any():
            return ""
        at = np.unravel_index(
            np.argmax(np.where(wrong, np.nan_to_num(error / bound, nan=np.inf), 0)), want.shape
        )
        return f"{got[at]:.6g} instead of {want[at]:.6g}, bound {bound[at]:.3g}"


def depth(converted: Converted) -> float:
    """The largest number of terms that a low op sums into one element."""
    graph, most = converted.graph, 1.0
    for node in graph.nodes:
        fmt = converted.formats.get(node.id)
        if fmt is None or fmt is Format.FP32:
            continue
        work = flops(graph, node)
        sizes = [_size(graph.values[i].shape) for i in node.outputs if i is not None]
        known = [s for s in sizes if s]
        if work and known:
            most = max(most, work / max(known) / 2)
    return most


def steps_of(converted: Converted) -> float:
    """The factor c of the bound."""
    return _STEPS + math.sqrt(depth(converted))


def read_low(converted: Converted) -> frozenset[str]:
    """Names of the values that a low op reads in its own format."""
    graph = converted.graph
    return frozenset(
        v.name
        for n in graph.nodes
        if converted.formats.get(n.id, Format.FP32) is not Format.FP32
        for v in graph.following_inputs(n)
    )


def whole_numbers(model: onnx.ModelProto) -> frozenset[int]:
    """Outputs that a Cast makes, by position."""
    made = {o: n.op_type for n in model.graph.node for o in n.output}
    return frozenset(
        i for i, o in enumerate(model.graph.output) if made.get(o.name) in _TO_INTEGER
    )


def changed_model(
    model: onnx.ModelProto, change: Any, names: frozenset[str]
) -> onnx.ModelProto:
    """A copy with ``change`` done to the fp32 constants called ``names``."""
    return _mapped(model, change, names)


def move(
    array: NDArray[np.float32], fmt: Format, rng: np.random.Generator
) -> NDArray[np.float32]:
    """``array * (1 + e)`` with |e| <= u."""
    with np.errstate(over="ignore", invalid="ignore"):
        noise = rng.uniform(-fmt.unit_roundoff, fmt.unit_roundoff, array.shape)
        return (array * (1 + noise)).astype(np.float32)


def changed_feeds(
    feeds: Mapping[str, Any], change: Any, names: frozenset[str]
) -> dict[str, Any]:
    """Feeds with ``change`` done to the fp32 arrays called ``names``, in sequences too."""
    return {n: _change(v, change) if n in names else v for n, v in feeds.items()}


def draws(fmt: Format) -> Iterator[np.random.Generator]:
    """One generator for each draw; always the same."""
    for seed in range(_DRAWS):
        yield np.random.default_rng((seed, fmt.mantissa_bits))


def _change(value: Any, change: Any) -> Any:
    if isinstance(value, list):
        return [_change(v, change) for v in value]
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return np.asarray(change(value), np.float32).reshape(value.shape)
    return value


def _mapped(model: onnx.ModelProto, change: Any, names: frozenset[str]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for graph in _graphs(copy.graph):
        for tensor in graph.initializer:
            if tensor.name in names:
                _map_tensor(tensor, change)
        for node in graph.node:
            if node.op_type == "Constant" and node.output[0] in names:
                for attribute in node.attribute:
                    if attribute.HasField("t"):
                        _map_tensor(attribute.t, change)
    return copy


def _map_tensor(tensor: onnx.TensorProto, change: Any) -> None:
    if tensor.data_type == onnx.TensorProto.FLOAT:
        array = numpy_helper.to_array(tensor)
        new = np.asarray(change(array), np.float32).reshape(array.shape)
        tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)
            for body in attribute.graphs:
                yield from _graphs(body)


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float16")


def _size(shape: tuple[int | str | None, ...] | None) -> int:
    if shape is None or not all(isinstance(d, int) for d in shape):
        return 0
    return math.prod(d for d in shape if isinstance(d, int))
