"""Which ports of a node follow its op, given the types of its values.

Law: all ports that follow have one format, and change together. No port follows in a node
where one that could has a value of unknown type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import onnx_ir as ir

from finecast import ops
from finecast.errors import ModelError
from finecast.frontends.onnx.schema import OpSignature, signature
from finecast.numbers.formats import Format

_DTYPE_LABELS: Final = {d: d.name.lower() for d in ir.DataType} | {
    ir.DataType.FLOAT: "fp32",
    ir.DataType.FLOAT16: "fp16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.DOUBLE: "fp64",
    ir.DataType.FLOAT8E4M3FN: "fp8_e4m3",
    ir.DataType.FLOAT8E5M2: "fp8_e5m2",
}
# The formats that a port can follow its op in, by the label of its type.
FORMATS: Final = {
    f.label: f
    for f in (Format.FP32, Format.FP16, Format.BF16, Format.FP8_E4M3, Format.FP8_E5M2)
}
_ABSENT: Final = ""
_UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A kind of op: its canonical and native names, its signature, and formats it admits."""

    op: str
    native: str
    signature: OpSignature | None
    admits: frozenset[Format]


@lru_cache(maxsize=8192)
def described(op_type: str, domain: str, opset: int) -> Described:
    """What is known of an op at ``opset``; only the names of an op without definition."""
    native = f"{domain or 'onnx'}::{op_type}"
    found = signature(op_type, domain, opset)
    return Described(
        op=ops.lookup(native).name,
        native=native,
        signature=found,
        admits=frozenset(f for f, since in found.since if since <= opset)
        if found
        else frozenset(),
    )


def check_ports(node: ir.Node, least: tuple[int, int]) -> None:
    """Raise ModelError if ``node`` has fewer ports than its op is defined with."""
    got = len(node.inputs), len(node.outputs)
    if got[0] < least[0] or got[1] < least[1]:
        raise ModelError(
            f"{node.op_type} has {got[0]} inputs and {got[1]} outputs, and is defined with "
            f"{least[0]} and {least[1]} or more",
            where=f"node {node.name!r}",
            fix="run onnx.checker on the model, and export it again",
        )


def dtype_label(kind: ir.TypeProtocol | None) -> str:
    """A value's type as the graph names it: ``fp32``, ``int64``, ``sequence(fp32)``."""
    if kind is None:
        return _UNKNOWN
    if isinstance(kind, ir.TensorType):
        return _DTYPE_LABELS[kind.dtype]
    inner = getattr(kind, "elem_type", None)
    name = type(kind).__name__.removesuffix("Type").lower()
    return (
        f"{name}({dtype_label(inner) if not isinstance(inner, ir.DataType) else inner.name})"
    )


def labels_of(values: Sequence[ir.Value | None]) -> tuple[str, ...]:
    """The type of each port's value; empty for an optional port that is left out."""
    return tuple(
        _ABSENT if v is None or (v.type is None and not v.name) else dtype_label(v.type)
        for v in values
    )


@lru_cache(maxsize=8192)  # a model has many nodes and few kinds of them
def following(
    op_type: str, domain: str, opset: int, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> tuple[tuple[bool, ...], tuple[bool, ...], Format | None]:
    """Which inputs and outputs of these types follow the op, and the format they have."""
    found = described(op_type, domain, opset).signature
    assert found is not None
    flags_in, flags_out = _flags(inputs, outputs, found)
    return flags_in, flags_out, _own_format((*outputs, *inputs), (*flags_out, *flags_in))


def _flags(
    inputs: Sequence[str], outputs: Sequence[str], found: OpSignature
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which inputs and outputs follow; none if one that could has an unknown type."""
    kept = (False,) * len(inputs), (False,) * len(outputs)
    if not _computes_in_float(inputs, outputs, found):
        return kept
    flags: list[tuple[bool, ...]] = []
    for labels, output in ((inputs, False), (outputs, True)):
        following = [found.follows(i, output=output) for i in range(len(labels))]
        if any(f and label == _UNKNOWN for f, label in zip(following, labels, strict=True)):
            return kept
        flags.append(
            tuple(f and label in FORMATS for f, label in zip(following, labels, strict=True))
        )
    return flags[0], flags[1]


def _computes_in_float(
    inputs: Sequence[str], outputs: Sequence[str], found: OpSignature
) -> bool:
    labels = outputs if found.anchor_is_output else inputs
    if found.anchor is None or found.anchor >= len(labels):
        return found.anchor is not None
    label = labels[found.anchor]
    return label in FORMATS or label in (_ABSENT, _UNKNOWN)


def _own_format(labels: Sequence[str], flags: Sequence[bool]) -> Format | None:
    """The one format of all following ports; None if there is none, or they differ."""
    found = {label for label, follows in zip(labels, flags, strict=True) if follows}
    return FORMATS[found.pop()] if len(found) == 1 else None
