"""Outputs are sliced where their numbers have different units, and nowhere else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.errors import UsageError
from finecast.planning import sensitivity
from finecast.planning.detections import row_parts
from finecast.planning.sensitivity import measure, squared_error, squared_errors
from finecast.planning.slices import WHOLE, Slice, check_axis, slices_of

Array = NDArray[np.generic]
RNG = np.random.default_rng(0)
BOXES = RNG.uniform(10, 640, (2, 4, 60))
SCORES = RNG.beta(0.1, 8, (2, 20, 60))
DETECTIONS = np.concatenate([BOXES, SCORES], axis=1).astype(np.float32)
ROWS = np.concatenate(
    [RNG.uniform(10, 640, (300, 4)), RNG.beta(1, 3, (300, 1)), RNG.integers(0, 80, (300, 1))],
    axis=1,
)
NORMAL = RNG.standard_normal((8, 32, 64))


def scaled(*sizes: float) -> Array:
    """Channels with these standard deviations."""
    return (NORMAL[:, : len(sizes)] * np.array(sizes)[:, None]).astype(np.float32)


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (DETECTIONS, ["[:, 0:4]", "[:, 4:24]"]),
        (np.swapaxes(DETECTIONS, 1, 2), ["[:, :, 0:4]", "[:, :, 4:24]"]),
        (DETECTIONS.astype(np.float16), ["[:, 0:4]", "[:, 4:24]"]),
        (ROWS, ["[:, 0:4,5]", "[:, 4]"]),
        (np.append(DETECTIONS, 0 * DETECTIONS[:, :1], axis=1), ["[:, 0:4]", "[:, 4:25]"]),
        (scaled(1e6, 1e3, 1e3, 1), ["[:, 0]", "[:, 1:3]", "[:, 3]"]),
    ],
    ids=[
        "channels first",
        "channels last",
        "fp16",
        "after NMS",
        "a dead class",
        "three units",
    ],
)
def test_numbers_of_different_units_are_apart(output: Array, names: list[str]) -> None:
    assert [str(one) for one in slices_of(output)] == names


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    return raised / raised.sum(axis=1, keepdims=True)


PLAIN: dict[str, Array] = {
    "logits": 4 * NORMAL[:, 0],
    "channels of growing size": scaled(*np.geomspace(0.1, 100, 32)),
    "an outlier of ten": scaled(*[1.0] * 31, 10),
    "a dead channel": scaled(*[30.0] * 31, 0),
    "nearly dead channels": scaled(*[30.0] * 28, 1e-4, 1e-5, 1e-6, 1e-9),
    "after a Relu": np.maximum(NORMAL * np.geomspace(0.01, 100, 32)[:, None] - 1, 0),
    "one class that always wins": softmax(
        np.concatenate([NORMAL[:, :9], 12 + NORMAL[:, 9:10]], axis=1)
    ),
    "loud and quiet samples": NORMAL * np.geomspace(1, 1e4, 8)[:, None, None],
    "few samples": DETECTIONS[:1, :, :4],
    "integers": (100 * DETECTIONS).astype(np.int64),
    "one vector": np.array([1000, 1, 1, 1], np.float32),
    "a mask's borders": np.tile(1 / (1 + np.exp(np.linspace(-12, 12, 64))), (1, 32, 1)),
    "empty": DETECTIONS[:0],
    "not finite": np.full((4, 4, 64), math.nan, np.float32),
}


@pytest.mark.parametrize("name", PLAIN)
def test_numbers_of_one_unit_stay_together(name: str) -> None:
    assert slices_of(PLAIN[name]) == (WHOLE,)


MASKED = np.concatenate([4 * NORMAL[:, 0], np.full((8, 8), -1e9)], axis=1)
DECIDING: dict[str, tuple[Array, list[str], list[str]]] = {
    "chances beside boxes": (DETECTIONS, ["[:, 4:24]"], ["[:, 0:4]"]),
    "logits beside boxes": (
        np.concatenate([BOXES, scaled(*[0.5] * 20)[:2, :, :60]], axis=1),
        ["[:, 4:24]"],
        ["[:, 0:4]"],
    ),
    "after NMS": (ROWS, [], ["[:, 5]", "[:, 0:4]", "[:, 4]"]),
    "plain logits": (PLAIN["logits"], [""], []),
    "masked logits": (np.tile(MASKED, (3, 1)), [""], []),
    "two classes, one of small logits": (
        np.stack([20 * NORMAL[0, 0], 0.1 * NORMAL[0, 1]], axis=1),
        [""],
        [],
    ),
    "two classes, one of which never wins": (
        np.stack([20 + NORMAL[0, 0], 0.1 * NORMAL[0, 1]], axis=1),
        [""],
        [],
    ),
    "a vocabulary padded by small logits": (
        np.concatenate([-20 + 10 * NORMAL[:, 0], 0.01 * NORMAL[:, 1, :4]], axis=1),
        [""],
        [],
    ),
}


@pytest.mark.parametrize("name", DECIDING)
def test_scores_decide_apart_where_other_units_are_larger(name: str) -> None:
    output, scores, others = DECIDING[name]
    parts = row_parts(output)
    assert [*map(str, parts.scores)] == scores
    assert [*map(str, (*parts.classes, *parts.numbers))] == others


def test_each_number_is_in_one_slice() -> None:
    parts = slices_of(scaled(1e6, 1e3, 1, 1e3, 1e6))
    indices = [i for part in parts for i in part.indices or ()]
    assert sorted(indices) == [0, 1, 2, 3, 4]
    assert [str(part) for part in parts] == ["[:, 0,4]", "[:, 1,3]", "[:, 2]"]
    assert str(WHOLE) == ""
    assert np.array_equal(WHOLE.of(DETECTIONS), DETECTIONS)
    assert np.array_equal(Slice(axis=1, indices=(0, 2)).of(ROWS), ROWS[:, [0, 2]])


def test_the_error_of_an_output_is_that_of_its_worst_slice() -> None:
    wrong = DETECTIONS.copy()
    wrong[:, 4:] *= 1.5
    whole = np.linalg.norm(wrong - DETECTIONS) / np.linalg.norm(DETECTIONS)
    assert whole < 1e-3
    assert math.sqrt(squared_error([wrong], [DETECTIONS])) == pytest.approx(0.5)


def test_each_index_of_an_axis_that_is_named_is_a_slice() -> None:
    dead = np.append(DETECTIONS, 0 * DETECTIONS[:, :1], axis=1)
    assert [str(one) for one in slices_of(dead, 1)] == [f"[:, {i}]" for i in range(24)]
    assert slices_of(dead, -2) == slices_of(dead, 1)
    assert slices_of(0 * dead, 1) == (WHOLE,)
    check_axis(2, [ROWS, dead])
    with pytest.raises(UsageError, match=r"no output has an axis 3.*have 2 or 3 axes"):
        check_axis(3, [ROWS, dead])


def test_new_rows_of_a_cache_are_not_hidden_by_large_old_ones() -> None:
    """Positions may be slices, too: what a model copies says nothing of what it computes."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((2, 4, 24, 8))
    cache[:, :, :20] = 300 + 20 * cache[:, :, :20]
    off = cache.copy()
    off[:, :, 20:] *= 1.25
    found = squared_errors([off], [cache])
    assert {str(part): error for (_, part), error in found.items()} == pytest.approx(
        {"[:, :, 0:20]": 0.0, "[:, :, 20:24]": 0.0625}
    )


def test_slices_are_found_once_for_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[int | None] = []

    def counted(wanted: NDArray[np.generic], named: int | None = None) -> tuple[Slice, ...]:
        sought.append(named)
        return slices_of(wanted, named)

    monkeypatch.setattr(sensitivity, "slices_of", counted)
    errors = measure(3, lambda switch: [DETECTIONS * (1 + 0.01 * switch.sum())])
    assert sought == [None]
    assert errors.probes == 4
    assert errors.values == pytest.approx([1e-4] * 3)


@pytest.mark.filterwarnings("error")
def test_numbers_near_the_largest_have_slices() -> None:
    """Garbage of an engine, and missing values stated as the largest number."""
    huge = np.full((64, 4), 3e38, np.float32)
    huge[:, 2:] = 1
    assert len(slices_of(huge)) == 2
