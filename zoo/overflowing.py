"""T5 and Gemma as transformers has them, small, with drawn weights of which a few are large.

Their values leave fp16's range as those of ``overflowing_nets`` do. transformers has to be
installed, as it is for the zoo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from tests.overflowing_nets import HEADS, HIDDEN, LAYERS, WIDTH, WORDS, OverflowingNet
from zoo.libraries import prepare

prepare()
import transformers  # noqa: E402 - it reads the environment that was prepared

_T5: Final = ("input_ids", "decoder_input_ids")
_GEMMA: Final = ("input_ids",)


class Logits(nn.Module):
    """A model that gives its logits alone, and caches nothing."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *ids: Tensor) -> Tensor:
        """The logits for these inputs."""
        named = dict(zip(self.names, ids, strict=True))
        found: Tensor = self.model(**named, use_cache=False).logits
        return found


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model: Any = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for block in (*model.encoder.block, *model.decoder.block):
            *attentions, last = block.layer
            last.DenseReluDense.wi_0.weight *= 4.0
            last.DenseReluDense.wi_1.weight *= 6.0
            last.DenseReluDense.wo.weight *= 20_000.0
            for layer in attentions:
                own = getattr(layer, "SelfAttention", None) or layer.EncDecAttention
                own.o.weight *= 20_000.0
    return Logits(model, _T5)


def _gemma(kind: str, config: str) -> nn.Module:
    made = getattr(transformers, config)(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=WIDTH // HEADS,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: Any = getattr(transformers, kind)(made)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight *= 300.0
            layer.mlp.up_proj.weight *= 300.0
            if hasattr(layer, "post_feedforward_layernorm"):
                for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                    norm.weight += torch.rand(WIDTH) * 20_000.0
            else:  # Gemma's first version has no norms behind its blocks
                layer.mlp.down_proj.weight *= 20_000.0
                layer.self_attn.o_proj.weight *= 20_000.0
    return Logits(model, _GEMMA)


def _net(kind: str, config: str) -> OverflowingNet:
    return OverflowingNet(make=lambda: _gemma(kind, config), inputs=_GEMMA, dynamo=True)


NETS: Final[Mapping[str, OverflowingNet]] = {
    "transformers' t5": OverflowingNet(make=_t5, inputs=_T5),
    "transformers' gemma": _net("GemmaForCausalLM", "GemmaConfig"),
    "transformers' gemma 2": _net("Gemma2ForCausalLM", "Gemma2Config"),
    "transformers' gemma 3": _net("Gemma3ForCausalLM", "Gemma3TextConfig"),
}
