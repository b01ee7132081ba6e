"""Outputs of several calls are told as of one."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from finecast.engines.base import Array, Feeds, Session, outputs_on
from finecast.planning.sensitivity import squared_error


class Doubling:
    """One output of rows, and one of their number."""

    def run(self, feeds: Feeds) -> dict[str, Array]:
        x = np.asarray(feeds["x"], np.float32)
        return {"y": 2 * x, "rows": np.array([len(x)])}


def session() -> Session:
    return cast("Session", Doubling())


def test_one_call_s_outputs_keep_their_shape() -> None:
    y, rows = outputs_on(session(), [{"x": np.ones((3, 2))}])
    assert y.shape == (3, 2)
    assert rows.tolist() == [3]


def test_an_error_is_of_samples_in_whatever_calls() -> None:
    """One sample alone whose output is next to 0 would be infinitely far off."""
    x = np.array([[1.0, 2.0], [1e-9, 0.0], [3.0, 1.0]], np.float32)
    off = x + np.float32(0.01)
    together = [{"x": x}], [{"x": off}]
    apart = [{"x": r[None]} for r in x], [{"x": r[None]} for r in off]
    errors = [
        squared_error(outputs_on(session(), off)[:1], outputs_on(session(), exact)[:1])
        for exact, off in (together, apart)
    ]
    assert errors[0] == pytest.approx(errors[1], rel=1e-6)
    assert errors[0] == pytest.approx(6e-4 / 15, rel=1e-3)
