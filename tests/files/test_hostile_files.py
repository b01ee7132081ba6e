"""A file of any kind that finecast saves, from anywhere: read, or refused in a short line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finecast.errors import ExitCode, FinecastError, UsageError
from finecast.measure.study import Study
from finecast.native.lock import Lock
from finecast.planning.plan import Plan
from finecast.reports.plan_report import PlanReport
from tests.measure.test_study import SENSITIVITY
from tests.native.test_drift import lock
from tests.reports import made
from tests.tampered import PYTHON, REMOVED, VALUES, places, with_value

SAMPLES = Path(__file__).parent.parent / "samples"
Reader = Callable[[str], object]


def _lock_reader(path: Path) -> Reader:
    def read(text: str) -> object:
        path.write_text(text, encoding="utf-8")
        return Lock.load(path)

    return read


def _sensitivity(path: Path) -> tuple[str, Reader]:
    study = Study(path)
    study.keep_sensitivity("key", SENSITIVITY)
    with closing(sqlite3.connect(path)) as db:
        (text,) = db.execute("SELECT content FROM sensitivities").fetchone()

    def read(text: str) -> object:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE sensitivities SET content = ?", (text,))
        return study.sensitivity("key")

    return text, read


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[str, Reader]]:
    """By kind the text of a file, and what reads such a text."""
    folder = tmp_path_factory.mktemp("files")
    new, old = folder / "new.lock.json", folder / "v1.lock.json"
    lock().write(new)
    for path in (SAMPLES / "locks").glob("v1.*"):
        shutil.copy(path, folder)
    return {
        "plan": ((SAMPLES / "plans" / "v11.json").read_text(), Plan.from_json),
        "older plan": ((SAMPLES / "plans" / "v10.json").read_text(), Plan.from_json),
        "lock": (new.read_text(), _lock_reader(new)),
        "older lock": (old.read_text(), _lock_reader(old)),
        "report": (
            json.dumps(made.content()),
            lambda text: PlanReport.from_json(text, where="report.json"),
        ),
        "sensitivity": _sensitivity(folder / "a.study.db"),
    }


KINDS = ("plan", "older plan", "lock", "older lock", "report", "sensitivity")
SEALED = ("plan", "lock")
# None of the words that are looked for in messages.
TEXTS = st.text("ab |.`$[]{}'\n\x1b\ud800\U0001f600")
JSON = st.recursive(
    st.sampled_from(VALUES) | TEXTS | st.floats() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=4,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_changed_value_is_read_or_refused_in_one_short_line(
    kinds: Mapping[str, tuple[str, Reader]], kind: str, data: st.DataObject
) -> None:
    text, read = kinds[kind]
    content: Any = json.loads(text)
    place = data.draw(st.sampled_from([*places(content)]))
    before = json.dumps(content, sort_keys=True)
    changed = with_value(content, place, data.draw(st.just(REMOVED) | JSON))
    refusal: FinecastError | None = None
    try:
        read(json.dumps(changed))
    except FinecastError as error:
        refusal = error
    if refusal is None:
        assert kind not in SEALED or json.dumps(changed, sort_keys=True) == before
        return
    assert refusal.exit_code == ExitCode.USAGE
    assert not PYTHON.search(refusal.line), refusal.line
    assert len(refusal.line) < 700, refusal.line


@pytest.mark.parametrize("kind", SEALED)
def test_no_key_of_a_file_with_a_checksum_can_be_removed(
    kinds: Mapping[str, tuple[str, Reader]], kind: str
) -> None:
    text, read = kinds[kind]
    read(text)
    for place in places(json.loads(text)):
        with pytest.raises(UsageError):
            read(json.dumps(with_value(json.loads(text), place, REMOVED)))
