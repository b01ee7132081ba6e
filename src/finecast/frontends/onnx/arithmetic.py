"""Rounding to a format that is no type of ONNX (tf32), by nodes that compute in fp32.

Laws: up to 2^104 the nodes give what ``rounding.round_to`` gives, but for subnormals; larger
numbers, Inf and NaN pass as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from finecast.frontends.onnx.constants import MARK
from finecast.frontends.onnx.roundops import RoundOps
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder


class Arithmetic:
    """Makes the nodes; ``fresh`` makes names unique, ``register`` takes each constant once."""

    def __init__(
        self, fresh: Callable[[str], str], register: Callable[[ir.Value], None]
    ) -> None:
        self.fresh = fresh
        self.register = register
        self.ops = RoundOps(register=self._scalar)

    def rounded(self, value: ir.Value, fmt: Format) -> list[ir.Node]:
        """Nodes, in order, of which the last gives ``value`` rounded to nearest even."""
        name = self.fresh(f"{value.name}_{fmt.label}")
        nodes, out = self.ops.round(value, Rounder(format=fmt), name)
        for node in nodes:
            step = node.outputs[0]
            step.name = name if step is out else self.fresh(step.name or name)
            node.name = self.fresh(f"round_{step.name}")
            node.metadata_props[MARK] = ""
        return nodes

    def _scalar(self, value: ir.Value) -> None:
        # The emulator registers constants under the names that RoundOps gives, without suffix.
        value.name = self.fresh(f"{value.name}_rounding")
        self.register(value)
