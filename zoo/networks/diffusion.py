"""Networks of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network


def _build(model: str, options: dict[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, model)(**options)


def _diffusion(
    name: str, model: str, inputs: Callable[[], Inputs], **options: Any
) -> Network:
    return Network(
        name=name, library="diffusers", build=partial(_build, model, options), inputs=inputs
    )


def _latents(size: int = 16, text: int = 32) -> Inputs:
    return {
        "sample": torch.randn(2, 4, size, size),
        "timestep": torch.tensor([7, 901]),
        "encoder_hidden_states": torch.randn(2, 8, text),
    }


NETWORKS: Final = (
    _diffusion(
        "unet2d_condition", "UNet2DConditionModel", _latents,
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8,
    ),
)
