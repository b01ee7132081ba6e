"""What programs say of their inputs' numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from finecast.data.input_ranges import Normal, Whole, input_ranges
from finecast.native.torch.model import of_module

MEAN, DEVIATION = torch.tensor([10.0, 50.0, 90.0]), torch.tensor([20.0, 30.0, 40.0])
IMAGES = torch.zeros(2, 3, 8, 8)


def normed() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    norm.running_mean, norm.running_var = MEAN.clone(), DEVIATION.square()
    return nn.Sequential(norm, nn.Conv2d(3, 4, 3))


class Scaled(nn.Module):
    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", MEAN.reshape(3, 1, 1))
        self.register_buffer("deviation", DEVIATION.reshape(3, 1, 1))
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer((x - self.mean) / self.deviation)


@pytest.mark.parametrize("net", [normed(), Scaled()])
def test_norms_and_constants_say_what_the_input_was(net: nn.Module) -> None:
    found = input_ranges(of_module(net.eval(), ((IMAGES,), {})).file.captured("all").graph)
    (one,) = found.values()
    assert isinstance(one, Normal)
    assert one.mean.ravel().tolist() == pytest.approx(MEAN.tolist(), rel=1e-4)
    assert one.deviation.ravel().tolist() == pytest.approx(DEVIATION.tolist(), rel=1e-4)


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.permute(0, 3, 1, 2) / 255)


def test_bytes_and_tokens_reach_their_ends() -> None:
    model = of_module(Bytes().eval(), ((torch.zeros(2, 8, 8, 3),), {}))
    assert input_ranges(model.file.captured("all").graph) == {"x": Whole(last=255)}
    words = nn.Sequential(nn.Embedding(77, 8), nn.Linear(8, 3))
    model = of_module(words.eval(), ((torch.zeros(2, 4, dtype=torch.int64),), {}))
    assert [*input_ranges(model.file.captured("all").graph).values()] == [Whole(last=76)]
