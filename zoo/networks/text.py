"""Language models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network

_SMALL: Final = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
}


def _tokens(batch: int = 2, length: int = 24) -> Inputs:
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, length - 5 :] = 0
    return {"input_ids": torch.randint(3, 256, (batch, length)), "attention_mask": mask}


def _build(config: str, model: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


def _text(
    name: str, config: str, model: str, inputs: Callable[[], Inputs] = _tokens, **options: Any
) -> Network:
    axes = {0: "batch", 1: "length"}
    return Network(
        name=name,
        library="transformers",
        build=partial(_build, config, model, options),
        inputs=inputs,
        dynamic={"input_ids": axes, "attention_mask": axes},
    )


NETWORKS: Final = (
    _text("bert", "BertConfig", "BertForSequenceClassification", **_SMALL),
    _text("llama", "LlamaConfig", "LlamaForCausalLM", **_SMALL, num_key_value_heads=2,
          use_cache=False),
)
