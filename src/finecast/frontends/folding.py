"""Which values are computed from constants alone: they are constants to the neutral graph.

An exporter writes a weight behind ``Transpose``, ``Identity``, a ``Cast`` from fp16, a weight
norm. Engines compute such a value once, as they load the model; so it is no op that a plan
decides, it costs no time in a call, and the op that reads it can have integers. A plan's edit
stores the computed numbers in the model; what no edit touches stays as it was written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Generic, TypeVar, final

from finecast.ops import OpInfo, OpKind

K = TypeVar("K", bound=Hashable)

LARGEST_BYTES: Final = 10 << 20
"""A result that is larger than this, and than what it is computed from, is not folded; it is
the limit of TensorFlow's own constant folding (Grappler)."""
# Numbers are computed anew each time that they are read. A value of which that moves more
# bytes than this, or than a few copies of its inputs, stays an op: a hostile model could make
# a chain of a thousand ops on large constants, or double its work at each op.
_MOST_BYTES: Final = 1 << 30
_COPIES: Final = 16
# The same for all such values together, in bytes besides the copies of all constants.
_MOST_OF_ALL: Final = 1 << 34
# Steps of a chain, which are computed by recursion.
_DEEPEST: Final = 50
WIDE: Final = frozenset({"fp64", "fp32", "fp16", "bf16"})
"""Labels of types whose numbers are not quantized: a cast of other constants is not folded."""


@final
class ConstantFolding(Generic[K]):
    """Notes constants as a frontend reads a model, and tells which ops have a constant result.

    ``K`` is what identifies a value in the frontend's library.
    """

    def __init__(self) -> None:
        self._bytes: dict[K, int] = {}
        self._work: dict[K, int] = {}
        self._depth: dict[K, int] = {}
        self._types: dict[K, str] = {}
        self._left = _MOST_OF_ALL

    def add(self, key: K, size_bytes: int, dtype: str) -> None:
        """Note a constant of the model."""
        self._bytes[key], self._work[key] = size_bytes, size_bytes
        self._depth[key], self._types[key] = 0, dtype
        self._left += _COPIES * size_bytes

    def __contains__(self, key: object) -> bool:
        return key in self._bytes

    def fold(
        self, info: OpInfo, inputs: Iterable[K], outputs: Mapping[K, tuple[int, str]]
    ) -> bool:
        """Note the results of an op if they are constants; False if they are not.

        Args:
            info: The op.
            inputs: What it reads.
            outputs: Its results: their bytes, and the labels of their types.
        """
        read = [*inputs]
        if not (info.folds and read and outputs and all(key in self for key in read)):
            return False
        quantized = info.kind is OpKind.CAST and self._types[read[0]] not in WIDE
        if quantized and any(label in WIDE for _, label in outputs.values()):
            return False
        given = sum(self._bytes[key] for key in read)
        made = sum(size for size, _ in outputs.values())
        work = made + sum(self._work[key] for key in read)
        depth = 1 + max(self._depth[key] for key in read)
        if made > max(LARGEST_BYTES, given) or depth > _DEEPEST:
            return False
        if work > min(self._left, max(_MOST_BYTES, _COPIES * given)):
            return False
        self._left -= work
        for key, (size, label) in outputs.items():
            self._bytes[key], self._types[key] = size, label
            self._work[key], self._depth[key] = work, depth
        return True
