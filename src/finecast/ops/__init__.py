"""The op table: every op's kind, its tier and its native names.

The rows are in ``ops.csv``; this module looks them up. An op without a row keeps
its type and is reported: nothing is assumed about it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from finecast.plugin import imported_on_use

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.ops.flops import graph_flops as graph_flops
    from finecast.ops.flops import recurrent_flops as recurrent_flops
else:
    __getattr__ = imported_on_use(__name__)

# --------------------------------------------------- kinds, tiers, and the rows of ``ops.csv``


class OpKind(Enum):
    """What an op does with numbers; it decides which engine of a device runs it."""

    MATMUL = auto()
    CONV = auto()
    RECURRENT = auto()
    ATTENTION = auto()
    NORM = auto()
    SOFTMAX = auto()
    REDUCTION = auto()
    POOL = auto()
    ELEMENTWISE = auto()
    TRANSCENDENTAL = auto()
    RELAYOUT = auto()
    MOVEMENT = auto()
    RESIZE = auto()
    CAST = auto()
    CONSTANT = auto()
    QUANTIZE = auto()
    CONTROL = auto()
    SEQUENCE = auto()
    RANDOM = auto()
    COMPARISON = auto()
    INDEX = auto()
    SHAPE = auto()
    LOSS = auto()
    SIGNAL = auto()
    IMAGE = auto()
    TEXT = auto()
    ML = auto()
    UNKNOWN = auto()

    @property
    def label(self) -> str:
        """The name used in reports: ``matmul``."""
        return self.name.lower()

    @property
    def matmul_engine(self) -> bool:
        """Whether ops of this kind run on the matmul engine: the scope ``matmult``."""
        return self in _MATMUL_ENGINE


_MATMUL_ENGINE = frozenset({OpKind.MATMUL, OpKind.CONV, OpKind.RECURRENT, OpKind.ATTENTION})
POINTWISE: Final = frozenset({OpKind.ELEMENTWISE, OpKind.TRANSCENDENTAL})
"""Ops that compute each number of those in its place."""
MOVES: Final = frozenset({OpKind.MOVEMENT, OpKind.RELAYOUT})
"""Ops that put numbers in other places."""
_FOLDED = frozenset(
    {OpKind.MATMUL, OpKind.COMPARISON, OpKind.REDUCTION, OpKind.CAST, OpKind.CONSTANT}
    | {OpKind.SHAPE, *POINTWISE, *MOVES}
)
# They draw random numbers in training, write to what they read, or leave memory as it is.
_NOT_FOLDED = frozenset({"dropout", "bias_dropout", "assign", "scatter_nd", "empty"})


class Tier(Enum):
    """What is known of an op's numerics before anything is measured.

    LOW: compute-bound, and safe in a low format with fp32 accumulation. FOLLOW: neither
    reason for a low format nor against it. SENSITIVE: loses digits or range. NEVER: keeps its
    type.
    """

    LOW = auto()
    FOLLOW = auto()
    SENSITIVE = auto()
    NEVER = auto()

    @property
    def label(self) -> str:
        """The name used in reports: ``low``."""
        return self.name.lower()


class FlopRule(Enum):
    """How an op's floating-point operations are counted: a key of the table in ``flops``."""

    ZERO = auto()
    PER_OUTPUT = auto()
    PER_INPUT = auto()
    TRANSCENDENTAL = auto()
    SOFTMAX = auto()
    NORM = auto()
    POOL = auto()
    MATMUL = auto()
    GEMM = auto()
    ADDMM = auto()
    EINSUM = auto()
    CONV = auto()
    CONV_TRANSPOSE = auto()
    GROUP_CONV = auto()
    GROUP_CONV_TRANSPOSE = auto()
    RECURRENT = auto()
    RECURRENT_LAYERS = auto()
    RECURRENT_SEQUENCE = auto()
    ATTENTION = auto()
    MULTI_HEAD_ATTENTION = auto()
    FUSED_ATTENTION = auto()
    GROUP_QUERY_ATTENTION = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpInfo:
    """One row: all that is known about a canonical op.

    ``exact``: the op only moves, selects or negates numbers (or gives no float), so that its
    results on rounded inputs are already rounded. ``accumulates``: a result sums many terms,
    so that the depth of the reduction matters. ``onnx``, ``aten``, ``tf`` and ``openvino``
    are the native names with their domain: ``onnx::MatMul``, ``com.microsoft::FusedMatMul``;
    OpenVINO's are those of its operation sets. ``flops`` is None if no count is known.
    """

    name: str
    kind: OpKind
    tier: Tier
    onnx: tuple[str, ...] = ()
    aten: tuple[str, ...] = ()
    tf: tuple[str, ...] = ()
    openvino: tuple[str, ...] = ()
    exact: bool = False
    accumulates: bool = False
    flops: FlopRule | None = None

    @property
    def natives(self) -> tuple[str, ...]:
        """The op's names in all frontends."""
        return (*self.onnx, *self.aten, *self.tf, *self.openvino)

    @property
    def matmul_engine(self) -> bool:
        """Whether the op runs on the matmul engine."""
        return self.kind.matmul_engine

    @property
    def has_numbers(self) -> bool:
        """Whether the op reads or gives numbers, and not the sizes of tensors alone."""
        return self.kind is not OpKind.SHAPE

    @property
    def folds(self) -> bool:
        """Whether results of constants alone are constants, which can be computed beforehand.

        Constants that another tool quantized stay as they are: engines multiply by the codes.
        """
        return self.kind in _FOLDED and self.name not in _NOT_FOLDED

    @property
    def places(self) -> bool:
        """Whether the op only places numbers elsewhere, and computes none."""
        return self.exact and self.kind in MOVES


