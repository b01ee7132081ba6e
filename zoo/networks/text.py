"""Language models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from zoo.network import Inputs, Network

_SMALL: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
}
_DECODER: Final[dict[str, Any]] = {
    **_SMALL, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tokens(batch: int = 2, length: int = 24) -> Inputs:
    """Two texts, the second shorter than the first."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[1:, length - 5 :] = 0
    return {"input_ids": torch.randint(3, 256, (batch, length)), "attention_mask": mask}


def _no_padding() -> Inputs:
    return {"input_ids": torch.randint(3, 256, (2, 24))}


def _pairs() -> Inputs:
    return {**_tokens(), "decoder_input_ids": torch.randint(3, 256, (2, 10))}


def build(config: str, model: str, options: dict[str, Any]) -> nn.Module:
    """A model of transformers by the names of its classes."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**options))


def _text(
    name: str, model: str, config: str, inputs: Callable[[], Inputs] = _tokens, **options: Any
) -> Network:
    axes = {0: "batch", 1: "length"}
    return Network(
        name=name,
        library="transformers",
        build=partial(build, config, model, options),
        inputs=inputs,
        dynamic={"input_ids": axes, "attention_mask": axes} if inputs is _tokens else {},
    )


NETWORKS: Final = (
    _text("bert", "BertForSequenceClassification", "BertConfig", **_SMALL),
    _text("roberta", "RobertaForMaskedLM", "RobertaConfig", **_SMALL),
    _text("distilbert", "DistilBertForSequenceClassification", "DistilBertConfig",
          vocab_size=256, dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    _text("albert", "AlbertForMaskedLM", "AlbertConfig", **_SMALL, embedding_size=32),
    _text("electra", "ElectraForTokenClassification", "ElectraConfig", **_SMALL,
          embedding_size=32),
    _text("mpnet", "MPNetModel", "MPNetConfig", **_SMALL),
    _text("deberta_v2", "DebertaV2ForTokenClassification", "DebertaV2Config", **_SMALL,
          relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=16,
          norm_rel_ebd="layer_norm", share_att_key=True, type_vocab_size=0),
    _text("xlm", "XLMModel", "XLMConfig", vocab_size=256, emb_dim=64, n_layers=2, n_heads=4,
          max_position_embeddings=128),
    _text("gpt2", "GPT2LMHeadModel", "GPT2Config", **_GPT, n_embd=64, n_layer=2, n_head=4,
          n_positions=128),
    _text("gpt_neo", "GPTNeoForCausalLM", "GPTNeoConfig", **_GPT, hidden_size=64,
          num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
          window_size=8, max_position_embeddings=128, intermediate_size=128),
    _text("gpt_neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", **_SMALL, use_cache=False),
    _text("llama", "LlamaForCausalLM", "LlamaConfig", **_DECODER),
    _text("mistral", "MistralForCausalLM", "MistralConfig", **_DECODER, sliding_window=8),
    _text("qwen2", "Qwen2ForCausalLM", "Qwen2Config", **_DECODER),
    _text("gemma", "GemmaForCausalLM", "GemmaConfig", **_DECODER, head_dim=16),
    _text("phi", "PhiForCausalLM", "PhiConfig", **_DECODER),
    _text("mixtral", "MixtralForCausalLM", "MixtralConfig", **_DECODER, num_local_experts=4),
    _text("opt", "OPTForCausalLM", "OPTConfig", **_GPT, hidden_size=64, num_hidden_layers=2,
          num_attention_heads=4, ffn_dim=128, max_position_embeddings=128,
          word_embed_proj_dim=64),
    _text("bloom", "BloomForCausalLM", "BloomConfig", **_GPT, hidden_size=64, n_layer=2,
          n_head=4),
    _text("mamba", "MambaForCausalLM", "MambaConfig", _no_padding, vocab_size=256,
          hidden_size=64, num_hidden_layers=2, state_size=8, use_cache=False),
    _text("t5", "T5ForConditionalGeneration", "T5Config", _pairs, vocab_size=256, d_model=64,
          d_kv=16, d_ff=128, num_layers=2, num_heads=4, use_cache=False),
    _text("bart", "BartForConditionalGeneration", "BartConfig", _pairs, vocab_size=256,
          d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
          decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
          max_position_embeddings=128, use_cache=False),
)  # fmt: skip
