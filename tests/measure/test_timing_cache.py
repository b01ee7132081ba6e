from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finecast.measure import timing_cache
from finecast.measure.timing_cache import TimingCache, TimingCacheError

SAMPLE = Path(__file__).resolve().parents[1] / "samples" / "prices-1.sql"


@pytest.fixture
def cache(tmp_path: Path) -> TimingCache:
    made = TimingCache.here("openvino", "CPU", tmp_path / "folder" / "timing_cache.db")
    assert made is not None
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.floats(0.95, 1.05), min_size=1, max_size=30))
def test_a_price_is_the_median_of_the_last_samples(
    cache: TimingCache, samples: list[float]
) -> None:
    cache.path.unlink(missing_ok=True)
    for one in samples:
        cache.add({"kernel": one})
    last = sorted(samples[-9:])
    middle = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
    assert cache.times(["kernel", "other"]) == {"kernel": middle}


def test_times_that_disagree_are_no_price(cache: TimingCache) -> None:
    for one in (1.0, 1.1, 2.0):
        cache.add({"kernel": one, "steady": 1.0})
    assert cache.times(["kernel", "steady"]) == {"steady": 1.0}


def test_another_machine_has_other_times(cache: TimingCache) -> None:
    cache.add({"kernel": 1.0})
    assert replace(cache, digest="another").times(["kernel"]) == {}
    other = TimingCache.here("onnxruntime", "CPU", cache.path)
    assert other is not None
    assert other.times(["kernel"]) == {}


def test_the_prices_used_least_recently_are_forgotten(
    cache: TimingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing_cache, "_MOST_TIMES", 3)
    now = iter(range(100))
    monkeypatch.setattr("finecast.measure.timing_cache.time.time", lambda: next(now))
    cache.add({"a": 1.0, "b": 1.0, "c": 1.0})
    cache.times(["a", "b"])
    cache.add({"d": 1.0})
    assert cache.times("abcd").keys() == {"a", "b", "d"}


@pytest.mark.parametrize(
    "content", [b"no database at all", b"SQLite format 3\0" + b"x" * 99, None]
)
def test_a_damaged_book_starts_anew(cache: TimingCache, content: bytes | None) -> None:
    cache.add({"kernel": 1.0})
    assert timing_cache.remove_damaged(cache.path) == []
    cache.path.write_bytes(cache.path.read_bytes()[:3000] if content is None else content)
    cache.add({"kernel": 1.0})
    assert cache.times(["kernel"]) == {}
    (text,) = timing_cache.remove_damaged(cache.path)
    assert str(cache.path) in text
    assert timing_cache.remove_damaged(cache.path) == []
    cache.add({"kernel": 1.0})
    assert cache.times(["kernel"]) == {"kernel": 1.0}


def test_a_database_of_another_program_is_left_alone(cache: TimingCache) -> None:
    cache.path.parent.mkdir()
    with closing(sqlite3.connect(cache.path)) as db, db:
        db.execute("CREATE TABLE prices (mine TEXT)")
    assert timing_cache.remove_damaged(cache.path) == []
    assert_unusable(cache, "a database of another program")
    with closing(sqlite3.connect(cache.path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("prices",)]


def test_a_cache_of_another_version_starts_anew(cache: TimingCache) -> None:
    cache.add({"kernel": 1.0})
    with closing(sqlite3.connect(cache.path)) as db, db:
        db.execute("DROP TABLE prices")
        db.execute("PRAGMA user_version = 99")
    assert cache.times(["kernel"]) == {}
    cache.add({"kernel": 2.0})
    assert cache.times(["kernel"]) == {"kernel": 2.0}


def test_a_cache_of_version_1_is_read(cache: TimingCache) -> None:
    """As the first release wrote it; the sample stays as it is."""
    cache.path.parent.mkdir()
    with closing(sqlite3.connect(cache.path)) as db:
        db.executescript(SAMPLE.read_text())
    assert replace(cache, digest="0123").times(["kernel"]) == {"kernel": 2.5e-05}
    assert [(m.label, m.kernels) for m in timing_cache.machines(cache.path)] == [("a CPU", 1)]


@pytest.mark.parametrize(
    "samples", ["", "[", "{}", "[null]", "[NaN]", "[-1.0]", "[Infinity]", '["1"]', "[" * 9999]
)
def test_samples_that_are_no_times_are_no_price(cache: TimingCache, samples: str) -> None:
    cache.add({"kernel": 1.0})
    with closing(sqlite3.connect(cache.path)) as db, db:
        db.execute("UPDATE prices SET samples = ?", (samples,))
    assert cache.times(["kernel"]) == {}
    cache.add({"kernel": 3.0})
    assert cache.times(["kernel"]) == {"kernel": 3.0}


def test_while_another_process_writes_there_are_no_prices(
    cache: TimingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing_cache, "_WAITS_S", 0.0)
    cache.add({"kernel": 1.0})
    with closing(sqlite3.connect(cache.path)) as db:
        db.execute("BEGIN IMMEDIATE")
        assert timing_cache.remove_damaged(cache.path) == []
        assert cache.times(["kernel"]) == {}
        cache.add({"kernel": 9.0})
        db.rollback()
    assert cache.times(["kernel"]) == {"kernel": 1.0}


def assert_unusable(cache: TimingCache, reason: str) -> None:
    """A search goes on without the cache and says so once; verbs on the cache fail."""
    told: list[str] = []
    cache = replace(cache, tell=told.append)
    cache.add({"kernel": 1.0})
    assert cache.times(["kernel"]) == {}
    (text,) = set(told)
    assert reason in text
    assert str(cache.path) in text
    for verb in (timing_cache.machines, timing_cache.clear):
        with pytest.raises(TimingCacheError, match=reason):
            verb(cache.path)


def test_a_file_in_place_of_the_folder(cache: TimingCache) -> None:
    cache.path.parent.write_text("a file in its place")
    cache.add({"kernel": 1.0})
    with pytest.raises(TimingCacheError, match=cache.path.name):
        timing_cache.clear(cache.path)
    assert cache.path.parent.read_text() == "a file in its place"


def test_a_folder_in_place_of_the_file(cache: TimingCache) -> None:
    cache.path.mkdir(parents=True)
    assert timing_cache.remove_damaged(cache.path) == []
    assert_unusable(cache, "unable to open database file")


def test_where_nothing_can_be_written_no_file_is_left(
    cache: TimingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk SQLite fails after it has made the file."""
    monkeypatch.setattr(timing_cache, "_TABLES", ("CREATE TABLE full",))
    cache.add({"kernel": 1.0})
    assert not cache.path.exists()


def test_listed_and_cleared(cache: TimingCache) -> None:
    assert timing_cache.machines(cache.path) == []
    cache.add({"a": 1.0, "b": 2.0})
    (machine,) = timing_cache.machines(cache.path)
    assert (machine.label, machine.kernels) == (cache.label, 2)
    assert "OpenVINO" in machine.label
    assert timing_cache.clear(cache.path) == 2
    assert timing_cache.machines(cache.path) == []
    assert json.dumps(cache.times(["a"])) == "{}"


def test_a_relative_cache_folder_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification has it."""
    assert timing_cache.misplaced() == []
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("LOCALAPPDATA", "here")
    path = timing_cache.default_path()
    assert path is None or path.is_absolute()
    (text,) = timing_cache.misplaced()
    assert "=here does not count" in text
