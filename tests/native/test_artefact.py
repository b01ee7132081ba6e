"""Where a model may be written, and what is told of its numbers: those of its worst output."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from finecast.errors import UsageError
from finecast.native.artefact import Destination, compare

WANTED = np.full(4, 2.0, np.float32)
OFF = {"exact": WANTED, "near": WANTED + 0.125, "far": WANTED + 0.5}


@pytest.mark.parametrize("order", list(itertools.permutations(OFF)))
def test_the_worst_output_decides(order: tuple[str, ...]) -> None:
    got, wanted = {n: OFF[n] for n in order}, dict.fromkeys(order, WANTED)
    found = compare("engine", got, wanted)
    assert (found.max_abs_error, found.relative_error) == (0.5, 0.25)


def test_tensors_of_another_model_are_not_replaced(tmp_path: Path) -> None:
    path, data = tmp_path / "low.onnx", tmp_path / "low.onnx.data"
    Destination(path=path).check(apart=True)
    data.write_text("another model's")
    Destination(path=path).check()
    Destination(path=path, force=True).check(apart=True)
    with pytest.raises(UsageError, match=r"low\.onnx\.data") as caught:
        Destination(path=path).check(apart=True)
    assert "force=True" in str(caught.value)


@pytest.mark.parametrize(("error", "told"), [(0.4, False), (0.6, True)])
def test_it_is_told_that_no_digit_agrees(error: float, told: bool) -> None:
    # accepted where a decision, or noise in fp32 itself, explains it: never without a word
    ones = np.ones(4, np.float32)
    found = compare("toy", {"a": ones, "b": ones * (1 + error)}, {"a": ones, "b": ones})
    assert ("no digit" in found.note) is told
    assert [*found.outputs] == ["b", "a"]  # the worst first
    assert found.outputs["b"] == found.relative_error == pytest.approx(error)
