"""Which outputs show no error whatever the model computes, by how they follow the inputs."""

from __future__ import annotations

import numpy as np
import pytest

from finecast.data.response import blurred, untold
from finecast.numbers.formats import Format

BF16 = Format.BF16.unit_roundoff
ONES = np.ones(64, np.float32)


def said(error: float, moved: float, near: float, limit: float = 0.05) -> tuple[str, ...]:
    """What is said of one output, by its error and how it changes with other inputs."""
    return untold(
        ({"y": ONES}, {"y": ONES * np.float32(1 + error)}),
        {"y": limit},
        BF16,
        {"y": moved},
        lambda: {"y": ONES * np.float32(1 + near)},
    )


@pytest.mark.parametrize("error", [0.0, 0.003])
def test_a_constant_shows_no_error(error: float) -> None:
    (text,) = said(error, moved=0.0, near=0.0)
    assert "output 'y' is the same with other inputs" in text


def test_a_change_that_rounding_may_make_is_told_with_its_size() -> None:
    (text,) = said(error=0.02, moved=0.037, near=0.002)
    assert "changes by only 0.037 with other inputs" in text
    assert "constant" not in text


def test_a_small_change_shows_an_error_that_is_far_smaller() -> None:
    """The scores of a softmax that was never trained, all of them about 1 in 1000."""
    assert said(error=0.001, moved=0.037, near=0.002) == ()


def test_an_output_that_no_format_rounded_follows_its_inputs() -> None:
    """Noise of 2% on one addend is less than a digit of bf16 on the sum."""
    assert said(error=0.0, moved=0.3, near=0.003) == ()


def test_a_saturated_output_is_told_as_that() -> None:
    (text,) = said(error=0.0, moved=0.9, near=0.0)
    assert "stays as it is where inputs change by 2% (saturated)" in text


def test_noise_on_the_largest_numbers_is_no_warning() -> None:
    feeds = blurred({"x": np.full(64, np.finfo(np.float32).max)})
    assert feeds is not None
    assert np.isinf(feeds["x"]).any()
