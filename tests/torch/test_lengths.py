"""Programs are verified at the upper bounds of their free sizes, too."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.export import Dim

import finecast
from finecast.errors import WrongNumbersError
from finecast.native.torch.model import longest

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LENGTH = 256


class Positions(nn.Module):
    """Learned positions, the last of which are large."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, 8)
        self.out = nn.Linear(8, 4)
        with torch.no_grad():
            self.places.weight[:] = 1
            self.places.weight[LENGTH - 8 :] = last

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        place = self.places(ids)
        return self.out(torch.sqrt(place * place) + x)


def program(last: float, bound: int | None) -> torch.export.ExportedProgram:
    example = (torch.randn(2, 6, 8), torch.arange(6)[None].expand(2, 6).contiguous())
    n = Dim("n", min=2, max=bound)
    return torch.export.export(
        Positions(last).eval(), example, dynamic_shapes=({1: n}, {1: n})
    )


def test_inputs_reach_the_bound_and_positions_count_on() -> None:
    given = program(1, LENGTH)
    example = given.example_inputs
    assert example is not None
    found = longest(given, example)
    assert found is not None
    (x, ids), kwargs = found[0]
    assert (x.shape, ids.shape, kwargs) == ((2, LENGTH, 8), (2, LENGTH), {})
    assert ids[1].tolist() == list(range(LENGTH))
    assert found[1] == {"x.1": LENGTH}
    assert longest(program(1, 6), example) is None
    assert longest(program(1, None), example) is None


def test_what_breaks_near_the_bound_alone_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for last in (1, 400):
        torch.export.save(program(last, LENGTH), tmp_path / f"{last}.pt2")
    done = finecast.convert(tmp_path / "1.pt2", tmp_path / "low.pt2", "all:fp16")
    assert done.verified.sizes == {"x.1": LENGTH}
    with pytest.raises(WrongNumbersError, match=f"at .*={LENGTH} .*NaN or Inf"):
        finecast.convert(tmp_path / "400.pt2", tmp_path / "bad.pt2", "all:fp16")
    assert not (tmp_path / "bad.pt2").exists()


def test_a_bound_that_the_program_itself_misses_is_said(tmp_path: Path) -> None:
    torch.export.save(program(1, 2 * LENGTH), tmp_path / "m.pt2")
    done = finecast.convert(tmp_path / "m.pt2", tmp_path / "low.pt2", "all:bf16")
    assert f"does not run at x.1={2 * LENGTH}" in done.verified.note


class Saturated(nn.Module):
    """Scores that are far apart, or numbers that are all the same."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.out(x)
        return torch.softmax(scores * self.scale if self.scale else scores.clamp(9, 9), dim=-1)


@pytest.mark.parametrize(("scale", "said"), [(1.0, 0), (1e5, 1), (0.0, 1)])
def test_inputs_that_show_no_error_are_said_to_be_so(
    scale: float, said: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(Saturated(scale).eval(), (torch.randn(2, 8),)), path)
    done = finecast.convert(path, tmp_path / "low.pt2", "all:bf16")
    blind = [text for text in done.warnings if "cannot tell a right model" in text]
    assert len(blind) == said
