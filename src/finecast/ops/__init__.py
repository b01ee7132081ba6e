"""The op table: every op's kind, its tier and its native names.

The rows are in ``ops.csv``; this module looks them up. An op without a row keeps
its type and is reported: nothing is assumed about it.
"""

from __future__ import annotations

from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.ops.table import OP_TABLE, FlopRule, OpInfo, OpKind, Tier, index_natives

__all__ = [
    "OP_TABLE",
    "READS_ANY_FORMAT",
    "READS_SHAPE_ONLY",
    "UNKNOWN",
    "FlopRule",
    "OpInfo",
    "OpKind",
    "Tier",
    "by_name",
    "lookup",
]

UNKNOWN = OpInfo(name="unknown", kind=OpKind.UNKNOWN, tier=Tier.NEVER)

READS_ANY_FORMAT = frozenset(
    {"onnx::Cast", "aten::_to_copy", "tf::Cast", "openvino::Convert"}
    | {"onnx::Shape", "onnx::Size", "aten::sym_size", "aten::numel", "openvino::ShapeOf"}
)
"""Native ops that read any format without a cast: conversions, and ops that give shapes.

TensorFlow's shape ops are not among them: their nodes state the type that they read.
"""

_BY_NATIVE = index_natives(OP_TABLE)
_BY_NAME = {info.name: info for info in (*OP_TABLE, UNKNOWN)}
_ATEN = "aten::"


def lookup(native: str) -> OpInfo:
    """The row of a native op, or ``UNKNOWN``; never fails.

    ATen names are found with or without their overload, in-place variants as the op itself:
    ``aten::add_.Tensor`` is ``aten::add``.
    """
    found = _BY_NATIVE.get(native)
    if found is None and native.startswith(_ATEN):
        base = native.partition(".")[0]
        found = _BY_NATIVE.get(base) or _BY_NATIVE.get(base.removesuffix("_"))
    return found or UNKNOWN


def by_name(name: str) -> OpInfo:
    """The row of a canonical op name, or ``UNKNOWN``; never fails."""
    return _BY_NAME.get(name, UNKNOWN)
