"""Adjusted operands: how a plan changes the numbers that ops read, beside the ops' formats.

Laws: an adjustment multiplies each channel of an operand, or the whole operand, by a power of
two, then adds a number to it, and changes nothing else. The operand is a constant, a value, or
an attribute such as a norm's epsilon. A constant that other ops read, too, is copied for the
op; in front of an op that reads a value a multiplication is inserted. The plan stores the
exponents and the added numbers, not the constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from finecast.files.saved import SavedPart, converted
from finecast.graph import SCALARS, Dim, Graph, Node, Value
from finecast.numbers.formats import Format

# Exponent of fp32's largest number divided by its smallest subnormal number.
_LARGEST_EXPONENT: Final = 128 + 149

WHOLE: Final = 0
"""The axis of an adjustment that multiplies all of its operand by one number."""

# A constant of more elements is not copied for one of the ops that read it: a scalar, as a
# norm's epsilon, and a bias take no memory to speak of, an embedding does.
_MOST_COPIED: Final = 1 << 14

ATTRIBUTES: Final = frozenset({"epsilon", SCALARS})
"""Attributes of ops that can be adjusted, as graphs call them.

Of the numbers that an op has as operands all are multiplied.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """Scales and shifts the operand at input ``port`` of ``node``, by channel along ``axis``.

    Each channel is multiplied by 2 to the power of its element of ``exponents``, then its
    element of ``add`` is added; an empty tuple skips that part. ``axis`` is negative: -1 is
    the last. With the axis ``WHOLE`` there is one exponent, one number to add, or both, for
    all of the operand; with an ``attribute`` that number of the op is multiplied. The decision
    of the op has the reasons.
    """

    node: str
    port: int = 0
    axis: int = -1
    attribute: str = ""
    exponents: tuple[int, ...] = ()
    add: tuple[float, ...] = ()

    @property
    def channels(self) -> int:
        """Number of channels of the operand."""
        return len(self.exponents or self.add)

    @property
    def steps(self) -> list[tuple[str, NDArray[np.float32]]]:
        """The ops that adjust a value, "multiply" or "add", each with its other operand."""
        found = [("multiply", self.factors)] if self.exponents else []
        return [*found, ("add", np.array(self.add[0], np.float32))] if self.add else found

    @property
    def factors(self) -> NDArray[np.float32]:
        """The powers of two, in a shape that multiplies the operand."""
        along = (self.channels, *(1,) * (-self.axis - 1)) if self.axis else ()
        return replace(self, add=()).of(np.ones(along, np.float32))

    def of(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        """``array``, adjusted."""
        along = (-1, *(1,) * (-self.axis - 1)) if self.axis else ()
        if self.exponents:
            array = np.ldexp(array, np.array(self.exponents, np.int32).reshape(along))
        if self.add:
            array = array + np.array(self.add, np.float32).reshape(along)
        return array

    @property
    def of_whole(self) -> bool:
        """Whether it multiplies all of its operand by one power of two."""
        return self.axis == WHOLE

    def fits(self, shape: Sequence[Dim]) -> bool:
        """Whether an operand of this shape has as many channels along the axis."""
        if self.axis == WHOLE:
            return self.channels == 1
        return len(shape) >= -self.axis and shape[self.axis] == self.channels

    def followed_by(self, other: Adjustment) -> Adjustment:
        """One adjustment equal to this one and then ``other`` of the same channels."""
        none = (0,) * self.channels
        pairs = zip(self.exponents or none, other.exponents or none, strict=True)
        exponents = tuple(a + b for a, b in pairs)
        add = other.add
        if self.add:
            scaled = other.of(np.array(self.add, np.float32)) if other.exponents else self.add
            add = tuple(float(a) for a in scaled)
        return replace(self, exponents=exponents if any(exponents) else (), add=add)

    def to_dict(self) -> dict[str, Any]:
        """Content for JSON: the numbers of each kind are one string."""
        at = {"attribute": self.attribute} if self.attribute else {"port": self.port}
        found: dict[str, Any] = {"node": self.node, **at}
        found |= {} if self.axis == -1 else {"axis": self.axis}
        for name in ("exponents", "add"):
            numbers = getattr(self, name)
            found |= {name: " ".join(map(repr, numbers))} if numbers else {}
        return found

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Adjustment:
        """Inverse of ``to_dict``.

        Raises:
            ValueError: If ``content`` is not a valid adjustment.
        """
        stated = converted(content, _SavedAdjustment)
        attribute, axis = stated.attribute, stated.axis
        if attribute and (attribute not in ATTRIBUTES or axis != WHOLE):
            raise ValueError(f"attribute {attribute!r} along axis {axis!r}")
        exponents = tuple(int(number) for number in stated.exponents.split())
        add = tuple(float(number) for number in stated.add.split())
        if not all(abs(number) <= Format.FP32.max for number in add):
            raise ValueError("a number to add is not finite in fp32")
        if any(abs(exponent) > _LARGEST_EXPONENT for exponent in exponents):
            raise ValueError("an exponent is beyond the range of fp32")
        if not exponents and not add:
            raise ValueError("an adjustment that does nothing")
        if exponents and add and len(exponents) != len(add):
            raise ValueError(f"{len(exponents)} exponents and {len(add)} numbers to add")
        if axis == WHOLE and max(len(exponents), len(add)) != 1:
            raise ValueError("one exponent, one number to add for the whole operand, or both")
        if attribute and add:
            raise ValueError(f"a number is added to the attribute {attribute!r}")
        return cls(
            node=stated.node,
            port=0 if attribute else stated.port,
            axis=axis,
            attribute=attribute,
            exponents=exponents,
            add=add,
        )

    def edit(self, graph: Graph, nodes: Mapping[str, Node]) -> AdjustOperand | None:
        """The edit that makes this adjustment; None if the op has no such operand."""
        node = nodes.get(self.node)
        if node is None or node.region:
            return None
        if self.attribute:
            known = self.attribute in node.attributes
            return AdjustOperand(value=None, node=node.id, what=self) if known else None
        value = graph.read(node, self.port)
        if value is None or node.inputs.count(value.id) > 1:
            return None
        fits = self._fits_constant if value.constant is not None else self._fits_value
        return AdjustOperand(value=value.id, node=node.id, what=self) if fits(value) else None

    def _fits_constant(self, value: Value) -> bool:
        if self.axis == WHOLE:
            return multipliable(value) and not self.add
        if self.add:
            return addable(value, self.channels, self.axis)
        return scalable(value, self.channels, self.axis)

    def _fits_value(self, value: Value) -> bool:
        """Whether the value can be multiplied by one number for each channel."""
        shape = value.shape or ()
        known = self.axis == WHOLE or (
            len(shape) >= -self.axis and isinstance(shape[self.axis], int)
        )
        fits = not known or self.fits(shape)
        may_add = self.axis == WHOLE or not self.add
        return fits and may_add and value.format is Format.FP32


class _SavedAdjustment(SavedPart):
    node: str
    port: Annotated[int, msgspec.Meta(ge=0)] = 0
    axis: Annotated[int, msgspec.Meta(le=WHOLE)] = -1
    attribute: str = ""
    exponents: str = ""
    add: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdjustOperand:
    """Apply the adjustment ``what`` to ``value``, which ``node`` reads.

    A constant is changed itself if only ``node`` reads it, else a copy of it; any other value
    is multiplied, or a number is added to it, in front of ``node``. Without a value it is an
    attribute that is changed. Applied before a plan's other edits, which convert the result.
    """

    value: int | None
    node: int
    what: Adjustment


def edits_by(adjustments: Iterable[Adjustment], graph: Graph) -> list[AdjustOperand]:
    """The edits for those ``adjustments`` whose operands exist in ``graph``."""
    nodes = {n.name: n for n in graph.nodes}
    found = (one.edit(graph, nodes) for one in adjustments)
    return [edit for edit in found if edit is not None]


def together(
    first: Iterable[Adjustment], then: Iterable[Adjustment]
) -> tuple[Adjustment, ...]:
    """``first``, followed by ``then``, merged into one adjustment per operand and axis."""
    found: dict[tuple[str, int, int, str], Adjustment] = {}
    for one in (*first, *then):
        key = (one.node, one.port, one.axis, one.attribute)
        found[key] = found[key].followed_by(one) if key in found else one
    return tuple(one for one in found.values() if one.exponents or one.add)


def constant_at(graph: Graph, node: Node, port: int) -> Value | None:
    """The constant that ``node`` reads at input ``port``; None if that is no constant."""
    value = graph.read(node, port)
    return value if value is not None and value.constant is not None else None


def addable(value: Value, channels: int, axis: int = -1) -> bool:
    """Whether ``value`` is a constant with one number per channel that only one op reads."""
    shape = value.shape or ()
    others = [d for i, d in enumerate(shape, -len(shape)) if i != axis]
    return scalable(value, channels, axis) and all(d == 1 for d in others)


def multipliable(value: Value) -> bool:
    """Whether ``value`` is a constant of which one op can have all numbers multiplied.

    It is one that only this op reads, or small enough to be copied for the op.
    """
    constant = value.constant
    if constant is None or value.format is not Format.FP32:
        return False
    alone = len(value.uses) == 1 and not (value.is_output or value.is_input)
    return alone or constant.size <= _MOST_COPIED


def scalable(value: Value, channels: int, axis: int) -> bool:
    """Whether ``value`` is a constant with ``channels`` along ``axis`` that one op reads."""
    shape = value.shape or ()
    return (
        value.constant is not None
        and value.format is Format.FP32
        and len(value.uses) == 1
        and not (value.is_output or value.is_input)
        and len(shape) >= -axis
        and shape[axis] == channels
    )
