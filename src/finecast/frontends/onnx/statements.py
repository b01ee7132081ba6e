"""The ONNX nodes that round a value to an encoding: a row for each format.

Some nodes convert from fp32 into the encoding, others back to fp32. A constant is stored in
the encoding, and needs only those back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import onnx_ir as ir

from finecast.frontends.exact_casts import BACK, FACTOR
from finecast.frontends.onnx.arithmetic import Arithmetic
from finecast.frontends.onnx.constants import DATA_TYPES, MARK, ROUNDING
from finecast.frontends.onnx.definitions import CLIP_BOUNDS_ARE_INPUTS
from finecast.frontends.onnx.quantization import dequantize, quantize, reader, since
from finecast.frontends.onnx.schema import signature
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled


class Maker:
    """Makes the nodes that edits insert: each with a unique name, and marked as finecast's.

    ``fresh`` makes a name unique; ``register`` takes new initializers of the main graph.
    """

    def __init__(
        self, fresh: Callable[[str], str], register: Callable[[ir.Value], None]
    ) -> None:
        self.fresh = fresh
        self.register = register
        self.arithmetic = Arithmetic(fresh, register)

    def node(
        self,
        kind: str,
        inputs: list[ir.Value],
        attributes: dict[str, int],
        *,
        label: str,
        dtype: ir.DataType,
        named: str | None = None,
    ) -> ir.Node:
        """A node whose result has the shape of the first of ``inputs``, and type ``dtype``.

        Names of the node and its result are made of the name of that input, or of ``named``,
        and ``label``.
        """
        name = self.fresh(f"{named or inputs[0].name}_{label}")
        result = ir.Value(name=name, shape=inputs[0].shape, type=ir.TensorType(dtype))
        node = ir.node(
            kind,
            inputs,
            attributes,
            name=self.fresh(f"{kind.lower()}_{name}"),
            outputs=[result],
        )
        node.metadata_props[MARK] = ""
        return node

    def cast(self, value: ir.Value, to: Format, named: str | None = None) -> ir.Node:
        """A cast of ``value`` to a float type; ``named`` is as for ``node``."""
        dtype, to_type = DATA_TYPES[to], {"to": int(DATA_TYPES[to])}
        return self.node("Cast", [value], to_type, label=to.label, dtype=dtype, named=named)

    def rounded(self, value: ir.Value, to: Format, *, blocks: bool) -> list[ir.Node]:
        """Nodes, in order, of which the last gives ``value`` rounded to bf16, in fp32.

        OpenVINO fuses them into one kernel: see ``exact_casts``, where the factors are. A
        value that it stores in ``blocks`` of channels is not reshaped.
        """
        ops = self.arithmetic.ops
        factor, back = (ops.scalar(x) for x in (FACTOR, BACK))
        nodes: list[ir.Node] = []

        def step(kind: str, one: ir.Value, other: ir.Value, label: str) -> ir.Value:
            node = self.node(
                kind, [one, other], {}, label=label, dtype=ir.DataType.FLOAT, named=value.name
            )
            node.outputs[0].shape = value.shape if label in ("scaled", "rounded") else None
            nodes.append(node)
            return node.outputs[0]

        scaled = step("Mul", value, factor, "scaled")
        if blocks:
            rounded = step("Mul", step("Add", scaled, value, "part"), back, "rounded")
        else:
            axis = ops.constant(np.array([0], dtype=np.int64))
            again = step("Unsqueeze", value, axis, "again")
            whole = step("Mul", step("Add", scaled, again, "part"), back, "whole")
            rounded = step("Squeeze", whole, axis, "rounded")
        for node in nodes:
            node.metadata_props[ROUNDING] = f"{to.label} {rounded.name}"
        return nodes


# A function that makes nodes, in order, of which the last gives the converted value; none if
# it needs no conversion.
Nodes: TypeAlias = Callable[[Maker, ir.Value, Encoding], list[ir.Node]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """How values are converted into an encoding and back.

    Attributes:
        into: Makes nodes from fp32 to the type that stores the encoding.
        back: Makes nodes from the type that stores the encoding to fp32.
        since: The first opset that has these nodes; None if Cast's definition tells.
        read: The encoding that the nodes back from a constant state: a later conversion
            decodes the constant by it. Raises ValueError if they state none. None for formats
            that are stored in float types.
        by_casts: Whether the nodes are casts between floats, which a later conversion finds as
            such; other nodes are marked, and taken out together.
    """

    into: Nodes
    back: Nodes
    since: int | None = None
    read: Callable[[Sequence[ir.Node]], Scaled] | None = None
    by_casts: bool = False


def _cast(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    return [maker.cast(value, to.format)]


def _cast_back(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    return [maker.cast(value, Format.FP32)]


def _arithmetic(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    return maker.arithmetic.rounded(value, to.format)


def _stay(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    return []


def _codes(fmt: Format) -> Statement:
    return Statement(into=quantize, back=dequantize, since=since(fmt), read=reader(fmt))


_CASTS: Final = Statement(into=_cast, back=_cast_back, by_casts=True)

STATEMENTS: Final[Mapping[Format, Statement]] = {
    Format.BF16: _CASTS,
    Format.FP16: _CASTS,
    Format.FP8_E4M3: _CASTS,
    Format.FP8_E5M2: _CASTS,
    # No type of ONNX: its numbers are stored in fp32. The arithmetic begins with a Clip.
    Format.TF32: Statement(into=_arithmetic, back=_stay, since=CLIP_BOUNDS_ARE_INPUTS),
    **{fmt: _codes(fmt) for fmt in Format if fmt.has_scales},
}


def rounding(maker: Maker, value: ir.Value, to: Encoding) -> list[ir.Node]:
    """Nodes, in order, of which the last gives ``value`` rounded to ``to``, in fp32."""
    row = STATEMENTS[to.format]
    nodes = row.into(maker, value, to)
    return nodes + row.back(maker, nodes[-1].outputs[0], to)


def stated_since(fmt: Format, opset: int) -> int:
    """The first opset, from ``opset`` up, at which values can be rounded to ``fmt``."""
    row = STATEMENTS.get(fmt)
    if row is not None and row.since is not None:
        return max(opset, row.since)
    found = signature("Cast", "", opset)
    return dict(found.since).get(fmt, opset) if found else opset
