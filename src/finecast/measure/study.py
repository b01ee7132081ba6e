"""A study: trials in an SQLite file, each of them on disk before the next starts."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from finecast.errors import UsageError, malformed
from finecast.files.saved import DATABASE, SavedPart, converted
from finecast.files.staging import staging
from finecast.planning.sensitivity import Sensitivity

# Version 2 added SQLite's application id, and keys with the user's code and the baseline;
# version 3 sensitivities and records. A study of version 2 is brought to 3 when it is opened.
_SCHEMA_VERSION: Final = 3
_UPGRADED: Final = 2
_COLUMNS: Final = {
    "model": "TEXT NOT NULL",
    "plan": "TEXT NOT NULL",
    "engine": "TEXT NOT NULL",
    "data": "TEXT NOT NULL",
    "name": "TEXT NOT NULL",
    "metric": "REAL NOT NULL",
    "passed": "INTEGER NOT NULL",
    "latency_s": "REAL",
    "plan_json": "TEXT NOT NULL",
}
_TABLE: Final = (
    f"CREATE TABLE trials ({', '.join(f'{n} {kind}' for n, kind in _COLUMNS.items())},"
    " PRIMARY KEY (model, plan, engine, data))"
)
# What each run found, in full, for reports: the run of a plan replaces the one before it.
_RECORDS: Final = (
    "CREATE TABLE records (model TEXT NOT NULL, plan TEXT NOT NULL, content TEXT NOT NULL,"
    " PRIMARY KEY (model, plan))"
)
_SENSITIVITIES: Final = (
    "CREATE TABLE sensitivities (key TEXT NOT NULL PRIMARY KEY, content TEXT NOT NULL)"
)
_TABLES: Final = (_TABLE, _SENSITIVITIES, _RECORDS)
# https://www.sqlite.org/fileformat2.html: user_version at byte 60, application_id at byte 68.
_HEADER: Final = struct.Struct(">16s44xi4xi28x")
_APPLICATION: Final = int.from_bytes(b"fine")

_FIX: Final = "use another file name"


def journals(study: str | Path | None) -> tuple[Path, ...]:
    """The file that SQLite keeps beside a study while it writes; none without a study."""
    return () if study is None else (Path(f"{Path(study)}-journal"),)


_MOST: Final = sys.float_info.max


class _StoredSensitivity(SavedPart):
    values: list[Annotated[float, msgspec.Meta(ge=0)]]
    weights: list[Annotated[float, msgspec.Meta(ge=0)]]
    shared: list[Annotated[float, msgspec.Meta(ge=-_MOST, le=_MOST)]]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialKey:
    """Identifies a trial by digests; trials of equal keys stand for one another.

    ``data`` covers the data or the user's evaluation code, and the baseline metric.
    """

    model: str
    plan: str
    engine: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan with its measured accuracy and speed."""

    key: TrialKey
    name: str
    metric: float
    passed: bool
    latency_s: float | None
    plan_json: str = ""


