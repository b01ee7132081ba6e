"""The rounded copies of one value: each is made once, when a reader first needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from finecast.devices.emulation import ALWAYS, Bit, Setting
from finecast.engines.emulator.roundings import Roundings, RoundTo

V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class RoundedViews(Generic[V]):
    """A value as its readers see it: a tensor, or the library's node for one.

    Attributes:
        native: The value itself.
        rounding: Gives a rounded copy of a value.
        choice: Gives its second argument where a bit is set, else its third; not used with
            ``fixed``.
        fixed: The one setting to build for; None if bits are evaluated in the model.
        rounded: Copies of ``native`` with one rounding.
        views: Copies by all their roundings.
    """

    native: V
    rounding: Callable[[V, RoundTo], V]
    choice: Callable[[frozenset[Bit], V, V], V] | None = None
    fixed: Setting | None
    rounded: dict[RoundTo, V] = field(default_factory=dict[RoundTo, V])
    views: dict[tuple[tuple[RoundTo, frozenset[Bit]], ...], V] = field(
        default_factory=dict[tuple[tuple[RoundTo, frozenset[Bit]], ...], V]
    )

    def of(self, roundings: Roundings) -> V:
        """The value after ``roundings``, one after the other.

        A rounding that comes ``instead`` of the engine's ``own`` is made of the value before
        that one, so that the value is not rounded twice.
        """
        key = tuple(roundings.items())
        if key not in self.views:
            base = view = self.native
            for into, bits in key:
                below = base if into.instead else view
                base = view if into.own else base
                view = self._chosen(below, into, bits, otherwise=view)
            self.views[key] = view
        return self.views[key]

    def _chosen(self, base: V, into: RoundTo, bits: frozenset[Bit], *, otherwise: V) -> V:
        if self.fixed is not None and not self.fixed.on(bits):
            return otherwise
        out = self._rounding(base, into)
        if self.choice is None or self.fixed is not None or ALWAYS in bits:
            return out
        return self.choice(bits, out, otherwise)

    def _rounding(self, base: V, into: RoundTo) -> V:
        if base is not self.native:
            return self.rounding(base, into)
        if into not in self.rounded:
            self.rounded[into] = self.rounding(base, into)
        return self.rounded[into]
