"""Speech, detection, segmentation, and vision with language: networks of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network
from zoo.networks.text import build

_SPEECH: Final[dict[str, Any]] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "conv_dim": (16, 16), "conv_stride": (5, 4),
    "conv_kernel": (10, 8), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "vocab_size": 32,
}  # fmt: skip
_VISION: Final[dict[str, Any]] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "patch_size": 8,
}  # fmt: skip


def _images(size: int = 64) -> Inputs:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _sound() -> Inputs:
    return {"input_values": torch.randn(2, 1600)}


def _spectrum() -> Inputs:
    return {
        "input_features": torch.randn(2, 16, 64),
        "decoder_input_ids": torch.randint(3, 256, (2, 10)),
    }


def _captioned() -> Inputs:
    tokens = torch.randint(3, 255, (2, 12))
    tokens[:, -1] = 255  # ends the text: the position that CLIP reads
    return {"input_ids": tokens, **_images(32), "attention_mask": torch.ones_like(tokens)}


def _clip() -> nn.Module:
    text = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 32,
        "eos_token_id": 255,
    }  # fmt: skip
    vision = {**_VISION, "image_size": 32}
    options = {"text_config": text, "vision_config": vision, "projection_dim": 32}
    return build("CLIPConfig", "CLIPModel", options)


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    options = {
        "backbone_config": backbone, "use_timm_backbone": False, "d_model": 64,
        "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
        "num_queries": 8,
    }  # fmt: skip
    return build("DetrConfig", "DetrForObjectDetection", options)


def _network(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], Inputs]
) -> Network:
    return Network(name=name, library="transformers", build=make, inputs=inputs)


def _model(
    name: str, model: str, config: str, inputs: Callable[[], Inputs], **options: Any
) -> Network:
    return _network(name, partial(build, config, model, options), inputs)


NETWORKS: Final = (
    _model("wav2vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", _sound, **_SPEECH),
    _model("hubert", "HubertModel", "HubertConfig", _sound, **_SPEECH),
    _model("whisper", "WhisperForConditionalGeneration", "WhisperConfig", _spectrum,
           vocab_size=256, num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2,
           encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
           decoder_ffn_dim=128, max_source_positions=32, max_target_positions=32,
           use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
           decoder_start_token_id=1),
    _network("clip", _clip, _captioned),
    _network("detr", _detr, _images),
    _model("yolos", "YolosForObjectDetection", "YolosConfig", _images, **_VISION,
           image_size=[64, 64], num_detection_tokens=8),
    _model("segformer", "SegformerForSemanticSegmentation", "SegformerConfig", _images,
           depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], decoder_hidden_size=32),
    _model("dinov2", "Dinov2Model", "Dinov2Config", partial(_images, 32), **_VISION,
           image_size=32),
)  # fmt: skip
