from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finecast.measure import prices
from finecast.measure.prices import PriceBook, PriceBookError

SAMPLE = Path(__file__).resolve().parents[1] / "samples" / "prices-1.sql"


@pytest.fixture
def book(tmp_path: Path) -> PriceBook:
    made = PriceBook.here("openvino", "CPU", tmp_path / "folder" / "prices.db")
    assert made is not None
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(st.lists(st.floats(0.95, 1.05), min_size=1, max_size=30))
def test_a_price_is_the_median_of_the_last_samples(
    book: PriceBook, samples: list[float]
) -> None:
    book.path.unlink(missing_ok=True)
    for one in samples:
        book.add({"kernel": one})
    last = sorted(samples[-9:])
    middle = (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2
    assert book.prices(["kernel", "other"]) == {"kernel": middle}


def test_times_that_disagree_are_no_price(book: PriceBook) -> None:
    for one in (1.0, 1.1, 2.0):
        book.add({"kernel": one, "steady": 1.0})
    assert book.prices(["kernel", "steady"]) == {"steady": 1.0}


def test_another_machine_has_other_prices(book: PriceBook) -> None:
    book.add({"kernel": 1.0})
    assert replace(book, digest="another").prices(["kernel"]) == {}
    other = PriceBook.here("onnxruntime", "CPU", book.path)
    assert other is not None
    assert other.prices(["kernel"]) == {}


def test_the_prices_used_least_recently_are_forgotten(
    book: PriceBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "_MOST_PRICES", 3)
    now = iter(range(100))
    monkeypatch.setattr("finecast.measure.prices.time.time", lambda: next(now))
    book.add({"a": 1.0, "b": 1.0, "c": 1.0})
    book.prices(["a", "b"])
    book.add({"d": 1.0})
    assert book.prices("abcd").keys() == {"a", "b", "d"}


@pytest.mark.parametrize(
    "content", [b"no database at all", b"SQLite format 3\0" + b"x" * 99, None]
)
def test_a_damaged_book_starts_anew(book: PriceBook, content: bytes | None) -> None:
    book.add({"kernel": 1.0})
    assert prices.remove_damaged(book.path) == []
    book.path.write_bytes(book.path.read_bytes()[:3000] if content is None else content)
    book.add({"kernel": 1.0})
    assert book.prices(["kernel"]) == {}
    (text,) = prices.remove_damaged(book.path)
    assert str(book.path) in text
    assert prices.remove_damaged(book.path) == []
    book.add({"kernel": 1.0})
    assert book.prices(["kernel"]) == {"kernel": 1.0}


def test_a_database_of_another_program_is_left_alone(book: PriceBook) -> None:
    book.path.parent.mkdir()
    with closing(sqlite3.connect(book.path)) as db, db:
        db.execute("CREATE TABLE prices (mine TEXT)")
    assert prices.remove_damaged(book.path) == []
    assert_unusable(book, "a database of another program")
    with closing(sqlite3.connect(book.path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("prices",)]


def test_a_book_of_another_version_starts_anew(book: PriceBook) -> None:
    book.add({"kernel": 1.0})
    with closing(sqlite3.connect(book.path)) as db, db:
        db.execute("DROP TABLE prices")
        db.execute("PRAGMA user_version = 99")
    assert book.prices(["kernel"]) == {}
    book.add({"kernel": 2.0})
    assert book.prices(["kernel"]) == {"kernel": 2.0}


def test_a_book_of_version_1_is_read(book: PriceBook) -> None:
    """As the first release wrote it; the sample stays as it is."""
    book.path.parent.mkdir()
    with closing(sqlite3.connect(book.path)) as db:
        db.executescript(SAMPLE.read_text())
    assert replace(book, digest="0123").prices(["kernel"]) == {"kernel": 2.5e-05}
    assert [(m.label, m.prices) for m in prices.machines(book.path)] == [("a CPU", 1)]


@pytest.mark.parametrize(
    "samples", ["", "[", "{}", "[null]", "[NaN]", "[-1.0]", "[Infinity]", '["1"]', "[" * 9999]
)
def test_samples_that_are_no_times_are_no_price(book: PriceBook, samples: str) -> None:
    book.add({"kernel": 1.0})
    with closing(sqlite3.connect(book.path)) as db, db:
        db.execute("UPDATE prices SET samples = ?", (samples,))
    assert book.prices(["kernel"]) == {}
    book.add({"kernel": 3.0})
    assert book.prices(["kernel"]) == {"kernel": 3.0}


def test_while_another_process_writes_there_are_no_prices(
    book: PriceBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prices, "_WAITS_S", 0.0)
    book.add({"kernel": 1.0})
    with closing(sqlite3.connect(book.path)) as db:
        db.execute("BEGIN IMMEDIATE")
        assert prices.remove_damaged(book.path) == []
        assert book.prices(["kernel"]) == {}
        book.add({"kernel": 9.0})
        db.rollback()
    assert book.prices(["kernel"]) == {"kernel": 1.0}


def assert_unusable(book: PriceBook, reason: str) -> None:
    """A search goes on without the book and says so once; verbs on the book fail."""
    told: list[str] = []
    book = replace(book, tell=told.append)
    book.add({"kernel": 1.0})
    assert book.prices(["kernel"]) == {}
    (text,) = set(told)
    assert reason in text
    assert str(book.path) in text
    for verb in (prices.machines, prices.clear):
        with pytest.raises(PriceBookError, match=reason):
            verb(book.path)


def test_a_file_in_place_of_the_folder(book: PriceBook) -> None:
    book.path.parent.write_text("a file in its place")
    book.add({"kernel": 1.0})
    with pytest.raises(PriceBookError, match=book.path.name):
        prices.clear(book.path)
    assert book.path.parent.read_text() == "a file in its place"


def test_a_folder_in_place_of_the_file(book: PriceBook) -> None:
    book.path.mkdir(parents=True)
    assert prices.remove_damaged(book.path) == []
    assert_unusable(book, "unable to open database file")


def test_where_nothing_can_be_written_no_file_is_left(
    book: PriceBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk SQLite fails after it has made the file."""
    monkeypatch.setattr(prices, "_TABLES", ("CREATE TABLE full",))
    book.add({"kernel": 1.0})
    assert not book.path.exists()


def test_listed_and_cleared(book: PriceBook) -> None:
    assert prices.machines(book.path) == []
    book.add({"a": 1.0, "b": 2.0})
    (machine,) = prices.machines(book.path)
    assert (machine.label, machine.prices) == (book.label, 2)
    assert "OpenVINO" in machine.label
    assert prices.clear(book.path) == 2
    assert prices.machines(book.path) == []
    assert json.dumps(book.prices(["a"])) == "{}"


def test_a_relative_cache_folder_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG base directory specification has it."""
    assert prices.misplaced() == []
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("LOCALAPPDATA", "here")
    path = prices.default_path()
    assert path is None or path.is_absolute()
    (text,) = prices.misplaced()
    assert "=here does not count" in text
