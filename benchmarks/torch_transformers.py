"""Published transformers beside BERT, in plain torch and with random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

Pair = tuple[torch.Tensor, torch.Tensor]


class DecoderLayer(nn.Module):
    """A pre-norm layer of GPT-2 that reads the keys and values of earlier tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(
        self, x: torch.Tensor, past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, 1, width] and [2, batch, heads, past, head width] to x and its own two."""
        batch, tokens, width = x.shape
        split = (batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(self.norm_1(x)).view(split).permute(2, 0, 3, 1, 4).unbind(0)
        keys, values = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mixed = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.output(mixed.transpose(1, 2).reshape(x.shape))
        hidden = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + self.down(hidden), torch.stack((k, v))


class GPT2(nn.Module):
    """GPT-2 small (Radford et al., 2019), one step of generation with a cache."""

    def __init__(
        self, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 50257
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.words.weight

    def forward(
        self, ids: torch.Tensor, past: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, 1] and [layers, 2, batch, heads, past, head width] to scores, new cache."""
        place = torch.full_like(ids, past.shape[-2])
        x = self.words(ids) + self.places(place)
        kept: list[torch.Tensor] = []
        for layer, cache in zip(self.layers, past.unbind(0), strict=True):
            x, own = layer(x, cache)
            kept.append(own)
        return self.head(self.norm(x)), torch.stack(kept)
