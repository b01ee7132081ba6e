"""The architectures, by name."""

from __future__ import annotations

from typing import Final

from zoo.network import Network
from zoo.networks import diffusion, multimodal, recurrent, text, vision

NETWORKS: Final[dict[str, Network]] = {
    net.name: net
    for part in (vision, text, multimodal, diffusion, recurrent)
    for net in part.NETWORKS
}

SAMPLE: Final = ("resnet", "vit", "bert", "llama", "dit", "lstm")
"""One of each kind, for CI."""
