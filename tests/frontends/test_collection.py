"""Pauses of the garbage collector: what they leave behind is collected all the same."""

from __future__ import annotations

import gc

import pytest

from finecast.frontends.collection import paused_collection


def _cycles(count: int) -> None:
    for _ in range(count):
        cycle: list[object] = []
        cycle.append(cycle)


def test_garbage_of_pauses_does_not_pile_up() -> None:
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(40 + 3 * before // 20_000):
        with paused_collection():
            _cycles(20_000)
    # At most as much garbage as there are objects: the pauses made three times that.
    assert len(gc.get_objects()) - before < before + 300_000


def test_the_collector_is_as_it_was_before() -> None:
    with paused_collection(), paused_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"), paused_collection():
        raise ValueError("x")
    assert gc.isenabled()
