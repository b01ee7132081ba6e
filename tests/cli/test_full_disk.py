"""Where the disk is full the error names the output, and nothing half-written is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from finecast.errors import ExitCode
from tests.cli.conftest import Answer
from tests.full_disk import files_of_at_most

Finecast = Callable[..., Answer]


def saved_as(suffix: str, net: Path) -> Path:
    """A model in a file of this kind."""
    path = net.with_suffix(suffix)
    if suffix == ".pt2":
        module = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Softmax(-1)).eval()
        torch.export.save(torch.export.export(module, (torch.zeros(3, 16),)), path)
    return path


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_the_model(finecast: Finecast, net: Path, tmp_path: Path, suffix: str) -> None:
    model, folder = saved_as(suffix, net), tmp_path / "out"
    folder.mkdir()
    output = folder / f"low{suffix}"
    with files_of_at_most(100):
        answer = finecast("convert", model, "-o", output, "--auto-cast", "all")
    assert answer.code != ExitCode.DONE
    assert answer.err.count("\n") == 1
    assert f"({output})" in answer.err
    assert "cannot write the" in answer.err
    assert not list(folder.iterdir())


def test_the_study(finecast: Finecast, net: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    options = ["--data", data, "--metric", "agreement"]
    with files_of_at_most(100):
        answer = finecast("tune", net, "-o", folder / "low.onnx", *options)
    assert answer.code == ExitCode.USAGE
    assert "the study cannot be used" in answer.err
    assert str(folder / "low.study.db") in answer.err
    assert not list(folder.iterdir())
