"""Trials are on disk when ``add`` returns, and survive whatever comes after."""

from __future__ import annotations

import math
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.errors import UsageError
from finecast.measure.study import Study, Trial, TrialKey, study_at
from finecast.planning.sensitivity import Sensitivity

KEY = TrialKey(model="m", plan="p", engine="openvino", data="d")
TRIAL = Trial(key=KEY, name="plan 1", metric=0.9, passed=True, latency_s=0.002, plan_json="{}")

# Adds trials until it is killed: says each number only after ``add`` returned.
_WRITER = """
import sys
from pathlib import Path
from finecast.measure.study import Study, Trial, TrialKey

study = Study(Path(sys.argv[1]))
for number in range(100_000):
    key = TrialKey(model="m", plan=str(number), engine="e", data="d")
    study.add(Trial(key=key, name="n", metric=number, passed=False, latency_s=None))
    print(number, flush=True)
"""


def test_what_was_added_is_found(tmp_path: Path) -> None:
    study = Study(tmp_path / "s.db")
    assert study.find(KEY) is None
    study.add(TRIAL)
    assert study.find(KEY) == TRIAL
    assert Study(tmp_path / "s.db").find(KEY) == TRIAL


@given(
    st.builds(
        Trial,
        key=st.just(KEY),
        name=st.text(st.characters(exclude_categories=["Cs"])),
        metric=st.floats(allow_nan=False),
        passed=st.booleans(),
        latency_s=st.none() | st.floats(0, 10),
        plan_json=st.just("{}"),
    )
)
def test_any_trial_round_trips(tmp_path_factory: pytest.TempPathFactory, trial: Trial) -> None:
    study = Study(tmp_path_factory.mktemp("study") / "s.db")
    study.add(trial)
    assert study.find(KEY) == trial


@pytest.mark.parametrize("part", ["model", "plan", "engine", "data"])
def test_every_part_of_the_key_counts(tmp_path: Path, part: str) -> None:
    study = Study(tmp_path / "s.db")
    study.add(TRIAL)
    assert study.find(replace(KEY, **{part: "other"})) is None


def test_the_same_key_replaces(tmp_path: Path) -> None:
    study = Study(tmp_path / "s.db")
    study.add(TRIAL)
    study.add(replace(TRIAL, metric=0.5))
    found = study.find(KEY)
    assert found is not None
    assert found.metric == 0.5


def test_a_trial_is_on_disk_after_add(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Study(path).add(TRIAL)
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
        # Immutable: only what is in the file itself, no journal beside it.
        assert db.execute("SELECT plan, metric FROM trials").fetchall() == [("p", 0.9)]


def test_kill_9_loses_no_trial(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    command = [sys.executable, "-c", _WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(5)]
        writer.kill()
        said += [int(line) for line in writer.stdout.read().splitlines()]
    study = Study(path)
    for number in said:
        found = study.find(replace(KEY, plan=str(number), engine="e"))
        assert found is not None
        assert found.metric == number


def test_a_study_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Study(path)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(UsageError, match=r"study version 99 is not \d+.*s\.db"):
        Study(path)


def test_another_file_is_no_study(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(UsageError, match=r"not a finecast study.*s\.db"):
        Study(path)


def test_another_program_s_database_is_no_study(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE photos (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"not a finecast study.*another program"):
        Study(path)
    assert path.read_bytes() == before


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"study cannot be used: No such file.*s\.db"):
        Study(tmp_path / "missing" / "s.db")


def test_a_metric_that_is_no_number_is_kept(tmp_path: Path) -> None:
    study = Study(tmp_path / "s.db")
    study.add(replace(TRIAL, metric=math.nan))
    found = study.find(KEY)
    assert found is not None
    assert math.isnan(found.metric)


def test_a_new_study_without_a_trial_is_not_left(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with suppress(KeyboardInterrupt), study_at(path, resume=False):
        assert path.exists()
        raise KeyboardInterrupt
    assert not path.exists()
    with study_at(path, resume=False) as study:
        assert study is not None
        study.add(TRIAL)
    assert Study(path).find(KEY) == TRIAL
    with study_at(None, resume=False) as study:
        assert study is None


def test_an_empty_study_of_before_is_left(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Study(path)
    with study_at(path, resume=True):
        pass
    assert path.exists()


def test_trials_are_counted_by_model(tmp_path: Path) -> None:
    study = Study(tmp_path / "s.db")
    study.add(TRIAL)
    study.add(replace(TRIAL, key=replace(KEY, model="other")))
    assert (study.count(), study.count(KEY.model), study.count("none")) == (2, 1, 0)


SENSITIVITY = Sensitivity(
    values=np.array([0.5, 1e-9]), weights=np.zeros(1), shared=np.array([-1e-9]), total=0.25
)


def test_sensitivities_are_found_again(tmp_path: Path) -> None:
    study = Study(tmp_path / "s.db")
    assert study.sensitivity("key") is None
    study.keep_sensitivity("key", SENSITIVITY)
    found = Study(tmp_path / "s.db").sensitivity("key")
    assert found is not None
    assert np.array_equal(found.values, SENSITIVITY.values)
    assert np.array_equal(found.shared, SENSITIVITY.shared)
    assert np.array_equal(found.weights, SENSITIVITY.weights)
    assert (found.total, found.probes) == (0.25, 0)
    assert study.sensitivity("other") is None


@pytest.mark.parametrize(
    "content", ["", "[]", '{"values": [-1], "weights": [], "total": 1}', '{"values": 1}']
)
def test_stored_sensitivities_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    study = Study(tmp_path / "s.db")
    with closing(sqlite3.connect(study.path)) as db, db:
        db.execute("INSERT INTO sensitivities VALUES ('key', ?)", (content,))
    with pytest.raises(UsageError, match="not a finecast study: stored sensitivities"):
        study.sensitivity("key")


def test_a_study_of_version_2_keeps_its_trials(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Study(path).add(TRIAL)
    with closing(sqlite3.connect(path)) as db, db:  # version 2 had trials alone
        db.execute("DROP TABLE sensitivities")
        db.execute("DROP TABLE records")
        db.execute("PRAGMA user_version = 2")
    study = Study(path)
    assert study.find(KEY) == TRIAL
    study.keep_sensitivity("key", SENSITIVITY)
    assert Study(path).sensitivity("key") is not None


def test_the_last_record_of_a_plan_counts(tmp_path: Path) -> None:
    study = Study(tmp_path / "s.db")
    assert study.record() is None
    study.keep("m", "p", "1")
    study.keep("m", "q", "2")
    study.keep("m", "p", "3")
    assert study.record("p") == study.record() == "3"
    assert study.record("q") == "2"
    assert study.record("none") is None


def test_a_study_of_version_2_is_read_and_gets_records(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Study(path).add(TRIAL)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE records")
        db.execute("PRAGMA user_version = 2")
    study = Study(path)
    assert study.find(KEY) == TRIAL
    study.keep("m", "p", "1")
    assert Study(path).record() == "1"
