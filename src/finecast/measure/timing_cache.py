"""Times of kernels that earlier runs measured on this machine: a file in the user's cache.

A profile of a model takes seconds, and models of a family run the same kernels. So each time
is kept by what it depends on: the kernel's implementation, the shapes, layouts and types of
what it reads and writes, its ops with their attributes; and by the machine with its engine.

Laws: times guide a search and decide nothing, as each model that is chosen was timed in its
own run. What was measured while other processes kept this one waiting is kept apart, and is
used on such a busy machine alone, for kernels of which nothing better is known: two runs there
choose among the same plans. Of a file that cannot be read or written, or that is the database
of another program, a search says so and goes on without it; one that is damaged starts anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from finecast.errors import FinecastError
from finecast.measure.environment import cpu_label, environment
from finecast.measure.timing import Demand
from finecast.plugin import title_of

_VERSION: Final = 1
_APPLICATION: Final = int.from_bytes(b"fcpb")
_KERNELS: Final = """CREATE TABLE prices (
    machine TEXT NOT NULL, kernel TEXT NOT NULL, samples TEXT NOT NULL,
    used_s INTEGER NOT NULL, PRIMARY KEY (machine, kernel)
)"""
_TABLES: Final = (
    "CREATE TABLE machines (digest TEXT PRIMARY KEY, label TEXT NOT NULL)",
    _KERNELS,
    "CREATE INDEX by_use ON prices (used_s)",
)
_SAMPLES: Final = (
    "SELECT kernel, samples FROM prices"
    " WHERE machine = ? AND kernel IN (SELECT value FROM json_each(?))"
)
_MACHINES: Final = (
    "SELECT label, count(*), max(used_s) FROM machines JOIN prices ON machine = digest"
    " GROUP BY label ORDER BY max(used_s) DESC"
)
_TRIM: Final = (
    "DELETE FROM prices WHERE rowid IN"
    " (SELECT rowid FROM prices ORDER BY used_s DESC, rowid DESC LIMIT -1 OFFSET ?)"
)
# Times that are kept, those used last: some 20 MB. A net of a hundred kernels in four formats
# has 400 at most.
_MOST_TIMES: Final = 100_000
# Samples of a time, those measured last: enough for a median that one outlier does not move.
_MOST_SAMPLES: Final = 9
# Samples further apart than this share of their median are measured again; but for what
# short kernels differ by from run to run, some of whose threads have to wake first.
_MOST_SPREAD: Final = 0.25
_WAKING_S: Final = 5e-6
# What stands before the kernels whose times are of a busy machine.
_BUSY: Final = "busy "
# Of SQLite's errors those that say so; others are of a file that is locked, or of no rights.
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_WAITS_S: Final = 2.0
"""For another process that writes; then the cache is not used."""
_FOLDER: Final = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
"""The variable that names the user's cache folder."""


class TimingCacheError(FinecastError):
    """A cache that cannot be read or written."""


def default_path() -> Path | None:
    """The file in the user's cache folder; None where the user has no home."""
    base = os.environ.get(_FOLDER, "")
    try:
        home = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    except RuntimeError:
        home = None
    folder = Path(base) if base and Path(base).is_absolute() else home
    return None if folder is None else folder / "finecast" / "timing_cache.db"


