"""Networks of diffusers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network

_STEPS: Final = (7, 901)
"""Timesteps: large ones are what bf16 rounds."""


def _build(model: str, options: dict[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, model)(**options)


def _diffusion(name: str, model: str, inputs: Callable[[], Inputs], **options: Any) -> Network:
    return Network(
        name=name, library="diffusers", build=partial(_build, model, options), inputs=inputs
    )


def _latents() -> Inputs:
    return {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor(_STEPS),
        "encoder_hidden_states": torch.randn(2, 8, 32),
    }


def _controlled() -> Inputs:
    return {**_latents(), "controlnet_cond": torch.rand(2, 3, 128, 128)}


def _by_class() -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor(_STEPS),
        "class_labels": torch.tensor([1, 2]),
    }


def _by_text() -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "timestep": torch.tensor(_STEPS),
    }


def _stable_diffusion_3() -> Inputs:
    return {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor(_STEPS),
    }


def _images() -> Inputs:
    return {"sample": torch.randn(2, 3, 32, 32)}


_UNET: Final[dict[str, Any]] = {
    "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32,
    "attention_head_dim": 8,
}  # fmt: skip
_SMALL: Final[dict[str, Any]] = {
    "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 16,
    "patch_size": 2, "in_channels": 4,
}  # fmt: skip

NETWORKS: Final = (
    _diffusion("unet2d_condition", "UNet2DConditionModel", _latents, **_UNET, sample_size=16,
               up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    _diffusion("controlnet", "ControlNetModel", _controlled, **_UNET),
    _diffusion("vae", "AutoencoderKL", _images, block_out_channels=(16, 32),
               norm_num_groups=8, down_block_types=("DownEncoderBlock2D",) * 2,
               up_block_types=("UpDecoderBlock2D",) * 2),
    _diffusion("dit", "DiTTransformer2DModel", _by_class, **_SMALL, norm_num_groups=8),
    _diffusion("pixart", "PixArtTransformer2DModel", _by_text, **_SMALL, norm_num_groups=8,
               cross_attention_dim=64, caption_channels=32),
    _diffusion("stable_diffusion_3", "SD3Transformer2DModel", _stable_diffusion_3, **_SMALL,
               joint_attention_dim=32, caption_projection_dim=64, pooled_projection_dim=16,
               out_channels=4, pos_embed_max_size=16),
)  # fmt: skip
