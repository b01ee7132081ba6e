"""The roundings of one value: each made once, in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx_ir as ir

from finecast.devices.emulation import Emulation
from finecast.engines.emulator.setting import ALWAYS, Bit, Setting
from finecast.engines.emulator.wants import Into, Wants
from finecast.frontends.onnx.roundops import RoundOps


@dataclass(slots=True, kw_only=True)
class RoundedViews:
    """``native`` as its readers see it; ``nodes`` make the views.

    ``condition`` gives the switch's value for bits; with a ``fixed`` setting nothing is
    chosen. ``standalone``: converting the value is a kernel of its own.
    """

    native: ir.Value
    emulation: Emulation
    ops: RoundOps
    fixed: Setting | None
    condition: Callable[[frozenset[Bit]], ir.Value]
    standalone: bool
    nodes: list[ir.Node] = field(default_factory=list[ir.Node])
    rounded: dict[Into, ir.Value] = field(default_factory=dict[Into, ir.Value])
    views: dict[tuple[tuple[Into, frozenset[Bit]], ...], ir.Value] = field(
        default_factory=dict[tuple[tuple[Into, frozenset[Bit]], ...], ir.Value]
    )

    def of(self, wants: Wants) -> ir.Value:
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

    def _chosen(
        self, base: ir.Value, into: Into, bits: frozenset[Bit], *, otherwise: ir.Value
    ) -> ir.Value:
        if self.fixed is not None and not self.fixed.on(bits):
            return otherwise
        out = self._rounding(base, into)
        if self.fixed is not None or ALWAYS in bits:
            return out
        result = ir.Value(
            name=f"{self._name()}_chosen",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=self.native.shape,
        )
        node = ir.node("Where", [self.condition(bits), out, otherwise], outputs=[result])
        self.nodes.append(node)
        return result

    def _rounding(self, base: ir.Value, into: Into) -> ir.Value:
        if base is self.native and into in self.rounded:
            return self.rounded[into]
        how = self.emulation.conversion(
            into.format, standalone=self.standalone, flush=into.flush
        )
        made, out = self.ops.round(base, how, f"{self._name()}_{into.format.label}")
        self.nodes += made
        if base is self.native:
            self.rounded[into] = out
        return out

    def _name(self) -> str:
        return f"{self.native.name}_view{len(self.nodes)}"
