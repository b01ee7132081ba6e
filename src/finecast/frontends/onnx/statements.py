"""The ONNX nodes that round a value to an encoding: a row for each format.

Some nodes convert from fp32 into the encoding, others back to fp32. A constant is stored in
the encoding, and needs only those back. Encodings with scale and zero point are stated by
QuantizeLinear and DequantizeLinear, tf32, which is no type of ONNX, by arithmetic in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import onnx_ir as ir

from finecast.frontends.exact_casts import BACK, FACTOR, FAULT
from finecast.frontends.onnx.constants import DATA_TYPES, constant_tensor
from finecast.frontends.onnx.definitions import CLIP_BOUNDS_ARE_INPUTS, signature
from finecast.frontends.onnx.editor import FAULT_NOTE, MARK, ROUNDING, Editor
from finecast.frontends.onnx.roundops import RoundOps
from finecast.numbers.encodings import Encoding, Scaled
from finecast.numbers.formats import CODED, Format
from finecast.numbers.roundmodes import Rounder

# The first opsets whose QuantizeLinear takes scales by channel, and by group.
_CHANNELS_SINCE: Final = 13
_GROUPS_SINCE: Final = 21


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

    def rounded(self, value: ir.Value, to: Format, *, blocks: bool) -> ir.Value:
        """``value`` rounded to bf16, in fp32, by nodes that OpenVINO fuses into one kernel.

        ``exact_casts`` says why, and has the factors. A value that OpenVINO stores in
        ``blocks`` of channels is not reshaped.
        """
        ops = self.rounding
        factor, back = (ops.scalar(x) for x in (FACTOR, BACK))
        before = len(self.editor.made)

        def step(kind: str, one: ir.Value, other: ir.Value, label: str) -> ir.Value:
            dtype = ir.DataType.FLOAT
            out = self.node(kind, [one, other], label=label, dtype=dtype, named=value.name)
            out.shape = value.shape if label in ("scaled", "rounded") else None
            return out

        scaled = step("Mul", value, factor, "scaled")
        if blocks:
            rounded = step("Mul", step("Add", scaled, value, "part"), back, "rounded")
        else:
            axis = ops.constant(np.array([0], dtype=np.int64))
            again = step("Unsqueeze", value, axis, "again")
            whole = step("Mul", step("Add", scaled, again, "part"), back, "whole")
            rounded = step("Squeeze", whole, axis, "rounded")
        for node in self.editor.made[before:]:
            node.metadata_props[ROUNDING] = f"{to.label} {rounded.name}"
            node.metadata_props[FAULT_NOTE] = FAULT
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
        read: The encoding that the nodes back from a constant state: a later conversion
            decodes the constant by it. Raises ValueError if they state none. None for formats
            that are stored in float types.
        by_casts: Whether the nodes are casts between floats, which a later conversion finds as
            such; other nodes are marked, and taken out together.
    """

    into: Conversion
    back: Conversion
    since: int | None = None
    read: Callable[[Sequence[ir.Node]], Scaled] | None = None
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
    """The fp32 numbers of codes; its node shares the constants of ``quantize``'s."""
    assert isinstance(to, Scaled)
    before = value.producer()
    shared = before is not None and before.op_type == "QuantizeLinear"
    given = before.inputs[1:] if before is not None and shared else ()
    parameters = [v for v in given if v is not None] or _parameters(maker, value, to)
    return maker.node(
        "DequantizeLinear",
        [value, *parameters],
        _attributes(to),
        label=Format.FP32.label,
        dtype=ir.DataType.FLOAT,
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
    scales = constant(f"{value.name}_scale", scale)
    if not (to.zero_point or to.format.encodes_values):
        return [scales]  # OpenVINO's kernels round no value that meets a zero point, even of 0
    zero = np.full_like(scale, to.zero_point, to.dtype)
    return [scales, constant(f"{value.name}_zero", zero)]


def reader(fmt: Format) -> Callable[[Sequence[ir.Node]], Scaled]:
    """A function that reads the encoding in ``fmt`` off the node that ``dequantize`` made."""

    def read(nodes: Sequence[ir.Node]) -> Scaled:
        scale, *zeros = (constant_tensor(v) for v in nodes[0].inputs[1:] if v is not None)
        if scale is None or None in zeros:
            raise ValueError("the scale or zero point is not a constant")
        stated = nodes[0].attributes
        moved = int(zeros[0].numpy().reshape(-1)[0]) if zeros and zeros[0] is not None else 0
        return Scaled(
            format=fmt,
            grid=fmt.grid(constant=True).moved(moved),
            scale=tuple(scale.numpy().reshape(-1).tolist()),
            zero_point=moved,
            axis=stated.get_int("axis"),
            group=stated.get_int("block_size"),
        )

    return read


def by_codes(fmt: Format) -> Statement:
    """The statement of a format with scales."""
    since = _GROUPS_SINCE if fmt.group_sizes else _CHANNELS_SINCE
    return Statement(into=quantize, back=dequantize, since=since, read=reader(fmt))


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
    found = signature("Cast", "", opset)
    return found.since.get(fmt, opset) if found else opset


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
