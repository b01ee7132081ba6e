"""Pauses of the garbage collector: what they leave behind is collected all the same."""

from __future__ import annotations

import gc

import pytest

from finecast.frontends import collection
from finecast.frontends.collection import paused_collection


def _cycles(count: int) -> None:
    for _ in range(count):
        cycle: list[object] = []
        cycle.append(cycle)


@pytest.mark.long
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


def test_no_list_refers_to_what_other_threads_are_making(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tuple that a list of all objects refers to cannot be made to the end."""

    def listed(*_: object) -> list[object]:
        raise AssertionError("all objects were listed")

    for name in ("get_objects", "get_referrers", "get_referents"):
        monkeypatch.setattr(gc, name, listed)
    monkeypatch.setattr(collection._Uncollected, "count", 1)
    monkeypatch.setattr(collection._Uncollected, "limit", 0)
    with paused_collection():
        made = tuple(object() for _ in range(3))
    assert len(made) == 3
    assert collection._Uncollected.limit >= 100_000  # a pause before which was collected


def test_a_pause_does_not_walk_all_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts frozen objects one by one, which takes long in a large process."""
    counts: list[int] = []
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    with paused_collection(), paused_collection(keeps=False):
        _cycles(10)
    assert not any(counts)


def test_what_the_host_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with paused_collection():
            _cycles(10)
        assert gc.get_freeze_count() == before > 0
    finally:
        gc.unfreeze()
