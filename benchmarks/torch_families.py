"""Small nets, one of each family that people train, in plain torch with random weights.

Each has a few blocks of its architecture, of sizes that run in milliseconds, for figures that
do not depend on the machine: errors, bytes saved for the backward pass, casts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case, ids  # isort: skip

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from benchmarks.torch_nets import Bert
from benchmarks.torch_published import ConvNeXt, InvertedResidual, SqueezeExcite, conv_norm

WIDTH: Final = 256
HEADS: Final = 4
TOKENS: Final = 64
WORDS: Final = 1000
STD: Final = 0.02  # of the initial weights of BERT, GPT-2, LLaMA and ViT


def started(net: nn.Module) -> nn.Module:
    """``net`` with random weights as transformers have them before training."""
    for parameter in net.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=STD)
    return net


def heads_of(x: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, width] to [batch, heads, tokens, width of a head]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def joined(x: torch.Tensor) -> torch.Tensor:
    """The inverse of ``heads_of``."""
    return x.transpose(1, 2).flatten(2)


class RMSNorm(nn.Module):
    """Written out, as LLaMA's and T5's code has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] to the same."""
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + 1e-6))


class PreNorm(nn.Module):
    """A pre-norm layer of GPT-2 or ViT."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        q, k, v = (heads_of(y) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.output(joined(mixed))
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class Llama(nn.Module):
    """RMS norms, rotary positions, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(2))
        plain = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.qkv = nn.ModuleList(plain(WIDTH, WIDTH) for _ in range(3))
        self.output, self.gate = plain(WIDTH, WIDTH), plain(WIDTH, 3 * WIDTH)
        self.up, self.down = plain(WIDTH, 3 * WIDTH), plain(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        y = self.norms[0](x)
        q, k, v = (heads_of(part(y)) for part in self.qkv)
        half = q.shape[-1] // 2
        steps = torch.arange(x.shape[1], device=x.device).float()
        rates = 1e4 ** (-torch.arange(half, device=x.device).float() / half)
        angle = torch.outer(steps, rates).repeat(1, 2)
        q, k = (y * angle.cos() + _turned(y) * angle.sin() for y in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.output(joined(mixed))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


class T5(nn.Module):
    """Attention written out, with a bias by distance and no scale; a gated GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.distances = nn.Embedding(2 * TOKENS, HEADS)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        q, k, v = (heads_of(y) for y in self.qkv(self.norms[0](x)).chunk(3, -1))
        place = torch.arange(x.shape[1], device=x.device)
        bias = self.distances(place[None] - place[:, None] + TOKENS).permute(2, 0, 1)
        scores = q @ k.transpose(-1, -2) + bias
        x = x + self.output(joined(scores.float().softmax(-1).type_as(scores) @ v))
        y = self.norms[1](x)
        return x + self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))


class Deberta(nn.Module):
    """Disentangled attention: content with content, content with distance; post-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.distances = nn.Parameter(torch.zeros(TOKENS, WIDTH))
        self.output = nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-7) for _ in range(2))
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        q, k, v = (heads_of(y) for y in self.qkv(x).chunk(3, -1))
        far = heads_of(self.qkv(self.distances)[None, :, :WIDTH])
        scale = math.sqrt(3 * q.shape[-1])
        scores = q @ (k / scale).transpose(-1, -2)
        scores = scores + (q @ (far / scale).transpose(-1, -2))
        hidden = torch.ones(x.shape[1], x.shape[1], device=x.device).tril().logical_not()
        weights = scores.masked_fill(hidden, -1e4).softmax(-1)
        x = self.norms[0](self.output(joined(weights @ v)) + x)
        return self.norms[1](self.down(F.gelu(self.up(x))) + x)


class Words(nn.Module):
    """Embeddings, layers, and scores for every word."""

    def __init__(self, layer: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        started(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to [batch, tokens, words]."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Vit(nn.Module):
    """Patches, a class token, pre-norm layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.places = nn.Parameter(torch.zeros(1, 65, WIDTH))
        self.layers = nn.ModuleList(PreNorm(causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)
        started(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 64, 64] to class scores."""
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat((self.token.expand(len(x), -1, -1), y), 1) + self.places
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y)[:, 0])


class BasicBlock(nn.Module):
    """ResNet-18's block."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            *conv_norm(channels, out, 3, stride=stride, act=nn.ReLU),
            *conv_norm(out, out, 3, act=nn.Identity),
        )
        self.side = (
            nn.Identity()
            if stride == 1
            else conv_norm(channels, out, 1, stride=stride, act=nn.Identity)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual."""
        return F.relu(self.path(x) + self.side(x))


class UNet(nn.Module):
    """One level of a diffusion model's U-Net: group norms, SiLU, a concatenated skip."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        sizes = ((width, width), (2 * width, 2 * width), (3 * width, width))
        self.norms = nn.ModuleList(nn.GroupNorm(8, a) for a, _ in sizes)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in sizes)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, height, width] to the same."""
        blocks = [
            lambda y, n=n, c=c: c(F.silu(n(y)))
            for n, c in zip(self.norms, self.convs, strict=True)
        ]
        skip = self.stem(x)
        skip = skip + blocks[0](skip)
        deep = self.down(skip)
        deep = deep + blocks[1](deep)
        up = F.interpolate(deep, scale_factor=2.0, mode="nearest")
        return self.head(blocks[2](torch.cat((up, skip), 1)))


def resnet() -> nn.Module:
    """A small ResNet for 10 classes."""
    return nn.Sequential(
        *conv_norm(3, 32, 3, act=nn.ReLU),
        *(BasicBlock(*row) for row in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2))),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    """Three inverted residuals, the middle one with a squeeze."""
    blocks = [
        InvertedResidual(
            a, 3 * a, b, 3, stride, nn.Hardswish,
            SqueezeExcite(3 * a, 16, nn.ReLU, nn.Hardsigmoid) if squeeze else nn.Identity(),
        )
        for a, b, stride, squeeze in (
            (16, 24, 2, False), (24, 24, 1, True), (24, 40, 2, False)
        )
    ]  # fmt: skip
    stem = conv_norm(3, 16, 3, stride=2, act=nn.Hardswish)
    return nn.Sequential(
        stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10)
    )


def pictures(batch: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Random pictures of 64 x 64."""
    return lambda: (torch.randn(batch, 3, 64, 64),)


def texts(batch: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Random tokens."""
    return lambda: ids(batch, TOKENS)


def _convnext() -> nn.Module:
    return ConvNeXt(depths=(1, 1, 1, 1), widths=(32, 64, 96, 128))


FAMILIES: Final = {
    "bert": Case(
        net=lambda: started(Bert(2, WORDS, width=WIDTH, heads=HEADS, head=True)),
        inputs=texts(4),
    ),
    "deberta": Case(net=lambda: Words(Deberta), inputs=texts(4)),
    "t5": Case(net=lambda: Words(T5), inputs=texts(4)),
    "gpt2": Case(net=lambda: Words(lambda: PreNorm(causal=True)), inputs=texts(4)),
    "llama": Case(net=lambda: Words(Llama), inputs=texts(4)),
    "vit": Case(net=Vit, inputs=pictures(4)),
    "resnet": Case(net=resnet, inputs=pictures(8)),
    "mobilenet": Case(net=mobilenet, inputs=pictures(8)),
    "convnext": Case(net=_convnext, inputs=pictures(8)),
    "unet": Case(net=UNet, inputs=pictures(4)),
}
