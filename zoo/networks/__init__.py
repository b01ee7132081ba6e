"""The architectures, by name."""

from __future__ import annotations

from typing import Final

from zoo.network import Network
from zoo.networks import diffusion, recurrent, text, vision

NETWORKS: Final[dict[str, Network]] = {
    net.name: net for part in (vision, text, diffusion, recurrent) for net in part.NETWORKS
}

SAMPLE: Final = ("resnet18", "vit", "bert", "llama", "unet2d_condition", "lstm")
"""One of each kind, for CI."""
