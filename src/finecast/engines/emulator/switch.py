"""The extra inputs of an instrumented ONNX model, and what they are fed for a setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.devices.emulation import Bit, Setting

EMULATION_SWITCH: Final = "finecast_emulation"
OFFSET: Final = "finecast_offset"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchedWeight:
    """A constant that the instrumented model has as an input, fed exact or rounded.

    It is rounded where a setting has any of ``bits``.
    """

    name: str
    exact: NDArray[np.float32]
    rounded: NDArray[np.float32]
    bits: frozenset[Bit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The instrumented model; ``conditions[k]`` are the bits of element k of its switch.

    ``needs_offset`` says that it has the input ``OFFSET`` too: the index of the first sample
    of the batch, for stochastic rounding.
    """

    model: ir.Model
    conditions: tuple[frozenset[Bit], ...]
    needs_offset: bool
    weights: tuple[SwitchedWeight, ...] = ()

    def feeds(self, setting: Setting) -> dict[str, NDArray[np.generic]]:
        """Arrays for the extra inputs under a setting, but for ``OFFSET``."""
        found: dict[str, NDArray[np.generic]] = {
            w.name: w.rounded if setting.on(w.bits) else w.exact for w in self.weights
        }
        if self.conditions:
            found[EMULATION_SWITCH] = self.switch(setting)
        return found

    def switch(self, setting: Setting) -> NDArray[np.bool_]:
        """The switch input for a setting."""
        return np.array([setting.on(bits) for bits in self.conditions], dtype=bool)
