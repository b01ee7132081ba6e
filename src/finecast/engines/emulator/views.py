"""The roundings of one value: each made once, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from finecast.devices.setting import ALWAYS, Bit, Setting
from finecast.engines.emulator.wants import Into, Wants

V = TypeVar("V")


@dataclass(slots=True, kw_only=True)
class RoundedViews(Generic[V]):
    """A value as its readers see it: a tensor, or what stands for one in a model.

    Attributes:
        native: The value itself.
        rounding: Rounds one.
        choice: The first where the bits are on, else the second; not asked with ``fixed``.
        fixed: The one setting, where there is one.
    """

    native: V
    rounding: Callable[[V, Into], V]
    choice: Callable[[frozenset[Bit], V, V], V] | None = None
    fixed: Setting | None
    rounded: dict[Into, V] = field(default_factory=dict[Into, V])
    views: dict[tuple[tuple[Into, frozenset[Bit]], ...], V] = field(
        default_factory=dict[tuple[tuple[Into, frozenset[Bit]], ...], V]
    )

    def of(self, wants: Wants) -> V:
        """The value under ``wants``; where formats differ, one after the other.

        What an engine does on its ``own`` is not under what comes ``instead`` of it.
        """
        key = tuple(wants.items())
        if key not in self.views:
            base = view = self.native
            for into, bits in key:
                below = base if into.instead else view
                base = view if into.own else base
                view = self._chosen(below, into, bits, otherwise=view)
            self.views[key] = view
        return self.views[key]

    def _chosen(self, base: V, into: Into, bits: frozenset[Bit], *, otherwise: V) -> V:
        if self.fixed is not None and not self.fixed.on(bits):
            return otherwise
        out = self._rounding(base, into)
        if self.choice is None or self.fixed is not None or ALWAYS in bits:
            return out
        return self.choice(bits, out, otherwise)

    def _rounding(self, base: V, into: Into) -> V:
        if base is not self.native:
            return self.rounding(base, into)
        if into not in self.rounded:
            self.rounded[into] = self.rounding(base, into)
        return self.rounded[into]