def misplaced() -> list[str]:
    """A text if the cache folder is not the one that a variable names, or is nowhere."""
    path, base = default_path(), os.environ.get(_FOLDER, "")
    if path is None:
        return [f"no times of kernels are kept, as there is no home folder: set {_FOLDER}"]
    if not base or Path(base).is_absolute():
        return []
    return [f"{_FOLDER}={base} does not count, as it is not absolute: {path} is used"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedMachine:
    """A machine with one engine, as listed.

    Attributes:
        label: The CPU, the number of CPUs, the engine and its version.
        kernels: How many kernels have a time.
        used_s: When one of them was last used or measured, in seconds since 1970.
    """

    label: str
    kernels: int
    used_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingCache:
    """The times of kernels on one machine in one engine.

    Attributes:
        label: The machine and the engine, for people.
        digest: Identifies the machine, the engine and all that changes its kernels.
        tell: Takes a note where the file cannot be used: then no kernel has a time.
    """

    path: Path
    label: str
    digest: str
    tell: Callable[[str], None] = field(compare=False, repr=False)

    @classmethod
    def here(
        cls,
        engine: str,
        device: str,
        path: Path | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> TimingCache | None:
        """The cache for an engine on this machine; None where the user has no cache folder."""
        path = path or default_path()
        if path is None:
            return None
        machine, threads = environment(), os.environ.get("OMP_NUM_THREADS")
        version = {n: v for n, v in machine.libraries.items() if n.startswith(engine)}
        decides = (
            machine.cpu,
            machine.flags,
            machine.isa_limit,
            machine.cores,
            engine,
            device,
            version,
            machine.numerics.get(engine),
            machine.numerics.get("variables"),
            threads,
        )
        versions = " ".join(version.values()) or "of unknown version"
        title = title_of(f"{engine}:{device}")
        cores = f"{machine.cores} CPUs" + (f" (OMP_NUM_THREADS={threads})" if threads else "")
        return cls(
            path=path,
            label=f"{cpu_label(machine)}, {cores}, {title} {versions}",
            digest=hashlib.blake2b(
                json.dumps(decides, sort_keys=True).encode(), digest_size=16
            ).hexdigest(),
            tell=tell,
        )

    def times(self, kernels: Iterable[str]) -> dict[str, float]:
        """Median seconds of those ``kernels`` that are known, and whose times agree.

        While other processes keep this one waiting, times of a machine as busy are known, too.
        """
        kernels = [*kernels]
        if not Demand.now().is_busy:
            return self._agreeing(kernels)
        beside = {_BUSY + kernel: kernel for kernel in kernels}
        known = self._agreeing([*kernels, *beside])
        return {
            beside.get(key, key): known[key] for key in (*beside, *kernels) if key in known
        }

    def _agreeing(self, kernels: Sequence[str]) -> dict[str, float]:
        known: dict[str, float] = {}
        with self._told(), _opened(self.path) as db:
            if db is not None:
                for kernel, samples in self._samples(db, kernels).items():
                    middle = median(samples)
                    limit = _MOST_SPREAD * middle + _WAKING_S
                    if max(samples) - min(samples) <= limit:
                        known[kernel] = middle
                now_s = int(time.time())
                db.executemany(
                    "UPDATE prices SET used_s = ? WHERE machine = ? AND kernel = ?",
                    [(now_s, self.digest, kernel) for kernel in known],
                )
        return known

    def add(self, seconds: Mapping[str, float], *, busy: bool = False) -> None:
        """Keep one measured time of each kernel, apart if the machine was ``busy``."""
        if busy:
            seconds = {_BUSY + kernel: took_s for kernel, took_s in seconds.items()}
        with self._told(), _opened(self.path, create=True) as db:
            assert db is not None
            known, now_s = self._samples(db, seconds), int(time.time())
            rows: list[tuple[str, str, str, int]] = []
            for kernel, took_s in seconds.items():
                samples = [*known.get(kernel, ()), float(took_s)][-_MOST_SAMPLES:]
                rows.append((self.digest, kernel, json.dumps(samples), now_s))
            db.execute(
                "INSERT OR REPLACE INTO machines VALUES (?, ?)", (self.digest, self.label)
            )
            db.executemany("INSERT OR REPLACE INTO prices VALUES (?, ?, ?, ?)", rows)
            db.execute(_TRIM, (_MOST_TIMES,))

    @contextmanager
    def _told(self) -> Generator[None]:
        """What fails in the block is told, and leaves the cache as it was."""
        try:
            yield
        except TimingCacheError as error:
            self.tell(f"every kernel is profiled anew, and no time is kept: {error.line}")

    def _samples(
        self, db: sqlite3.Connection, kernels: Iterable[str]
    ) -> dict[str, list[float]]:
        rows = db.execute(_SAMPLES, (self.digest, json.dumps([*kernels])))
        return {kernel: samples for kernel, text in rows if (samples := _read(text))}


def machines(path: Path) -> list[CachedMachine]:
    """The machines of a cache, those used last first; none if there is no cache.

    Two that differ in what their names do not tell, such as an engine's settings, are one row.

    Raises:
        TimingCacheError: If the cache cannot be read and written.
    """
    cached_machines: list[CachedMachine] = []
    with _opened(path) as db:
        for label, count, used_s in () if db is None else db.execute(_MACHINES):
            cached_machines.append(
                CachedMachine(label=str(label), kernels=int(count), used_s=int(used_s))
            )
    return cached_machines


def remove_damaged(path: Path | None = None) -> list[str]:
    """Remove a cache that is no database, or one that cannot be read; a text if it was so.

    Without a path it is the cache in the user's cache folder.
    """
    path = path or default_path()
    if path is None or not os.path.isfile(path):  # which tells of no missing rights
        return []
    try:
        with closing(sqlite3.connect(path, timeout=_WAITS_S)) as db:
            sound = db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    except sqlite3.Error as error:
        sound = error.sqlite_errorcode & 0xFF not in _DAMAGED
    if sound:
        return []
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return []
    return [f"the kept times of kernels were damaged, and start anew: {path}"]


def clear(path: Path) -> int:
    """Forget all times; returns how many there were.

    Raises:
        TimingCacheError: If the cache cannot be read and written.
    """
    count = 0
    with _opened(path) as db:
        if db is not None:
            count = int(db.execute("SELECT count(*) FROM prices").fetchone()[0])
            db.execute("DELETE FROM prices")
            db.execute("DELETE FROM machines")
    return count


@contextmanager
def _opened(path: Path, *, create: bool = False) -> Generator[sqlite3.Connection | None]:
    """The database in one transaction; None if there is none and it is not to be made.

    Raises:
        TimingCacheError: If the file, or what the block does, fails for the system's or
            SQLite's reasons. The file is then as it was.
    """
    existed = True
    try:
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        existed = _exists(path)
        if not existed and not create:
            yield None
            return
        with closing(sqlite3.connect(path, timeout=_WAITS_S, isolation_level=None)) as db:
            _prepare(db, path)
            yield db
            db.execute("COMMIT")
    except (OSError, sqlite3.Error) as error:
        if not existed:  # SQLite makes a file before it finds that the disk is full
            with suppress(OSError):
                if not path.stat().st_size:
                    path.unlink()
        raise _unusable(path, getattr(error, "strerror", None) or str(error)) from error


def _exists(path: Path) -> bool:
    """Whether there is something at ``path``; raises OSError where that cannot be."""
    with suppress(FileNotFoundError):
        path.stat()
        return True
    return False


def _unusable(path: Path, reason: str) -> TimingCacheError:
    fix = f"make room for a file of finecast's there, or let {_FOLDER} name another folder"
    return TimingCacheError(
        f"the timing cache cannot be used: {reason}", where=str(path), fix=fix
    )


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    """Begin a transaction on a cache of this version, made if there is none.

    A cache of another version starts anew.

    Raises:
        TimingCacheError: If finecast did not make the file.
    """
    db.execute("BEGIN IMMEDIATE")
    made_by, version = (
        int(db.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("application_id", "user_version")
    )
    tables = [
        name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table'")
    ]
    if made_by != _APPLICATION and (made_by or tables):
        raise _unusable(path, "it is a database of another program")
    if made_by == _APPLICATION and version == _VERSION:
        return
    for name in ("prices", "machines"):
        db.execute(f"DROP TABLE IF EXISTS {name}")
    for statement in _TABLES:
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {_VERSION}")


def _read(text: Any) -> list[float]:
    """The samples that are stated as JSON; none if these are no times."""
    try:
        samples = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return []
    times = [x for x in samples if isinstance(x, float)] if isinstance(samples, list) else []
    return [x for x in times if math.isfinite(x) and x > 0][-_MOST_SAMPLES:]
