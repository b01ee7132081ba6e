"""Encodings: how numbers are stored and read back, and which formats have parameters.

A float format is an encoding without parameters. A new encoding is a row of
``formats.Format``, one of ``SCALED`` if it has parameters, one in each frontend that states
it, and one in each engine that computes with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format
from finecast.numbers.scaled import Grid, Scaled

Encoding: TypeAlias = Format | Scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFormat:
    """The codes of a scaled format, for values and for constants.

    A format for constants alone does not use ``values``.
    """

    values: Grid
    constants: Grid


# What x86's integer products take: unsigned values, and signed weights symmetric around 0.
_INTEGERS: Final = ScaledFormat(
    values=Grid(dtype=np.dtype(np.uint8), lowest=0, highest=255),
    constants=Grid(dtype=np.dtype(np.int8), lowest=-127, highest=127, symmetric=True),
)

SCALED: Final[Mapping[Format, ScaledFormat]] = {
    Format.INT8: _INTEGERS,
    Format.INT8_WEIGHTS: _INTEGERS,
}
"""Formats whose encodings have parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encodings:
    """How an op whose format has parameters encodes its inputs, by index, and its result.

    The op computes in fp32 on decoded inputs, so that its ``result`` is in fp32; where the
    engine's kernel has to give codes, ``result`` is their encoding, for all readers.
    """

    operands: Mapping[int, Scaled] = field(default_factory=dict[int, Scaled])
    constants: Mapping[int, Scaled] = field(default_factory=dict[int, Scaled])
    result: Encoding = Format.FP32

    def at(self, index: int) -> Scaled | None:
        """The encoding of input ``index``; None if it is not encoded."""
        return self.operands.get(index) or self.constants.get(index)

    def to_dict(self) -> dict[str, Any]:
        """The parameters as JSON content, without the format."""
        roles = {"operands": self.operands, "constants": self.constants}
        inputs = {
            role: {str(index): e.to_dict() for index, e in sorted(named.items())}
            for role, named in roles.items()
        }
        result = self.result
        stored = result.label if isinstance(result, Format) else result.to_dict()
        return {**inputs, "result": stored}

    @classmethod
    def from_dict(cls, fmt: Format, content: Mapping[str, Any]) -> Encodings:
        """Read what ``to_dict`` gave; a format without parameters has none.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: If ``content`` has another form.
        """
        row = SCALED.get(fmt)
        if row is None:
            stray = {f.name for f in fields(cls)} & content.keys()
            if stray:
                raise ValueError(f"{fmt.label} has no parameters for {min(stray)}")
            return cls()

        def read(role: str, grid: Grid) -> dict[int, Scaled]:
            named: dict[str, dict[str, Any]] = content[role]
            return {int(i): Scaled.from_dict(fmt, grid, e) for i, e in named.items()}

        stated: object = content["result"]
        result: Encoding = Format.FP32
        if isinstance(stated, dict) and not fmt.constants_only:
            result = Scaled.from_dict(fmt, row.values, cast("dict[str, Any]", stated))
        elif stated != result.label:
            raise ValueError(f"{fmt.label} ops give {result.label}, not {stated!r}")
        found = cls(
            operands=read("operands", row.values),
            constants=read("constants", row.constants),
            result=result,
        )
        if fmt.constants_only:  # no constants either where a conversion stored them before
            if found.operands:
                raise ValueError(f"{fmt.label} encodes constants alone, not operands")
        elif not (found.operands or found.constants):
            raise ValueError(f"{fmt.label} needs the parameters of an input")
        return found


def encoded(
    x: NDArray[np.generic], encoding: Encoding, *, piece: int
) -> Iterator[NDArray[np.generic]]:
    """The stored elements of the constant ``x``, in order, at most ``piece`` at a time."""
    flat = x.reshape(-1)
    scale = None if isinstance(encoding, Format) else encoding.along(x.shape).flat
    for start in range(0, flat.size, piece):
        part = slice(start, start + piece)
        if isinstance(encoding, Format):
            yield encoding.encode(flat[part])
        else:
            assert scale is not None
            yield encoding.codes(flat[part], scale[part])
