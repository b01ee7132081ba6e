"""Networks for the PyTorch benchmarks, in plain torch and with random weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name


class EncoderLayer(nn.Module):
    """A post-norm transformer layer as BERT has it."""

    def __init__(self, width: int = 768, heads: int = 12, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width] to the same."""
        batch, tokens, width = x.shape
        split = (batch, tokens, self.heads, width // self.heads)
        parts = (self.query, self.key, self.value)
        q, k, v = (part(x).view(split).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = self.attention_norm(x + self.dropout(self.output(mixed)))
        return self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Embeddings, layers, and a language model's head where ``head`` is set."""

    def __init__(
        self, layers: int, vocabulary: int, *, width: int = 768, heads: int = 12,
        dropout: float = 0.0, head: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary) if head else nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[batch, tokens] to [batch, tokens, width or vocabulary]."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class WithLoss(nn.Module):
    """A module and its cross entropy."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss, in fp32."""
        return F.cross_entropy(self.module(inputs).flatten(0, -2).float(), labels.flatten())


class Bottleneck(nn.Module):
    """ResNet-50's block."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        out = 4 * middle
        self.path = nn.Sequential(
            nn.Conv2d(channels, middle, 1, bias=False), nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.side = nn.Identity()
        if stride != 1 or channels != out:
            self.side = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual."""
        return self.act(self.path(x) + self.side(x))


class ResNet50(nn.Module):
    """[batch, 3, 224, 224] to 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)]
        blocks: list[nn.Module] = [*stem, nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = 64
        for middle, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for number in range(count):
                blocks.append(Bottleneck(channels, middle, stride if number == 0 else 1))
                channels = 4 * middle
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(F.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


class Depthwise(nn.Module):
    """MobileNet's first stages: depthwise and pointwise convolutions by turns."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        channels = 3
        for out, stride in ((32, 2), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
            groups = channels if channels > 3 else 1
            middle = channels if channels > 3 else out
            blocks += [
                nn.Conv2d(channels, middle, 3, stride, 1, groups=groups, bias=False),
                nn.BatchNorm2d(middle), nn.ReLU6(inplace=True),
                nn.Conv2d(middle, out, 1, bias=False),
                nn.BatchNorm2d(out), nn.ReLU6(inplace=True),
            ]  # fmt: skip
            channels = out
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        return self.head(self.body(x).mean((2, 3)))


class PoolsAndNorms(nn.Module):
    """Convolutions between group norms, softmax gates and average pools."""

    def __init__(self, width: int = 128, blocks: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(blocks))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores."""
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            pooled = F.avg_pool2d(norm(x), 3, 1, 1) - x
            x = x + F.gelu(conv(pooled)) * torch.softmax(x, 1)
        return self.head(x.mean((2, 3)))


def _norm_conv(
    inner: int, outer: int, size: int = 1, *, stride: int = 1, groups: int = 1
) -> nn.Module:
    conv = nn.Conv2d(inner, outer, size, stride, size // 2, groups=groups)
    return nn.Sequential(conv, nn.BatchNorm2d(outer))


class StarBlock(nn.Module):
    """Depthwise 7x7 convolutions around a product of two branches of four times the width."""

    def __init__(self, width: int) -> None:
        """``width``: channels in and out."""
        super().__init__()
        self.before = _norm_conv(width, width, 7, groups=width)
        self.one, self.two = (nn.Conv2d(width, 4 * width, 1) for _ in range(2))
        self.joined = _norm_conv(4 * width, width)
        self.after = nn.Conv2d(width, width, 7, padding=3, groups=width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the block's result to ``x``."""
        y = self.before(x)
        return x + self.after(self.joined(nn.functional.relu6(self.one(y)) * self.two(y)))


class StarNet(nn.Module):
    """StarNet-S1 of "Rewrite the Stars" (Ma et al., 2024): 2.9M parameters, 224x224."""

    def __init__(self) -> None:
        """Stages of 24, 48, 96 and 192 channels."""
        super().__init__()
        layers: list[nn.Module] = [_norm_conv(3, 32, 3, stride=2), nn.ReLU6()]
        inner = 32
        for stage, depth in enumerate((2, 2, 8, 3)):
            width = 24 * 2**stage
            layers += [_norm_conv(inner, width, 3, stride=2)]
            layers += [StarBlock(width) for _ in range(depth)]
            inner = width
        layers += [nn.BatchNorm2d(inner), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Linear(inner, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of 1,000 classes."""
        return self.layers(x)
