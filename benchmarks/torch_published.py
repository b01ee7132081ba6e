"""Published architectures, after their papers, in plain torch and with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

Activation = Callable[[], nn.Module]


def conv_norm(
    channels: int, out: int, size: int, *, stride: int = 1, groups: int = 1, act: Activation
) -> nn.Sequential:
    """Convolution, batch norm, activation."""
    conv = nn.Conv2d(channels, out, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), act())


class SqueezeExcite(nn.Module):
    """Squeeze-excite: channels scaled by a function of their means (arXiv:1709.01507)."""

    def __init__(self, channels: int, middle: int, act: Activation, gate: Activation) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, middle, 1)
        self.up = nn.Conv2d(middle, channels, 1)
        self.act, self.gate = act(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, channels, height, width] to the same."""
        scale = self.down(F.adaptive_avg_pool2d(x, 1))
        return x * self.gate(self.up(self.act(scale)))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, squeeze-excite, projection."""

    def __init__(
        self, channels: int, middle: int, out: int, size: int, stride: int, act: Activation,
        squeeze: nn.Module,
    ) -> None:  # fmt: skip
        super().__init__()
        expand = (
            conv_norm(channels, middle, 1, act=act) if middle != channels else nn.Identity()
        )
        self.path = nn.Sequential(
            expand,
            conv_norm(middle, middle, size, stride=stride, groups=middle, act=act),
            squeeze,
            conv_norm(middle, out, 1, act=nn.Identity),
        )
        self.residual = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual where the shapes permit."""
        return x + self.path(x) if self.residual else self.path(x)


class _Stage(NamedTuple):
    size: int
    middle: int
    out: int
    squeeze: bool
    swish: bool
    stride: int


# Table 1 of arXiv:1905.02244.
_LARGE: Final = tuple(
    _Stage(*row)
    for row in (
        (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2),
        (3, 72, 24, False, False, 1), (5, 72, 40, True, False, 2),
        (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
        (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1),
        (3, 184, 80, False, True, 1), (3, 184, 80, False, True, 1),
        (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
        (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1),
        (5, 960, 160, True, True, 1),
    )
)  # fmt: skip


class MobileNetV3(nn.Module):
    """MobileNetV3-Large (arXiv:1905.02244)."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [conv_norm(3, 16, 3, stride=2, act=nn.Hardswish)]
        channels = 16
        for row in _LARGE:
            quarter = max(8, (row.middle // 4 + 4) // 8 * 8)
            blocks.append(
                InvertedResidual(
                    channels, row.middle, row.out, row.size, row.stride,
                    nn.Hardswish if row.swish else nn.ReLU,
                    SqueezeExcite(row.middle, quarter, nn.ReLU, nn.Hardsigmoid)
                    if row.squeeze
                    else nn.Identity(),
                )
            )  # fmt: skip
            channels = row.out
        self.body = nn.Sequential(*blocks, conv_norm(channels, 960, 1, act=nn.Hardswish))
        self.head = nn.Sequential(nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 224, 224] to class scores."""
        return self.head(self.body(x).mean((2, 3)))


class EfficientNetB0(nn.Module):
    """EfficientNet-B0 (arXiv:1905.11946)."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [conv_norm(3, 32, 3, stride=2, act=nn.SiLU)]
        channels = 32
        for expand, out, count, stride, size in (
            (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3),
            (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3),
        ):  # fmt: skip
            for number in range(count):
                middle = expand * channels
                squeeze = SqueezeExcite(middle, channels // 4, nn.SiLU, nn.Sigmoid)
                blocks.append(
                    InvertedResidual(
                        channels, middle, out, size, stride if number == 0 else 1, nn.SiLU,
                        squeeze,
                    )
                )  # fmt: skip
                channels = out
        self.body = nn.Sequential(*blocks, conv_norm(channels, 1280, 1, act=nn.SiLU))
        self.head = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 224, 224] to class scores."""
        return self.head(self.body(x).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7 x 7, layer norm over channels, two products, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        # Training starts from 1e-6; in a trained net the scale is of the order of 0.1.
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Residual."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """[batch, channels, height, width] to the same."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """ConvNeXt-T (arXiv:2201.03545)."""

    def __init__(
        self, depths: Sequence[int] = (3, 3, 9, 3), widths: Sequence[int] = (96, 192, 384, 768)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelNorm(widths[0])]
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if number:
                before = widths[number - 1]
                layers += [ChannelNorm(before), nn.Conv2d(before, width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 224, 224] to class scores."""
        return self.head(self.norm(self.body(x).mean((2, 3))))


class PoolFormerBlock(nn.Module):
    """Average pooling mixes positions, two convolutions mix channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for _ in range(2))
        self.up = nn.Conv2d(width, 4 * width, 1)
        self.down = nn.Conv2d(4 * width, width, 1)
        # Training starts from 1e-5; see ConvNeXtBlock.
        self.scales = nn.ParameterList(torch.full((width, 1, 1), 0.1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two residuals."""
        y = self.norms[0](x)
        pooled = F.avg_pool2d(y, 3, 1, 1, count_include_pad=False) - y
        x = x + self.scales[0] * pooled
        return x + self.scales[1] * self.down(F.gelu(self.up(self.norms[1](x))))


class PoolFormer(nn.Module):
    """PoolFormer-S12 (arXiv:2111.11418)."""

    def __init__(
        self, depths: Sequence[int] = (2, 2, 6, 2), widths: Sequence[int] = (64, 128, 320, 512)
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 7, 4, 2)]
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if number:
                layers.append(nn.Conv2d(widths[number - 1], width, 3, 2, 1))
            layers += [PoolFormerBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*layers)
        self.norm = nn.GroupNorm(1, widths[-1])
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 224, 224] to class scores."""
        return self.head(self.norm(self.body(x)).mean((2, 3)))


class DenseLayer(nn.Module):
    """Batch norm before each convolution; the result is concatenated to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth), nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """More channels."""
        return torch.cat((x, self.path(x)), 1)


class DenseNet121(nn.Module):
    """DenseNet-121 (arXiv:1608.06993)."""

    def __init__(self, growth: int = 32) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, 2, 3, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]  # fmt: skip
        for number, depth in enumerate((6, 12, 24, 16)):
            if number:
                layers += [nn.BatchNorm2d(channels), nn.ReLU()]
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(depth):
                layers.append(DenseLayer(channels, growth))
                channels += growth
        self.body = nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 3, 224, 224] to class scores."""
        return self.head(self.body(x).mean((2, 3)))
