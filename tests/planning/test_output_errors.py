"""Outputs that copy an input are told from those that say something of a model."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.planning.sensitivity import counted_outputs, squared_errors
from finecast.planning.slices import WHOLE

Array = NDArray[np.generic]
RNG = np.random.default_rng(0)
PAST = RNG.standard_normal((2, 3, 8, 4)).astype(np.float32)
NEW = RNG.standard_normal((2, 3, 2, 4)).astype(np.float32)
LOGITS = RNG.standard_normal((2, 5)).astype(np.float32)


def written_over(cache: Array) -> Array:
    found = cache.copy()
    found[:, :, :2] = NEW
    return found


CACHES: dict[str, Array] = {
    "grown at its end": np.concatenate([PAST, NEW], axis=2),
    "grown at its start": np.concatenate([NEW, PAST], axis=2),
    "moved on by two rows": np.concatenate([PAST[:, :, 2:], NEW], axis=2),
    "longer and moved on": np.concatenate([PAST[:, :, 1:], NEW], axis=2),
    "written over at its start": written_over(PAST),
    "itself": PAST,
    "its end": PAST[:, :, 3:],
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_came_in_is_not_counted(name: str) -> None:
    assert counted_outputs([LOGITS, PAST], [CACHES[name], LOGITS + 1]) == {1}


OWN: dict[str, Array] = {
    "mostly new": np.concatenate([PAST[:, :, :1], NEW, NEW], axis=2),
    "rounded": (PAST * np.float32(1.001)),
    "all 0": np.zeros_like(PAST),
    "of another shape": RNG.standard_normal((2, 3)).astype(np.float32),
    "a cache that was all 0": np.concatenate([0 * PAST, NEW], axis=2),
    "of another type": PAST.astype(np.float64),
    "empty": PAST[:0],
}


@pytest.mark.parametrize("name", OWN)
def test_what_the_model_computes_is_counted(name: str) -> None:
    inputs = [0 * PAST if "all 0" in name else PAST]
    assert counted_outputs(inputs, [OWN[name], LOGITS]) == {0, 1}


def test_where_every_output_is_a_copy_all_are_counted() -> None:
    assert counted_outputs([PAST], [PAST, np.array([1]), CACHES["itself"]]) == {0, 2}


def test_errors_are_told_of_the_outputs_counted() -> None:
    exact = [PAST, LOGITS]
    off = [1.5 * PAST, 1.25 * LOGITS]
    both = {(0, WHOLE): 0.25, (1, WHOLE): 0.0625}
    assert squared_errors(off, exact) == pytest.approx(both)
    assert squared_errors(off, exact, {1}) == pytest.approx({(1, WHOLE): 0.0625})
