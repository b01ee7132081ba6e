"""Positions and coordinates at a model's limits: as near to fp32 as autocast is, or nearer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import finecast.torch as ft
from finecast.errors import RuleConflictError
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from tests.torch.planned import plan_of

pytestmark = [
    pytest.mark.usefixtures("fast_bf16"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

WIDTH = 32
LENGTH = 2048


class Rotary(nn.Module):
    """Rotary embeddings: ``angles`` makes them of the frequencies and the positions."""

    def __init__(self, angles: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        steps = torch.arange(0, WIDTH, 2) / WIDTH
        self.register_buffer("frequencies", 10000.0**-steps)
        self.angles = angles

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        half = self.angles(self.frequencies, ids)
        angles = torch.cat((half, half), -1)
        q, k = (self._turn(f(x), angles) for f in (self.q, self.k))
        return torch.softmax(q @ k.transpose(1, 2), -1) @ x

    @staticmethod
    def _turn(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-b, a), -1) * angles.sin()


def llama(frequencies: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    column = frequencies[None, :, None].float().expand(ids.shape[0], -1, 1)
    return (column @ ids[:, None, :].float()).transpose(1, 2)


def neox(frequencies: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(ids.shape[1], dtype=frequencies.dtype)
    return torch.einsum("i,j->ij", steps, frequencies)[None]


class Timestep(nn.Module):
    """The embedding of a diffusion model's time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        half = WIDTH // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        angles = t[:, None].float() * rates[None]
        features = torch.cat((angles.sin(), angles.cos()), -1)
        return self.second(nn.functional.silu(self.first(features)))


class Warp(nn.Module):
    """An image sampled where an optical flow points to."""

    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        height, width = a.shape[-2:]
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        at = torch.stack((x, y)).float()[None] + 4 * self.flow(torch.cat((a, b), 1))
        grid = torch.stack(
            (2 * at[:, 0] / (width - 1) - 1, 2 * at[:, 1] / (height - 1) - 1), -1
        )
        return nn.functional.grid_sample(b, grid, align_corners=True)


class Alibi(nn.Module):
    """A bias by position, made of a mask's cumulative sum as in Bloom."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = ((mask.cumsum(-1) - 1) * mask)[:, None, :]
        bias = torch.tensor(0.5) * places
        scores = self.q(x) @ self.k(x).transpose(1, 2) + bias
        return torch.softmax(scores, -1) @ x


class Buckets(nn.Module):
    """T5's buckets of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.q = nn.Embedding(16, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        far = (places[None] - places[:, None]).abs()
        steps = (torch.log(far.float() / 8 + 1e-6) / math.log(16) * 8).long()
        bucket = torch.where(far < 8, far, (8 + steps).clamp(max=15))
        scores = self.q(x) @ x.transpose(1, 2) + self.bias(bucket)[None, ..., 0]
        return torch.softmax(scores, -1) @ x


class Resized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(self.conv(x), scale_factor=1.7, mode="bilinear")


def cases() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    torch.manual_seed(0)
    x, ids = torch.randn(1, LENGTH, WIDTH), torch.arange(LENGTH)[None]
    images = torch.rand(2, 1, 3, 256, 256).unbind()
    return {
        "llama": (Rotary(llama), (x, ids)),
        "neox": (Rotary(neox), (x, ids)),
        "timestep": (Timestep(), (torch.tensor([999, 873, 1]),)),
        "warp": (Warp(), images),
        "alibi": (Alibi(), (x, torch.ones_like(ids))),
        "buckets": (Buckets(), (x[:, :512],)),
        "resized": (Resized(), (images[0],)),
    }


@pytest.mark.parametrize(
    ("name", "scope"), [("llama", "matmult"), *((name, "all") for name in cases())]
)
def test_as_accurate_as_autocast(name: str, scope: str) -> None:
    net, args = cases()[name]
    with torch.no_grad():
        wanted = net(*args)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = net(*args).float()
        got = ft.convert(net.eval(), args, policy=f"{scope}:bf16")(*args)
    errors = [float((y - wanted).norm() / wanted.norm()) for y in (got, autocast)]
    assert errors[0] <= 1.5 * errors[1]
    assert 0 < errors[0] < 0.02


def test_a_user_s_word_wins_but_over_kernels_that_are_wrong() -> None:
    def named(op: str) -> Policy:
        return replace(Policy.parse("all:bf16"), op_formats={op: Format.BF16})

    net, args = cases()["timestep"]
    plan = plan_of(ft.convert(net.eval(), args, policy=named("sin")))
    assert next(d.format for d in plan.decisions if d.op == "sin") is Format.BF16
    net, args = cases()["warp"]
    with pytest.raises(RuleConflictError, match="grid_sample"):
        ft.convert(net.eval(), args, policy=named("grid_sample"))
