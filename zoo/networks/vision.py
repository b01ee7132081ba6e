"""Networks of torchvision and timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network


def _images(size: int, batch: int) -> Inputs:
    return {"x": torch.randn(batch, 3, size, size)}


def _torchvision(name: str, *, size: int = 64, batch: int = 2, **options: Any) -> Network:
    def build() -> nn.Module:
        import torchvision.models

        return torchvision.models.get_model(name, weights=None, **options)

    return _network(name, "torchvision", build, size, batch)


def _timm(
    name: str, model: str = "", *, size: int = 64, batch: int = 2, **options: Any
) -> Network:
    def build() -> nn.Module:
        import timm

        return timm.create_model(model or name, pretrained=False, num_classes=16, **options)

    return _network(name, "timm", build, size, batch)


def _network(
    name: str, library: str, build: Callable[[], nn.Module], size: int, batch: int
) -> Network:
    return Network(
        name=name,
        library=library,
        build=build,
        inputs=partial(_images, size, batch),
        dynamic={"x": {0: "batch"}},
    )


NETWORKS: Final = (
    _torchvision("resnet18"),
    _timm("vit", "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, size=32),
)
