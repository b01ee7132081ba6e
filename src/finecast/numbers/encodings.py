"""Encodings: how numbers are stored and read back, and which formats have parameters.

A float format is an encoding without parameters. A new encoding is a row of
``formats.Format``, one in each frontend that states it, and one in each engine that computes
with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled

Encoding: TypeAlias = Format | Scaled


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
        if not fmt.has_scales:
            stray = {f.name for f in fields(cls)} & content.keys()
            if stray:
                raise ValueError(f"{fmt.label} has no parameters for {min(stray)}")
            return cls()

        def read(role: str, *, constant: bool) -> dict[int, Scaled]:
            named: dict[str, dict[str, Any]] = content[role]
            if named and not (constant or fmt.encodes_values):
                raise ValueError(f"{fmt.label} encodes constants alone, not {role}")
            return {
                int(i): Scaled.from_dict(fmt, fmt.grid(constant=constant), e)
                for i, e in named.items()
            }

        stated: object = content["result"]
        result: Encoding = Format.FP32
        if isinstance(stated, dict) and fmt.encodes_values:
            result = Scaled.from_dict(
                fmt, fmt.grid(constant=False), cast("dict[str, Any]", stated)
            )
        elif stated != result.label:
            raise ValueError(f"{fmt.label} ops give {result.label}, not {stated!r}")
        found = cls(
            operands=read("operands", constant=False),
            constants=read("constants", constant=True),
            result=result,
        )
        # A format for constants alone has none where a conversion stored the constants before.
        if fmt.encodes_values and not (found.operands or found.constants):
            raise ValueError(f"{fmt.label} needs the parameters of an input")
        return found


def stored_bytes(x: NDArray[np.generic], encoding: Encoding, *, piece: int) -> Iterator[bytes]:
    """The bytes that store the constant ``x``, in order, of at most ``piece`` elements each.

    Elements of 4 bits are packed in pairs, the first of them in the lower half of a byte, as
    ONNX and OpenVINO do; ``piece`` is even then.
    """
    flat = x.reshape(-1)
    scale = None if isinstance(encoding, Format) else encoding.along(x.shape).flat
    for start in range(0, flat.size, piece):
        part = slice(start, start + piece)
        if isinstance(encoding, Format):
            codes = encoding.encode(flat[part])
        else:
            assert scale is not None
            codes = encoding.codes(flat[part], scale[part])
        yield packed(codes, encoding.format.bits).tobytes()


def packed(codes: NDArray[np.generic], bits: int) -> NDArray[np.generic]:
    """``codes`` of ``bits`` each as an array of whole bytes; an odd one is padded by 0."""
    if bits >= 8:
        return codes
    halves = codes.astype(np.int8).view(np.uint8).reshape(-1) & 0xF
    halves = np.pad(halves, (0, halves.size % 2))
    return halves[0::2] | (halves[1::2] << 4)


def unpacked(stored: NDArray[np.generic], count: int) -> NDArray[np.int8]:
    """``count`` signed codes of 4 bits from the bytes that ``packed`` gave."""
    halves = stored.view(np.uint8).reshape(-1)
    both = np.stack([halves & 0xF, halves >> 4], axis=-1).reshape(-1)[:count]
    return ((both ^ 8).astype(np.int8) - 8).astype(np.int8)
