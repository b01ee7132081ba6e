"""A session that remembers runs each feed once and hands out copies."""

from __future__ import annotations

import numpy as np

from finecast.engines.base import Array, Feeds, KernelTime, Session, TensorSpec
from finecast.engines.exact import CachedSession


class Doubling(Session):
    """y = 2 x, counting its runs."""

    inputs = (TensorSpec(name="x", dtype="fp32", shape=(None,)),)
    outputs = (TensorSpec(name="y", dtype="fp32", shape=(None,)),)

    def __init__(self) -> None:
        self.runs = 0

    def run(self, feeds: Feeds) -> dict[str, Array]:
        self.runs += 1
        return {"y": np.multiply(feeds["x"], 2, dtype=feeds["x"].dtype)}

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        del feeds, repeats
        return []


def feeds(*numbers: float) -> dict[str, Array]:
    return {"x": np.array(numbers, np.float32)}


def test_each_feed_is_run_once() -> None:
    inner = Doubling()
    session = CachedSession(inner)
    for _ in range(3):
        assert session.run(feeds(1, 2))["y"].tolist() == [2, 4]
        assert session.run(feeds(3))["y"].tolist() == [6]
    assert inner.runs == 2


def test_feeds_that_differ_in_type_shape_or_name_are_others() -> None:
    inner = Doubling()
    session = CachedSession(inner)
    one = np.zeros(4, np.float32)
    for x in (one, one.reshape(2, 2), one.view(np.int32), np.zeros(8, np.float16)):
        session.run({"x": x})
    session.run({"x": one, "z": one})
    assert inner.runs == 5
    session.run({"z": one, "x": one})
    assert inner.runs == 5


def test_what_the_caller_does_to_outputs_stays_with_it() -> None:
    session = CachedSession(Doubling())
    for _ in range(3):
        found = session.run(feeds(1))
        found["y"].fill(5)
        found.clear()
    assert session.run(feeds(1))["y"].tolist() == [2]


def test_beyond_the_limit_nothing_is_kept() -> None:
    inner = Doubling()
    session = CachedSession(inner, limit=8)
    for _ in range(2):
        session.run(feeds(1, 2))
        session.run(feeds(3, 4))
    assert inner.runs == 3


def test_by_default_outputs_of_a_megabyte_are_kept() -> None:
    inner = Doubling()
    session = CachedSession(inner)
    large = {"x": np.ones(1 << 18, np.float32)}
    for _ in range(3):
        session.run(large)
    assert inner.runs == 1