def read_rows(lines: Iterable[str]) -> tuple[OpInfo, ...]:
    """The rows of a table written like ``ops.csv``, whose first lines explain its columns.

    Raises:
        KeyError: If a kind, tier or count is none of the enums'.
    """
    rows = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    return tuple(
        OpInfo(
            name=row["name"],
            kind=OpKind[row["kind"].upper()],
            tier=Tier[row["tier"].upper()],
            onnx=_names(row["onnx"], "onnx"),
            aten=_names(row["aten"], "aten"),
            tf=_names(row["tf"], "tf"),
            openvino=_names(row["openvino"], "openvino"),
            exact=row["exact"] == "exact",
            accumulates=row["sums"] == "sums",
            flops=FlopRule[row["flops"].upper()] if row["flops"] else None,
        )
        for row in rows
    )


def index_natives(table: tuple[OpInfo, ...]) -> dict[str, OpInfo]:
    """Map every native name to its row.

    Raises:
        ValueError: If two rows claim one name, which is a mistake in the table.
    """
    index: dict[str, OpInfo] = {}
    for info in table:
        for native in info.natives:
            if native in index:
                raise ValueError(
                    f"op rows {index[native].name} and {info.name} both claim {native}"
                )
            index[native] = info
    return index


def _names(cell: str, domain: str) -> tuple[str, ...]:
    """Native names with their domain; ``ms::`` stands for ONNX Runtime's."""
    names = (n.replace("ms::", "com.microsoft::", 1) for n in cell.split())
    return tuple(n if "::" in n else f"{domain}::{n}" for n in names)


_FILE = files("finecast.ops").joinpath("ops.csv")
OP_TABLE: Final = read_rows(_FILE.read_text(encoding="utf-8").splitlines())


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
    info = _BY_NATIVE.get(native)
    if info is None and native.startswith(_ATEN):
        base = native.partition(".")[0]
        info = _BY_NATIVE.get(base) or _BY_NATIVE.get(base.removesuffix("_"))
    return info or UNKNOWN


def by_name(name: str) -> OpInfo:
    """The row of a canonical op name, or ``UNKNOWN``; never fails."""
    return _BY_NAME.get(name, UNKNOWN)
