"""The ONNX nodes that round a value to an encoding: a row for each format.

Some nodes convert from fp32 into the encoding, others back to fp32. A constant is stored in
the encoding, and needs only those back. Encodings with scale and zero point are stated by
QuantizeLinear and DequantizeLinear, tf32, which is no type of ONNX, by arithmetic in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.frontends.exact_casts import StoredAs, rounded_by
from finecast.frontends.native_model import dynamic
from finecast.frontends.onnx import blocks
from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.frontends.onnx.definitions import CLIP_BOUNDS_ARE_INPUTS, signature
from finecast.frontends.onnx.editor import MARK, ROUNDING, Editor
from finecast.numbers.encodings import Dynamic, Encoding, Scaled
from finecast.numbers.formats import BLOCKS, CODED, Format
from finecast.numbers.roundmodes import Rounder, Rounding, draws

# The first opsets whose QuantizeLinear takes scales by channel, and by group.
_CHANNELS_SINCE: Final = 13
_GROUPS_SINCE: Final = 21
# That of DequantizeLinear with scales, and results, of 16 bits.
_LOW_SINCE: Final = 19

KINDS: Final[Mapping[str, str]] = {
    "abs": "Abs",
    "add": "Add",
    "clamp": "Clip",
    "divide": "Div",
    "greater": "Greater",
    "is_inf": "IsInf",
    "maximum": "Max",
    "multiply": "Mul",
    "power": "Pow",
    "reduce_mean": "ReduceMean",
    "reduce_sum": "ReduceSum",
    "reshape": "Reshape",
    "round": "Round",
    "select": "Where",
    "shape_of": "Shape",
    "squeeze": "Squeeze",
    "subtract": "Sub",
    "unsqueeze": "Unsqueeze",
}
"""ONNX's names of the ops that are inserted, by those of OpenVINO's operation sets."""


class Maker:
    """Makes the nodes that edits insert: each with a unique name, and marked as finecast's."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.fresh = editor.fresh
        self.rounding = RoundOps(register=self._register)

    def node(
        self,
        kind: str,
        inputs: Sequence[ir.Value],
        attributes: Mapping[str, Any] | None = None,
        *,
        label: str,
        dtype: ir.DataType,
        named: str | None = None,
    ) -> ir.Value:
        """The result, of the shape of the first of ``inputs`` and type ``dtype``, of a node.

        Names of the node and its result are made of the name of that input, or of ``named``,
        and ``label``.
        """
        name = self.fresh(f"{named or inputs[0].name}_{label}")
        node, shape = self.fresh(f"{kind.lower()}_{name}"), inputs[0].shape
        out = self.editor.op(
            kind, inputs, attributes, name=name, node=node, dtype=dtype, shape=shape
        )
        self.editor.made[-1].metadata_props[MARK] = ""
        return out

    def cast(self, value: ir.Value, to: Format, named: str | None = None) -> ir.Value:
        """``value`` cast to a float type; ``named`` is as for ``node``."""
        dtype = DATA_TYPES[to]
        attributes = {"to": int(dtype)}
        return self.node("Cast", [value], attributes, label=to.label, dtype=dtype, named=named)

    def arithmetic(self, value: ir.Value, to: Format) -> ir.Value:
        """``value`` rounded to nearest even by nodes that compute in fp32.

        Up to 2^104 they give what ``rounding.round_to`` gives, but for subnormals; larger
        numbers, Inf and NaN pass as they are.
        """
        name = self.fresh(f"{value.name}_{to.label}")
        nodes, out = self.rounding.round(value, Rounder(format=to), name)
        for node in nodes:
            step = node.outputs[0]
            step.name = name if step is out else self.fresh(step.name or name)
            node.name = self.fresh(f"round_{step.name}")
            node.metadata_props[MARK] = ""
        self.editor.made += nodes
        return out

    def rounded(self, value: ir.Value, to: Format, stored: StoredAs) -> ir.Value:
        """``value`` rounded to bf16, in fp32; ``exact_casts`` explains how."""
        ops = self.rounding
        before = len(self.editor.made)

        def step(
            kind: str, label: str, one: ir.Value, other: ir.Value | float | list[int]
        ) -> ir.Value:
            if not isinstance(other, ir.Value):
                dtype = np.float32 if isinstance(other, float) else np.int64
                other = ops.constant(np.array(other, dtype))
            out = self.node(
                KINDS[kind],
                [one, other],
                label=label,
                dtype=ir.DataType.FLOAT,
                named=value.name,
            )
            out.shape = value.shape if label in ("copy", "rounded") else None
            return out

        rounded: ir.Value = rounded_by(step, value, stored)
        for node in self.editor.made[before:]:
            node.metadata_props[ROUNDING] = f"{to.label} {rounded.name}"
        return rounded

    def _register(self, value: ir.Value) -> None:
        # The emulator registers constants under the names that RoundOps gives, without suffix.
        value.name = self.fresh(f"{value.name}_rounding")
        self.editor.register(value)


