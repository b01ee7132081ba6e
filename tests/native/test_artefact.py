"""Where a model may be written, and what is told of its numbers: those of its worst output."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from finecast.errors import UsageError
from finecast.native.artefact import Destination, compare
from finecast.planning.free_rows import FreeOutput

WANTED = np.full(4, 2.0, np.float32)
OFF = {"exact": WANTED, "near": WANTED + 0.125, "far": WANTED + 0.5}


@pytest.mark.parametrize("order", list(itertools.permutations(OFF)))
def test_the_worst_output_decides(order: tuple[str, ...]) -> None:
    got, wanted = {n: OFF[n] for n in order}, dict.fromkeys(order, WANTED)
    found = compare("engine", got, wanted)
    assert (found.max_abs_error, found.relative_error) == (0.5, 0.25)


def test_both_errors_are_of_one_slice() -> None:
    """The largest of all was said beside the relative error of the worst."""
    wanted = np.concatenate([np.full((64, 8, 4), 500.0), np.full((64, 8, 2), 0.5)], axis=2)
    got = wanted + np.array([2, 2, 2, 2, 0.25, 0.25])
    found = compare("engine", {"y": got}, {"y": wanted})
    assert next(iter(found.outputs)) == "y[:, :, 4:6]"
    assert (found.max_abs_error, found.relative_error) == (0.25, 0.5)
    assert found.largest == {"y[:, :, 4:6]": 0.25, "y[:, :, 0:4]": 2.0}


def test_a_row_without_a_partner_is_as_large_in_both_errors() -> None:
    free = (FreeOutput(name="y", axes=(0,), group=0),)
    wanted = np.array([[3.0, 0.0], [0.0, 4.0]])
    found = compare("engine", {"y": wanted[:1]}, {"y": wanted}, free)
    assert (found.max_abs_error, found.relative_error) == (4, 0.8)


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


def test_values_that_are_no_floats_are_counted_where_they_differ() -> None:
    wanted = {"y": WANTED, "ids": np.arange(200).reshape(2, 100), "mask": WANTED > 1}
    got = wanted | {"ids": np.where(wanted["ids"] % 80 == 7, 0, wanted["ids"])}
    found = compare("engine", got, wanted)
    assert found.note == "output 'ids': 3 of 200 values differ"
    assert found.relative_error == 0
    selected = compare("engine", got | {"ids": got["ids"][:, :99]}, wanted)
    assert "output 'ids' has shape [2, 99], fp32's [2, 100]" in selected.note


def test_a_model_of_ids_alone_has_no_relative_error() -> None:
    ids = {"ids": np.arange(10), "words": np.array(["a", "b"], dtype=object)}
    found = compare("engine", ids, ids)
    assert found.relative_error is None
    assert "'ids': 0 of 10" in found.note
    assert "'words': 0 of 2" in found.note
    many = {f"out{n}": np.arange(3) for n in range(9)}
    told = compare("engine", {n: a + 1 for n, a in many.items()}, many).note
    assert told.count("3 of 3") == 4
    assert told.endswith("and 5 more outputs differ")