class Study:
    """Trials and sensitivities in an SQLite file.

    Law: once ``add`` has returned, its trial is on disk.

    An existing file is opened only if its first bytes say that finecast made it.

    Args:
        path: The file; created if there is none.
        resume: Whether trials of earlier runs count.

    Raises:
        UsageError: If the file is not a study of this release.
    """

    def __init__(self, path: Path, *, resume: bool = True) -> None:
        self.path = path
        self.resume = resume
        try:
            if not path.exists():
                _create(path)
            _check_header(path)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"the study cannot be used: {getattr(error, 'strerror', None) or error}",
                where=str(path),
                fix="give a file in a folder that exists, is writable and has room",
            ) from error
        with self._connection() as db:
            cursor = db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")
            tables = tuple(sql for (sql,) in cursor.fetchall())
            if tables != _TABLES[: max(len(tables), 1)]:
                raise _no_study(path, "its tables are others")
            for table in _TABLES[len(tables) :]:
                db.execute(table)
            db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    @contextmanager
    def _connection(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path)) as db, db:
                yield db
        except (sqlite3.Error, OverflowError) as error:
            raise UsageError(
                f"the study cannot be used: {error}",
                where=str(self.path),
                fix=f"{_FIX}, or remove it to start anew",
            ) from error

    def count(self, model: str | None = None) -> int:
        """Number of trials in the file, of one model if its digest is given."""
        where, values = ("", ()) if model is None else (" WHERE model = ?", (model,))
        with self._connection() as db:
            return int(db.execute(f"SELECT count(*) FROM trials{where}", values).fetchone()[0])

    def find(self, key: TrialKey) -> Trial | None:
        """The stored trial, if there is one.

        Raises:
            UsageError: If the stored row is not a trial.
        """
        with self._connection() as db:
            row = db.execute(
                "SELECT name, metric, passed, latency_s, plan_json FROM trials"
                " WHERE model = ? AND plan = ? AND engine = ? AND data = ?",
                (key.model, key.plan, key.engine, key.data),
            ).fetchone()
        if row is None:
            return None
        try:
            name, metric, passed, latency_s, plan_json = row
            return Trial(
                key=key,
                name=str(name),
                metric=float(metric),
                passed=bool(passed),
                latency_s=None if latency_s is None else float(latency_s),
                plan_json=str(plan_json),
            )
        except (TypeError, ValueError) as error:
            raise _no_study(self.path, f"a stored trial: {malformed(error)}") from error

    def add(self, trial: Trial) -> None:
        """Store a trial, in place of an earlier one with the same key."""
        with self._connection() as db:
            db.execute(
                "INSERT OR REPLACE INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    trial.key.model,
                    trial.key.plan,
                    trial.key.engine,
                    trial.key.data,
                    trial.name,
                    # SQLite stores NaN as NULL; as text it can be read back.
                    "nan" if math.isnan(trial.metric) else trial.metric,
                    int(trial.passed),
                    trial.latency_s,
                    trial.plan_json,
                ),
            )

    def keep(self, model: str, plan: str, content: str) -> None:
        """Store what a run found, as JSON, by the digests of its model and its plan."""
        with self._connection() as db:
            db.execute(
                "INSERT OR REPLACE INTO records VALUES (?, ?, ?)", (model, plan, content)
            )

    def record(self, plan: str | None = None) -> str | None:
        """What the last run found that ended with this plan, or with any; None if none did."""
        where, values = ("", ()) if plan is None else (" WHERE plan = ?", (plan,))
        with self._connection() as db:
            row = db.execute(
                f"SELECT content FROM records{where} ORDER BY rowid DESC LIMIT 1", values
            ).fetchone()
        return None if row is None else str(row[0])

    def sensitivity(self, key: str) -> Sensitivity | None:
        """The sensitivities that are kept under ``key``, none of whose runs is of now.

        Raises:
            UsageError: If what is stored is no sensitivities.
        """
        with self._connection() as db:
            query = "SELECT content FROM sensitivities WHERE key = ?"
            row = db.execute(query, (key,)).fetchone()
        if row is None:
            return None
        try:
            stored = converted(json.loads(row[0]), _StoredSensitivity)
        except (RecursionError, TypeError, ValueError) as error:
            raise _no_study(self.path, f"stored sensitivities: {malformed(error)}") from error
        return Sensitivity(
            values=np.array(stored.values),
            weights=np.array(stored.weights),
            shared=np.array(stored.shared),
            total=stored.total,
        )

    def keep_sensitivity(self, key: str, found: Sensitivity) -> None:
        """Store sensitivities under ``key``."""
        content = {
            "values": found.values.tolist(),
            "weights": found.weights.tolist(),
            "shared": found.shared.tolist(),
            "total": found.total,
        }
        with self._connection() as db:
            row = key, json.dumps(content)
            db.execute("INSERT OR REPLACE INTO sensitivities VALUES (?, ?)", row)


@contextmanager
def study_at(path: Path | None, *, resume: bool) -> Generator[Study | None]:
    """The study at ``path``, if one is named. One that is new and stays empty is removed.

    Raises:
        UsageError: As of ``Study``.
    """
    if path is None:
        yield None
        return
    new = not path.exists()
    study = Study(path, resume=resume)
    try:
        yield study
    finally:
        if new and path.is_file() and not study.count():
            path.unlink()


def _create(path: Path) -> None:
    """Put an empty study at ``path`` in one step."""
    with staging(path.parent) as folder:
        staged = folder / "study.db"
        with closing(sqlite3.connect(staged)) as db, db:
            for table in _TABLES:
                db.execute(table)
            db.execute(f"PRAGMA application_id = {_APPLICATION}")
            db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        staged.replace(path)


def _check_header(path: Path) -> None:
    """Raise UsageError unless finecast made the file; without SQLite, which might write."""
    if not path.is_file():
        raise _no_study(path, "no ordinary file")
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
    if len(start) < _HEADER.size:
        raise _no_study(path, "its header is missing")
    magic, version, application = _HEADER.unpack(start)
    if magic != DATABASE or application not in (0, _APPLICATION):
        raise _no_study(path, "its header is another one")
    if application == 0 and version != 1:  # version 1 had no application id
        raise _no_study(path, "another program's database")
    if version not in (_UPGRADED, _SCHEMA_VERSION):
        raise UsageError(
            f"study version {version} is not {_SCHEMA_VERSION}",
            where=str(path),
            fix=f"{_FIX}, or remove it to start anew",
        )


def _no_study(path: Path, why: str) -> UsageError:
    return UsageError(f"not a finecast study: {why}", where=str(path), fix=_FIX)