# A function that makes the nodes of a conversion, and returns the converted value.
Conversion: TypeAlias = Callable[[Maker, ir.Value, Encoding], ir.Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """How values are converted into an encoding and back.

    Attributes:
        into: Converts from fp32 to the type that stores the encoding.
        back: Converts from the type that stores the encoding to fp32.
        since: The first opset that has the nodes for it; None if Cast's definition tells.
        by_casts: Whether the nodes are casts between floats; other nodes are marked.
    """

    into: Conversion
    back: Conversion
    since: int | None = None
    by_casts: bool = False


def quantize(maker: Maker, value: ir.Value, to: Encoding) -> ir.Value:
    """The codes of the fp32 numbers of ``value``."""
    assert isinstance(to, Scaled)
    return maker.node(
        "QuantizeLinear",
        [value, *_parameters(maker, value, to)],
        _attributes(to),
        label=to.label,
        dtype=ir.DataType.from_numpy(to.dtype),
    )


def dequantize(maker: Maker, value: ir.Value, to: Encoding) -> ir.Value:
    """The numbers of codes, in fp32 or the format that codes are decoded to.

    The node shares the constants of ``quantize``'s.
    """
    assert isinstance(to, Scaled)
    before = value.producer()
    shared = before is not None and before.op_type == "QuantizeLinear"
    constants = before.inputs[1:] if before is not None and shared else ()
    parameters = [v for v in constants if v is not None] or _parameters(maker, value, to)
    return maker.node(
        "DequantizeLinear",
        [value, *parameters],
        _attributes(to),
        label=to.format.result.label,
        dtype=DATA_TYPES[to.format.result],
    )


def _attributes(to: Scaled) -> dict[str, int]:
    stated = {"axis": to.axis, "block_size": to.group}
    return {name: number for name, number in stated.items() if number is not None}


def _parameters(maker: Maker, value: ir.Value, to: Scaled) -> list[ir.Value]:
    if to.group is not None:
        shape = tuple(d for d in value.shape or () if isinstance(d, int))
        scale = to.spread(shape).squeeze((to.axis or 0) + 1)
    else:
        scale = np.array(to.scale if to.axis is not None else to.scale[0], np.float32)
    constant = maker.editor.constant
    scales = constant(f"{value.name}_scale", to.format.result.encode(scale))
    if not (to.zero_point or to.format.runs_on_codes):
        return [scales]  # OpenVINO's kernels round no value that meets a zero point, even of 0
    zero = np.full_like(scale, to.zero_point, to.dtype)
    return [scales, constant(f"{value.name}_zero", zero)]


def by_codes(fmt: Format) -> Statement:
    """The statement of a format with scales."""
    channels = _LOW_SINCE if fmt.encodes_results else _CHANNELS_SINCE
    since = _GROUPS_SINCE if fmt.group_sizes else channels
    return Statement(into=quantize, back=dequantize, since=since)


def by_blocks(fmt: Format) -> Statement:
    """The statement of a format of blocks: of constants alone."""
    assert fmt.blocks is not None
    return Statement(into=quantize, back=blocks.read_from, since=blocks.since(fmt.blocks))


_CASTS: Final = Statement(
    into=lambda maker, value, to: maker.cast(value, to.format),
    back=lambda maker, value, to: maker.cast(value, Format.FP32),
    by_casts=True,
)

STATEMENTS: Final[Mapping[Format, Statement]] = {
    Format.BF16: _CASTS,
    Format.FP16: _CASTS,
    Format.FP8_E4M3: _CASTS,
    Format.FP8_E5M2: _CASTS,
    # No type of ONNX: its numbers are stored in fp32. The arithmetic begins with a Clip.
    Format.TF32: Statement(
        into=lambda maker, value, to: maker.arithmetic(value, to.format),
        back=lambda maker, value, to: value,
        since=CLIP_BOUNDS_ARE_INPUTS,
    ),
    **{fmt: by_codes(fmt) for fmt in CODED},
    # Elements of 6 bits are no type of ONNX before opset 28, and scales in e8m0 do not reach
    # as far down as those of integers times 2^-6.
    **{f: by_blocks(f) for f in BLOCKS if f.bits != 6 and f is not Format.MXINT8},
}


def rounding(maker: Maker, value: ir.Value, to: Encoding) -> ir.Value:
    """``value`` rounded to ``to``, in fp32."""
    row = STATEMENTS[to.format]
    return row.back(maker, row.into(maker, value, to), to)


def stated_since(fmt: Format, opset: int) -> int:
    """The first opset, from ``opset`` up, at which values can be rounded to ``fmt``."""
    row = STATEMENTS.get(fmt)
    if row is not None and row.since is not None:
        return max(opset, row.since)
    cast_signature = signature("Cast", "", opset)
    return cast_signature.since.get(fmt, opset) if cast_signature else opset


# A small model that measures what a cast takes.


def cast_model(low: Format, size: int) -> bytes:
    """A serialized model with a cast to ``low`` between Softmaxes, which it is not fused into.

    The input ``x`` is fp32 of shape [size / 64, 64], the output is ``y``. For a format with a
    scale the cast is a node to codes and one back.
    """
    shape = ir.Shape([size // 64, 64])
    x = ir.val("x", ir.DataType.FLOAT, shape)
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 17}, name="cast")
    editor = Editor(ir.Model(graph, ir_version=10))
    maker = Maker(editor)
    value = editor.op("Softmax", [x], {"axis": 0}, name="a", node="before", shape=shape)
    if low.has_scales:
        value = rounding(maker, value, Scaled.of_value(low, 0.0, 1.0))
    else:
        value = maker.cast(value, low)
    editor.made[1].name = "cast"
    graph.outputs.append(
        editor.op(
            "Softmax",
            [value],
            {"axis": 0},
            name="y",
            node="after",
            dtype=value.dtype,
            shape=shape,
        )
    )
    graph.extend(editor.take())
    return ir.to_proto(editor.model).SerializeToString()


# ------------------------------------------------------------ nodes that round a value in fp32
#
# Laws: numbers in the format's normal range become what ``roundmodes.convert`` gives, bit for
# bit. Exceptions are fp32's subnormals, and stochastic rounding, whose draws come from another
# table. Arithmetic leaves numbers beyond 2^104 unrounded in formats with fp32's range.
# Sources: T. J. Dekker, "A floating-point technique for extending the available precision"
# (1971), for splitting; adding and subtracting 1.5 * 2^23 units rounds to a whole unit.

# Length of the table of draws: a prime, so that it has no common factor with the size of a
# sample, and samples do not draw the same numbers after a few.
_TABLE: Final = 1_048_573
# Largest magnitude that is split: its product with 2^23 + 1 stays below 2^128. The largest
# fp32 numbers are multiples of it, so subtracting it and adding it back is exact for them.
_SPLIT_LIMIT: Final = 2.0**104
_FRACTION: Final = Format.FP32.mantissa_bits


def _no_stream() -> ir.Value:
    raise ValueError("stochastic rounding needs the index of the batch in the stream")


@dataclass(slots=True)
class RoundOps:
    """Makes nodes that round.

    Attributes:
        register: Takes each constant that the nodes read, once.
        offset: Gives a scalar int64 value, the index of the batch's first sample among all
            samples of the run. Only stochastic rounding calls it.
        constants: The constants made so far.
        made: The nodes of the rounding being made.
        label: Prefix of the names of its nodes' results.
        count: How many names it has used.
    """

    register: Callable[[ir.Value], None]
    offset: Callable[[], ir.Value] = _no_stream
    constants: dict[str, ir.Value] = field(default_factory=dict[str, ir.Value])
    made: list[ir.Node] = field(default_factory=list[ir.Node])
    label: str = ""
    count: int = 0

    def round(
        self, value: ir.Value, how: Rounder, label: str
    ) -> tuple[list[ir.Node], ir.Value]:
        """Nodes, in order, and the value that the last one gives: ``value`` rounded."""
        self.made, self.label, self.count = [], label, 0
        if isinstance(how.encoding, Dynamic):
            out = dynamic(self._named, value, how.encoding)
            out.shape = value.shape
            return self.made, out
        if isinstance(how.encoding, Scaled):
            return self.made, self._by_codes(value, how.encoding)
        if how.format is Format.FP32:  # only subnormals change, as in an engine's own sums
            return self.made, self._flushed(value, how.format)
        to_nearest = how.rounding is Rounding.NEAREST_EVEN
        if to_nearest and how.format in _CAST_OPS:
            out = self._by_cast(value, how)
        elif to_nearest and how.format is Format.TF32:
            out = self._by_split(value, how)
        else:
            out = self._by_grid(value, how)
        if how.flush_subnormals:
            out = self._flushed(out, how.format)
        return self.made, out

    def constant(self, array: NDArray[np.generic]) -> ir.Value:
        """An initializer; equal scalars and short lists are shared.

        Of larger arrays there is one of each type: the table of draws.
        """
        short = array.size < _SHORT
        numbers = "_".join(map(str, array.reshape(-1).tolist())) if short else "table"
        key = f"{'list_' if array.ndim else ''}{array.dtype}_{numbers}"
        if key not in self.constants:
            name = f"finecast_{key}".replace("-", "m").replace("+", "").replace(".", "_")
            tensor = ir.tensor(array, name=name)
            self.constants[key] = value = ir.val(name, const_value=tensor)
            self.register(value)
        return self.constants[key]

    def scalar(self, x: float) -> ir.Value:
        """An fp32 constant."""
        return self.constant(np.array(x, dtype=np.float32))

    def op(
        self,
        kind: str,
        *inputs: ir.Value,
        dtype: ir.DataType | None = None,
        **attributes: int | list[int],
    ) -> ir.Value:
        """Append one node; returns its result, by default of the type that its kind gives."""
        dtype = dtype or _RESULTS.get(kind, ir.DataType.FLOAT)
        other_shape = dtype is _INT or kind in ("Gather", "Reshape", "GlobalMaxPool")
        shape = None if other_shape else inputs[0].shape
        out = ir.val(f"{self.label}_{self.count}", dtype, shape)
        self.count += 1
        self.made.append(ir.node(kind, list(inputs), attributes, outputs=[out]))
        return out

    def _by_codes(self, value: ir.Value, encoding: Scaled) -> ir.Value:
        """By QuantizeLinear and DequantizeLinear, with one scale for the whole tensor."""
        scale = self.scalar(encoding.scale[0])
        zero = self.constant(np.array(encoding.zero_point, dtype=encoding.dtype))
        dtype = ir.DataType.from_numpy(encoding.dtype)
        codes = self.op("QuantizeLinear", value, scale, zero, dtype=dtype)
        return self.op("DequantizeLinear", codes, scale, zero)

    def _named(self, kind: str, *inputs: Any, **attributes: Any) -> ir.Value:
        """An op by its name in OpenVINO's operation sets, as ``NativeModel.op`` makes it.

        ReduceMax takes its axes as an attribute or as an input, by the operation set: a
        pooling stands for it where it has one, which is the last of three.
        """
        if kind == "reduce_max":
            x, axes = inputs
            if len(axes) > 1:
                return self.op("ReduceMax", x, keepdims=1)
            return self.op("GlobalMaxPool", x)
        bounds = [attributes[n] for n in ("min_value", "max_value") if n in attributes]
        values = [
            x
            if isinstance(x, ir.Value)
            else self.constant(np.array(x, np.int64 if isinstance(x, list) else np.float32))
            for x in (*inputs, *bounds)
        ]
        return self.op(KINDS[kind], *values)

    def _by_cast(self, value: ir.Value, how: Rounder) -> ir.Value:
        if how.saturate:
            value = self._clipped(value, how.format.max)
        dtype = DATA_TYPES[how.format]
        low = self.op("Cast", value, dtype=dtype, to=int(dtype))
        return self.op("Cast", low, to=int(ir.DataType.FLOAT))

    def _by_split(self, value: ir.Value, how: Rounder) -> ir.Value:
        """Round to nearest even by Dekker's splitting; numbers that it overflows on pass."""
        drop = _FRACTION - how.format.mantissa_bits
        near = self._clipped(value, _SPLIT_LIMIT)
        product = self.op("Mul", near, self.scalar(2.0**drop + 1))
        rounded = self.op("Sub", product, self.op("Sub", product, near))
        # What was clipped away comes back unrounded; within the limit that adds nothing.
        # Subtracting the difference, not adding its opposite, keeps the sign of zeros.
        out = self.op("Sub", rounded, self.op("Sub", near, value))
        return self._clipped(out, how.format.max) if how.saturate else out

    def _by_grid(self, value: ir.Value, how: Rounder) -> ir.Value:
        """Round the magnitude by adding and subtracting 1.5 * 2^23 quanta of its binade.

        ``power`` is the power of two nearest to the magnitude, and ``binade`` the one not
        above it. A quantum is the distance between the format's numbers there. Modes other
        than to nearest correct the nearest number by a quantum.
        """
        fmt = how.format
        magnitude = self.op("Abs", value)
        top = min(fmt.max, _SPLIT_LIMIT)
        inside = self.op("Clip", magnitude, self.scalar(fmt.smallest_normal), self.scalar(top))
        product = self.op("Mul", inside, self.scalar(2.0**_FRACTION + 1))
        power = self.op("Sub", product, self.op("Sub", product, inside))
        above = self.op("Greater", power, inside)
        binade = self.op("Where", above, self.op("Mul", power, self.scalar(0.5)), power)
        magic = self.op(
            "Mul", binade, self.scalar(1.5 * 2.0 ** (_FRACTION - fmt.mantissa_bits))
        )
        wanted = magnitude
        quantum = self.op("Mul", binade, self.scalar(fmt.epsilon))
        if how.rounding is Rounding.STOCHASTIC:
            step = self.op("Mul", self._draws(value, how.seed), quantum)
            wanted = self.op("Add", magnitude, step)
        rounded = self.op("Sub", self.op("Add", wanted, magic), magic)
        if how.rounding is Rounding.UP_FROM_ODD:
            rounded = self._up_from_odd(rounded, magnitude, magic, quantum)
        elif how.rounding is not Rounding.NEAREST_EVEN:
            over = self.op("Greater", rounded, wanted)
            lower = self.op("Sub", rounded, quantum)
            rounded = self.op("Where", over, lower, rounded)
        rounded = self._limited(rounded, magnitude, how)
        # Sign(x) * y would lose the sign of zeros.
        negative = self.op("Less", value, self.scalar(0.0))
        return self.op("Where", negative, self.op("Neg", rounded), rounded)

    def _up_from_odd(
        self, nearest: ir.Value, magnitude: ir.Value, magic: ir.Value, quantum: ir.Value
    ) -> ir.Value:
        """Take back a step where rounding went up, from an even number to an odd one."""
        double = self.op("Mul", magic, self.scalar(2.0))
        even = self.op("Sub", self.op("Add", nearest, double), double)
        is_even = self.op("Equal", even, nearest)
        stays = self.op("LessOrEqual", nearest, magnitude)
        keeps = self.op("Or", is_even, stays)
        return self.op("Where", keeps, nearest, self.op("Sub", nearest, quantum))

    def _limited(self, rounded: ir.Value, magnitude: ir.Value, how: Rounder) -> ir.Value:
        fmt = how.format
        if fmt.max > _SPLIT_LIMIT:
            large = self.op("Greater", magnitude, self.scalar(_SPLIT_LIMIT))
            rounded = self.op("Where", large, magnitude, rounded)
        beyond = self.op("Greater", rounded, self.scalar(fmt.max))
        stays = how.saturate or how.rounding is Rounding.TOWARD_ZERO
        infinity = np.nan if fmt.finite_only else np.inf
        limit = self.scalar(fmt.max if stays else infinity)
        out = self.op("Where", beyond, limit, rounded)
        if how.saturate or how.rounding is not Rounding.TOWARD_ZERO:
            return out
        endless = self.op("IsInf", magnitude)
        return self.op("Where", endless, self.scalar(infinity), out)

    def _flushed(self, value: ir.Value, fmt: Format) -> ir.Value:
        small = self.op("Less", self.op("Abs", value), self.scalar(fmt.smallest_normal))
        return self.op("Where", small, self.op("Mul", value, self.scalar(0.0)), value)

    def _clipped(self, value: ir.Value, limit: float) -> ir.Value:
        return self.op("Clip", value, self.scalar(-limit), self.scalar(limit))

    def _draws(self, value: ir.Value, seed: int) -> ir.Value:
        """A draw from a table for each element, by its index among those of the whole run.

        Indices count on from batch to batch along the first axis, so an element's draw does
        not depend on how samples are split into batches. They wrap around at the table's end.
        """
        table = self.constant(
            (np.floor(draws(_TABLE, seed=seed) * 4096) / 4096).astype(np.float32)
        )
        shape = self.op("Shape", value, dtype=_INT)
        size = self.op("ReduceProd", shape, dtype=_INT, keepdims=0)
        one, ones = (self.constant(np.array(n, dtype=np.int64)) for n in (1, [1]))
        first = self.op(
            "Gather",
            self.op("Concat", shape, ones, dtype=_INT, axis=0),
            self.constant(np.array(0, dtype=np.int64)),
            dtype=_INT,
        )
        rows = self.op("Max", first, one, dtype=_INT)
        each = self.op("Div", size, rows, dtype=_INT)
        start = self.op("Mul", self.offset(), each, dtype=_INT)
        salt = self.constant(np.array(_salt(self.label), dtype=np.int64))
        start = self.op("Add", start, salt, dtype=_INT)
        zero = self.constant(np.array(0, dtype=np.int64))
        index = self.op("Range", zero, size, one, dtype=_INT)
        prime = self.constant(np.array(_TABLE, dtype=np.int64))
        index = self.op("Mod", self.op("Add", index, start, dtype=_INT), prime, dtype=_INT)
        return self.op("Reshape", self.op("Gather", table, index), shape)


_INT: Final = ir.DataType.INT64
_RESULTS: Final = {
    **dict.fromkeys(
        ("Equal", "Greater", "IsInf", "Less", "LessOrEqual", "Or"), ir.DataType.BOOL
    ),
    "Shape": _INT,
}
"""Types of results other than fp32, by the kind of op."""
_SHORT: Final = 8
"""A list of fewer numbers is called by these."""
# Formats whose casts ONNX Runtime computes right in every case. Its casts to fp8 are not:
# without saturation they give 448 for 464 < x < 496 in e4m3, and NaN for Inf in e5m2.
_CAST_OPS: Final = frozenset({Format.BF16, Format.FP16})


def _salt(label: str) -> int:
    """Where a rounding starts in the table: a hash of its label, the same in every process."""
    total = 0
    for character in label.encode():
        total = (total * 257 + character) % _TABLE
    return total
