"""Small transformers whose values leave fp16's range, as those of T5 and Gemma do.

Their weights are drawn, and a few are made large: T5's ``wo`` gave 66,246 where fp16 ends at
65,504 (huggingface/transformers#9295), and the residual stream of Gemma's models grows beyond
it by norms with large gains. In fp32 both compute ordinary numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

WIDTH: Final = 64
HEADS: Final = 4
HIDDEN: Final = 192
LAYERS: Final = 3
WORDS: Final = 211
LENGTH: Final = 24
_EACH: Final = WIDTH // HEADS


class RootMeanSquareNorm(nn.Module):
    """``x / rms(x)`` times its weight, plus ``one``: T5's norm, or with 1 that of Gemma."""

    def __init__(self, one: float = 0.0) -> None:
        super().__init__()
        self.one = one
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 - one))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * (self.weight + self.one) if self.one else self.weight * normed


class Attention(nn.Module):
    """Multi-head attention; without a source it attends to its own input."""

    def __init__(self, scale: float, *, rotary: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.scale, self.causal = scale, causal
        self.q, self.k, self.v, self.o = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        angles = torch.arange(LENGTH)[:, None] / 100.0 ** (torch.arange(_EACH // 2) / _EACH)
        angles = torch.cat([angles, angles], dim=-1) if rotary else torch.zeros(LENGTH, _EACH)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.rotary = rotary

    def _turned(self, x: Tensor) -> Tensor:
        if not self.rotary:
            return x
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return x * self.get_buffer("cos") + turned * self.get_buffer("sin")

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(y.shape[0], LENGTH, HEADS, _EACH).transpose(1, 2)

        read = x if source is None else source
        q, k = self._turned(heads(self.q(x))), self._turned(heads(self.k(read)))
        scores = q @ k.transpose(-1, -2) * self.scale
        if self.causal:
            mask = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
            scores = scores + mask
        mixed = scores.softmax(-1) @ heads(self.v(read))
        return self.o(mixed.transpose(1, 2).reshape(x.shape))


class GatedMlp(nn.Module):
    """GELU-gated feed-forward products, as of T5 1.1 and Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wi_1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = functional.gelu(self.wi_0(x), approximate="tanh")
        return self.wo(gate * self.wi_1(x))


class T5Layer(nn.Module):
    """Attention, attention to the encoder in a decoder, and products, each behind a norm."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RootMeanSquareNorm() for _ in range(2 + decodes))
        self.own = Attention(1.0, causal=decodes)
        self.cross = Attention(1.0) if decodes else None
        self.mlp = GatedMlp()

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = x + self.own(self.norms[0](x))
        if self.cross is not None:
            x = x + self.cross(self.norms[1](x), encoded)
        return x + self.mlp(self.norms[-1](x))


class T5(nn.Module):
    """An encoder and a decoder without biases, whose residual streams grow."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(T5Layer(decodes=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(T5Layer(decodes=True) for _ in range(LAYERS))
        self.encoder_norm, self.decoder_norm = RootMeanSquareNorm(), RootMeanSquareNorm()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        x, y = self.words(ids), self.words(decoder_ids)
        for layer in self.encoder:
            x = layer(x)
        encoded = self.encoder_norm(x)
        for layer in self.decoder:
            y = layer(y, encoded)
        return self.head(self.decoder_norm(y))


class GemmaLayer(nn.Module):
    """Attention and products, each between two norms; the second has large gains."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList(RootMeanSquareNorm(1.0) for _ in range(2))
        self.after = nn.ModuleList(RootMeanSquareNorm(1.0) for _ in range(2))
        self.attention = Attention(_EACH**-0.5, rotary=True, causal=True)
        self.mlp = GatedMlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after[0](self.attention(self.before[0](x)))
        return x + self.after[1](self.mlp(self.before[1](x)))


class Gemma(nn.Module):
    """A decoder with scaled embeddings, whose logits are capped by a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(GemmaLayer() for _ in range(LAYERS))
        self.norm = RootMeanSquareNorm(1.0)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) * WIDTH**0.5
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.head(self.norm(x)) / 30.0) * 30.0


def _t5() -> nn.Module:
    """What the blocks add to the stream is large, and most so what ``wo`` gives."""
    net = T5()
    with torch.no_grad():
        layers: list[Any] = [*net.encoder, *net.decoder]
        for layer in layers:
            for attention in filter(None, (layer.own, layer.cross)):
                attention.o.weight *= 20_000.0
            layer.mlp.wi_0.weight *= 4.0
            layer.mlp.wi_1.weight *= 6.0
            layer.mlp.wo.weight *= 20_000.0
    return net


def _gemma() -> nn.Module:
    """The products between the norms are large, and so are the gains of the second norms."""
    net = Gemma()
    with torch.no_grad():
        layers: list[Any] = [*net.layers]
        for layer in layers:
            layer.mlp.wi_0.weight *= 300.0
            layer.mlp.wi_1.weight *= 300.0
            for norm in layer.after:
                norm.weight += torch.rand(WIDTH) * 20_000.0
    return net


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowingNet:
    """A net, how its inputs are called, and the exporter that takes it."""

    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    dynamo: bool = False

    def module(self) -> nn.Module:
        """The net, always with the same weights."""
        torch.manual_seed(0)
        return self.make().eval()

    def data(self, samples: int = 8) -> dict[str, NDArray[np.generic]]:
        """Drawn words for each input."""
        draw = np.random.default_rng(1)
        return {n: draw.integers(0, WORDS, (samples, LENGTH)) for n in self.inputs}

    def example(self) -> tuple[Tensor, ...]:
        """The words as the net takes them."""
        return tuple(torch.from_numpy(a) for a in self.data().values())

    def export(self, path: Path) -> Path:
        """Write the net as ONNX, with 8 samples a call."""
        ids = self.example()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's exporter warns of itself
            torch.onnx.export(
                self.module(),
                ids,
                path,
                input_names=[*self.inputs],
                output_names=["logits"],
                dynamo=self.dynamo,
                external_data=False,
                verbose=False,
            )
        return path


NETS: Final[Mapping[str, OverflowingNet]] = {
    "t5": OverflowingNet(make=_t5, inputs=("ids", "decoder_ids")),
    "gemma": OverflowingNet(make=_gemma, inputs=("ids",)),
}
