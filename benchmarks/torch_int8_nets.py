"""Nets with real weights for int8 in PyTorch: a residual CNN on digits, and MiniLM."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

Data = tuple[torch.Tensor, torch.Tensor]

_EPOCHS: Final = 4


class Block(nn.Module):
    """A residual block: two convolutions, and one on the skip."""

    def __init__(self, channels: int, made: int, stride: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, made, 3, stride, 1)
        self.norm_one = nn.BatchNorm2d(made)
        self.two = nn.Conv2d(made, made, 3, 1, 1)
        self.norm_two = nn.BatchNorm2d(made)
        self.beside = nn.Conv2d(channels, made, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to as many made channels."""
        inner = torch.relu(self.norm_one(self.one(x)))
        return torch.relu(self.beside(x) + self.norm_two(self.two(inner)))


class Digits(nn.Sequential):
    """Three such blocks on images of 16 x 24."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            Block(width, width),
            Block(width, 2 * width, 2),
            Block(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, 10),
        )


def digits_data() -> tuple[Data, Data]:
    """Digits of scikit-learn, magnified: two thirds to train on, and the rest."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    x = x.repeat_interleave(2, 2).repeat_interleave(3, 3)
    y = torch.tensor(labels)
    seen = torch.arange(len(x)) % 3 != 0
    return (x[seen], y[seen]), (x[~seen], y[~seen])


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Train ``net`` for some epochs; returns it in evaluation mode."""
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(_EPOCHS):
        for chosen in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return net.eval()


class Layer(nn.Module):
    """A layer of BERT."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mixed = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm_one, self.norm_two = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width], and which tokens are seen."""

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = (split(part(x)) for part in (self.query, self.key, self.value))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.norm_one(x + self.mixed(found.transpose(1, 2).flatten(2)))
        return self.norm_two(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """all-MiniLM-L6-v2: the mean of the last layer's tokens, of length 1."""

    def __init__(self, words: int, width: int = 384, inner: int = 1536) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.kind = nn.Parameter(torch.zeros(width))
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(width, 12, inner) for _ in range(6))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, tokens], twice, to [batch, width]."""
        places = self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(self.words(ids) + places + self.kind)
        seen = (mask > 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        weights = mask[:, :, None].to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1))

    @classmethod
    def of_onnx(cls, path: str) -> MiniLM:
        """With the weights of an exported model."""
        import onnx
        from onnx import numpy_helper

        stored = {
            i.name: np.array(numpy_helper.to_array(i))
            for i in onnx.load(path).graph.initializer
        }
        products = sorted((n for n in stored if n.startswith("onnx::MatMul_")), key=_number)
        of = iter(products)
        found = {
            "words.weight": stored["m.embeddings.word_embeddings.weight"],
            "places.weight": stored["m.embeddings.position_embeddings.weight"],
            "kind": stored["m.embeddings.token_type_embeddings.weight"][0],
            "norm.weight": stored["m.embeddings.LayerNorm.weight"],
            "norm.bias": stored["m.embeddings.LayerNorm.bias"],
        }
        for k in range(6):
            theirs = f"m.encoder.layer.{k}."
            for own, name in _PRODUCTS.items():
                found[f"layers.{k}.{own}.weight"] = stored[next(of)].T
                found[f"layers.{k}.{own}.bias"] = stored[f"{theirs}{name}.bias"]
            for own, name in _NORMS.items():
                for part in ("weight", "bias"):
                    found[f"layers.{k}.{own}.{part}"] = stored[f"{theirs}{name}.{part}"]
        net = cls(len(found["words.weight"]))
        net.load_state_dict({n: torch.tensor(a.copy()) for n, a in found.items()})
        return net.eval()


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


# In the order in which the export numbers their weights.
_PRODUCTS: Final = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mixed": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}
_NORMS: Final = {"norm_one": "attention.output.LayerNorm", "norm_two": "output.LayerNorm"}
