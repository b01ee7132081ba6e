"""Boxes, class numbers and scores are told apart, and ordinary outputs stay whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.planning.detections import (
    DetectorOutputs,
    JoinedOutput,
    are_boxes,
    class_columns,
    detector_outputs,
    row_parts,
)
from finecast.planning.slices import WHOLE

Array = NDArray[np.float64]
RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal


def centres(*shape: int) -> Array:
    """Boxes within an image of size 1, by their middle and size."""
    size = RNG.uniform(0.02, 0.3, (*shape, 2))
    middle = size / 2 + RNG.uniform(0, 1, (*shape, 2)) * (1 - size)
    return np.concatenate([middle, size], axis=-1)


def corners(*shape: int) -> Array:
    """Boxes by two corners."""
    boxes = centres(*shape)
    middle, half = boxes[..., :2], boxes[..., 2:] / 2
    return np.concatenate([middle - half, middle + half], axis=-1)


def joined(*parts: Any) -> Array:
    return np.concatenate(parts, axis=-1)


def sigmoid(logits: Array) -> Array:
    return 1 / (1 + np.exp(-logits))


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


CHANCES, LOGITS = RNG.beta(0.3, 3, (2, 100, 20)), 3 * NORMAL((2, 100, 20))
SCORE, NUMBER = RNG.random((2, 100, 1)), RNG.integers(0, 80, (2, 100, 1))
FEW = RNG.integers(0, 3, (2, 100, 1))
ANY = sigmoid(NORMAL((2, 100, 4)))

ROWS: dict[str, tuple[Array, list[str], list[str], list[str]]] = {
    "normalized corners": (
        joined(corners(2, 100), CHANCES), ["[:, :, 4:24]"], [], ["[:, :, 0:4]"],
    ),
    "channels first": (
        np.moveaxis(joined(corners(2, 100), CHANCES), -1, 1), ["[:, 4:24]"], [], ["[:, 0:4]"],
    ),
    "normalized middles": (
        joined(centres(2, 100), CHANCES), ["[:, :, 4:24]"], [], ["[:, :, 0:4]"],
    ),
    "boxes behind logits": (
        joined(LOGITS, corners(2, 100)), ["[:, :, 0:20]"], [], ["[:, :, 20:24]"],
    ),
    "rows in pixels": (
        joined(640 * corners(2, 100), SCORE, NUMBER),
        [], ["[:, :, 5]"], ["[:, :, 0:4]", "[:, :, 4]"],
    ),
    "rows of three classes": (
        joined(640 * corners(2, 100), SCORE, FEW),
        [], ["[:, :, 5]"], ["[:, :, 0:4]", "[:, :, 4]"],
    ),
    "rows of one class": (
        joined(640 * corners(2, 100), SCORE, 0 * FEW),
        [], ["[:, :, 5]"], ["[:, :, 0:4]", "[:, :, 4]"],
    ),
    "normalized rows": (
        joined(corners(2, 100), SCORE, NUMBER),
        [], ["[:, :, 5]"], ["[:, :, 0:4]", "[:, :, 4]"],
    ),
    "image, class, score, box": (
        joined(0 * NUMBER[0], NUMBER[0], SCORE[0], corners(100))[None, None],
        [], ["[:, :, :, 0:2]"], ["[:, :, :, 3:7]", "[:, :, :, 2]"],
    ),
    "a box and its score": (
        joined(corners(2, 100), SCORE), [], [], ["[:, :, 0:4]", "[:, :, 4]"],
    ),
    "boxes alone": (640 * corners(60), [], [], [""]),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_parts_of_a_detectors_rows(name: str) -> None:
    output, scores, classes, numbers = ROWS[name]
    parts = row_parts(output.astype(np.float32))
    assert [*map(str, parts.scores)] == scores
    assert [*map(str, parts.classes)] == classes
    assert [*map(str, parts.numbers)] == numbers


def test_what_the_graph_joins_tells_boxes_that_no_law_does() -> None:
    """Of random weights boxes are any numbers between 0 and 1."""
    output = joined(ANY, CHANCES)
    assert row_parts(output).scores == (WHOLE,)
    for sizes in ((4, 20), (2, 2, 20), (2, 2, 1, 19)):
        parts = row_parts(output, JoinedOutput(axis=2, sizes=sizes))
        assert [*map(str, parts.scores)] == ["[:, :, 4:24]"]
    for sizes in ((24,), (12, 12), (1, 1, 1, 1, 20), (3, 21)):
        assert row_parts(output, JoinedOutput(axis=2, sizes=sizes)).scores == (WHOLE,)
    assert row_parts(output, JoinedOutput(axis=1, sizes=(4, 96))).scores == (WHOLE,)
    heads = joined(softmax(NORMAL((2, 100, 4))), CHANCES)
    assert row_parts(heads, JoinedOutput(axis=2, sizes=(4, 20))).scores == (WHOLE,)


def test_boxes_that_are_suspected_are_told() -> None:
    rare = 0.05 * CHANCES
    assert row_parts(joined(ANY, rare)).doubt
    assert not row_parts(joined(rare, ANY)).doubt
    assert not row_parts(softmax(joined(8 + ANY, rare))).doubt  # classes of these data
    assert not row_parts(joined(ANY, rare)[0]).doubt


PLAIN: dict[str, Array] = {
    "four logits": NORMAL((200, 4)),
    "four chances": softmax(NORMAL((200, 4))),
    "four labels": sigmoid(NORMAL((200, 4))),
    "labels of which two are rare": sigmoid(0.2 * NORMAL((200, 4)) + [-2, -1, 1, 2]),
    "labels of an untrained net": sigmoid(NORMAL((200, 24)) + 2 * NORMAL(24)),
    "four features": np.maximum(3 + NORMAL((200, 4)), 0),
    "a text's logits": 4 * NORMAL((2, 16, 500)),
    "a mask": sigmoid(np.cumsum(NORMAL((4, 64, 64)), axis=-1)),
    "a depth": np.abs(np.cumsum(NORMAL((4, 64, 64)), axis=-1)) / 40,
    "an image": sigmoid(np.cumsum(NORMAL((2, 3, 32, 32)), axis=-1)),
    "quantiles": np.cumsum(np.abs(NORMAL((200, 5))), axis=1),
    "a distribution": sigmoid(np.cumsum(np.abs(NORMAL((200, 6))), axis=1) - 2),
    "sorted": np.sort(RNG.random((300, 6)), axis=1),
    "the largest five": -np.sort(-RNG.random((300, 5)), axis=1),
    "a rising series": np.cumsum(RNG.random((300, 12)), 1) + 50 * RNG.random((300, 1)),
    "features": np.maximum(NORMAL((64, 512)), 0),
    "a dead class": np.maximum(NORMAL((200, 6)), 0) * [1, 1, 0, 1, 1, 1],
    "certain chances": softmax(300 * NORMAL((200, 6))),
    "whole numbers": np.rint(5 * NORMAL((200, 6))),
    "classes of these data": softmax(NORMAL((300, 6)) + 8 * np.eye(6)[np.arange(300) % 4]),
    "tags": NORMAL((2, 50, 9)),
    "an embedding": NORMAL((8, 384)) / 20,
    "few rows": joined(corners(10), CHANCES[0, :10]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_outputs_stay_whole(name: str) -> None:
    parts = row_parts(PLAIN[name].astype(np.float32))
    assert (parts.scores, parts.classes, parts.numbers) == ((WHOLE,), (), ())
    assert not parts.doubt


def test_no_law_of_boxes_is_met_by_chance() -> None:
    """Labels of which two are nearly always larger keep the order of corners as boxes do."""
    rng = np.random.default_rng(3)
    for count in (16, 100, 1000):
        for _ in range(40):
            bias, spread = rng.normal(0, 3, 4), rng.uniform(0.1, 2)
            assert not are_boxes(sigmoid(bias + spread * rng.standard_normal((count, 4))))
    assert are_boxes(corners(40))
    assert are_boxes(640 * corners(40))
    assert are_boxes(centres(400))
    assert not are_boxes(np.append(corners(40), [[0.9, 0.9, 0.1, 0.1]] * 4, axis=0))


def outputs(**arrays: Any) -> dict[str, NDArray[np.generic]]:
    return {name: np.asarray(array) for name, array in arrays.items()}


BOXES = 640 * corners(2, 100)
TOGETHER: dict[str, tuple[dict[str, NDArray[np.generic]], tuple[str, ...]]] = {
    "corners in pixels": (outputs(boxes=BOXES, scores=CHANCES), ("boxes", "scores")),
    "scores first": (outputs(scores=CHANCES, boxes=BOXES), ("boxes", "scores")),
    "middles in pixels": (
        outputs(boxes=640 * centres(2, 100), scores=CHANCES), ("boxes", "scores"),
    ),
    "channels first": (
        outputs(boxes=np.swapaxes(BOXES, 1, 2), scores=np.swapaxes(CHANCES, 1, 2)),
        ("boxes", "scores"),
    ),
    "a class axis": (
        outputs(boxes=corners(2, 100)[:, :, None], scores=CHANCES), ("boxes", "scores"),
    ),
    "no samples' axis": (outputs(boxes=BOXES[0], scores=LOGITS[0]), ("boxes", "scores")),
    "after NMS": (
        outputs(count=np.array([[7], [9]]), boxes=BOXES, scores=SCORE[..., 0],
                classes=NUMBER[..., 0]),
        ("boxes", "classes", "scores"),
    ),
    "classes in floats": (
        outputs(boxes=corners(2, 100), classes=NUMBER[..., 0] * 1.0, all=CHANCES),
        ("boxes", "all", "classes"),
    ),
    "a box with its score": (
        outputs(boxes=joined(BOXES, SCORE), labels=NUMBER[..., 0]), ("boxes", "labels"),
    ),
    "one box a sample": (
        outputs(box=640 * centres(64), kind=softmax(NORMAL((64, 10)))), ("box", "kind"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_the_outputs_of_a_detector(name: str) -> None:
    found = detector_outputs(TOGETHER[name][0], {2, 64})
    assert found is not None
    assert found.names == TOGETHER[name][1]
    assert found.certain


@pytest.mark.parametrize(
    ("first", "likely"),
    [(ANY, True), (NORMAL((2, 100, 4)), False), (softmax(NORMAL((2, 100, 4))), None)],
    ids=["between 0 and 1", "any numbers", "chances"],
)
def test_what_numbers_do_not_prove_is_likely_or_not(first: Array, likely: bool | None) -> None:
    found = detector_outputs(outputs(a=first, b=LOGITS), {2})
    assert (None if found is None else found.likely) == likely
    assert found is None or not found.certain
    assert detector_outputs(outputs(b=LOGITS, a=first), {2}) is None


NINE, WIDE = softmax(NORMAL((64, 9))), NORMAL((2, 16, 500))
HEADS = {
    "logits": outputs(a=NORMAL((64, 4)), b=NORMAL((64, 10))),
    "chances": outputs(a=softmax(NORMAL((64, 4))), b=softmax(NORMAL((64, 10)))),
    "labels": outputs(a=sigmoid(NORMAL((64, 4))), b=sigmoid(NORMAL((64, 10)))),
    "features first": outputs(a=30 * np.maximum(NORMAL((64, 128)), 0), b=NINE),
    "four amounts behind": outputs(a=NORMAL((64, 5)), b=100 * RNG.random((64, 4))),
    "a decoder": outputs(a=WIDE, k=NORMAL((2, 4, 16, 8)), v=NORMAL((2, 4, 16, 8))),
    "one output": outputs(a=BOXES),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_other_models_of_several_outputs_are_no_detectors(name: str) -> None:
    found: DetectorOutputs | None = detector_outputs(HEADS[name], {2, 64})
    assert found is None


def test_class_numbers_of_few_rows_are_whole_in_both_models() -> None:
    boxes, classes = 640 * corners(3), np.array([[3.0], [17], [0]])
    rows = joined(boxes, [[0.5], [0.75], [0.875]], classes)
    rows[:, 2] = 640  # clipped to the image
    assert class_columns(rows, rows + np.array([0, 0, -0.5, 0, 0, 1])) == [5]
    assert class_columns(rows, rows + 0.1) == []
    many = joined(640 * corners(30), RNG.integers(0, 9, (30, 1)))
    assert class_columns(many, many + 0.1) == [4]
    assert class_columns(np.rint(rows), rows) == []  # coordinates in whole pixels
    assert class_columns(classes, classes) == [0]
    assert class_columns(rows[:0], rows) == []
