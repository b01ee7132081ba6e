"""A network under test, and what a stage finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from zoo.network import Inputs, Network, float_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a stage measured, by name, and what it has to tell, as sentences."""

    figures: dict[str, float] = field(default_factory=dict[str, float])
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One network under test; ``folder`` is its own, exported models stay there."""

    network: Network
    net: nn.Module
    inputs: Inputs
    folder: Path
    speed: bool = False

    def reference(self) -> list[torch.Tensor]:
        """The float outputs in fp32."""
        with torch.no_grad():
            return float_outputs(self.net(**self.inputs))


# From here on an error is no rounding any more but a mistake: three times what the other way
# of computing in the same format gives, and more than a percent.
_FACTOR = 3.0
_LEAST = 0.01


def is_wrong(error: float, beside: float) -> bool:
    """Whether ``error`` is more than rounding explains, ``beside`` being a peer's."""
    return not error <= max(_FACTOR * beside, _LEAST)
