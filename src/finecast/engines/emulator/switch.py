"""What an instrumented ONNX model is fed for a setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from finecast.devices.setting import Bit, Setting

EMULATION_SWITCH: Final = "finecast_emulation"
OFFSET: Final = "finecast_offset"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwitchedWeight:
    """A constant that is an input of the instrumented model: which array it is fed when."""

    name: str
    exact: NDArray[np.float32]
    rounded: NDArray[np.float32]
    bits: frozenset[Bit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The instrumented model and what the elements of its switch stand for.

    ``needs_offset`` says that it has the input ``finecast_offset`` too, for draws.
    """

    model: ir.Model
    conditions: tuple[frozenset[Bit], ...]
    needs_offset: bool
    weights: tuple[SwitchedWeight, ...] = ()

    def feeds(self, setting: Setting) -> dict[str, NDArray[np.generic]]:
        """What the inputs that are not the model's own are fed for a setting."""
        found: dict[str, NDArray[np.generic]] = {
            w.name: w.rounded if setting.on(w.bits) else w.exact for w in self.weights
        }
        if self.conditions:
            found[EMULATION_SWITCH] = self.switch(setting)
        return found

    def switch(self, setting: Setting) -> NDArray[np.bool_]:
        """The switch input for a setting."""
        return np.array([setting.on(bits) for bits in self.conditions], dtype=bool)
