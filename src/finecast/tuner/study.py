"""The stored trials: each is on disk before the next starts, whatever happens between."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finecast.errors import UsageError

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS trials (
    model TEXT NOT NULL, plan TEXT NOT NULL, engine TEXT NOT NULL, data TEXT NOT NULL,
    name TEXT NOT NULL, metric REAL NOT NULL, passed INTEGER NOT NULL, latency_s REAL,
    plan_json TEXT NOT NULL,
    PRIMARY KEY (model, plan, engine, data)
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialKey:
    """What makes two trials the same: model, plan, engine and data, by digest."""

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
    """Trials in an SQLite file. Law: what ``add`` returned from is on disk.

    Raises:
        UsageError: If the file is not a study of this release.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with self._connection() as db:
                version = int(db.execute("PRAGMA user_version").fetchone()[0])
                if version not in (0, _SCHEMA_VERSION):
                    raise UsageError(
                        f"study version {version} is not {_SCHEMA_VERSION}",
                        where=str(path),
                        fix="use another file name",
                    )
                db.execute(_SCHEMA)
                db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except sqlite3.Error as error:
            raise UsageError(
                f"not a finecast study: {error}", where=str(path), fix="use another file name"
            ) from error

    @contextmanager
    def _connection(self) -> Generator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path)) as db, db:
            yield db

    def find(self, key: TrialKey) -> Trial | None:
        """The stored trial, if there is one."""
        with self._connection() as db:
            row = db.execute(
                "SELECT name, metric, passed, latency_s, plan_json FROM trials"
                " WHERE model = ? AND plan = ? AND engine = ? AND data = ?",
                (key.model, key.plan, key.engine, key.data),
            ).fetchone()
        if row is None:
            return None
        name, metric, passed, latency_s, plan_json = row
        return Trial(
            key=key,
            name=str(name),
            metric=float(metric),
            passed=bool(passed),
            latency_s=latency_s,
            plan_json=str(plan_json),
        )

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
                    # SQLite takes NaN for NULL; as text it is read back.
                    "nan" if math.isnan(trial.metric) else trial.metric,
                    int(trial.passed),
                    trial.latency_s,
                    trial.plan_json,
                ),
            )
