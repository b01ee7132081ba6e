"""What verbs write: JSON and tables to stdout, progress to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.table import Table


_PIPE_COLUMNS = 140


class Progress(Protocol):
    """Says how far a long job is."""

    def __call__(self, done: int, total: int, what: str = "") -> None:
        """``done`` of ``total`` steps, now at ``what``."""
        ...


def write_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write strict JSON to stdout; NaN and infinities become null."""
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def write_table(table: Table, *, note: str = "", columns: int = _PIPE_COLUMNS) -> None:
    """Write a rich table to stdout, and a line under it; no wider than a terminal.

    Into a file or a pipe it takes at most ``columns``.
    """
    from rich.console import Console

    # Into a file or a pipe there is no width to keep to; 80 columns would fold every name.
    console = Console(width=None if sys.stdout.isatty() else columns)
    console.print(table)
    if note:
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def write_line(text: str) -> None:
    """Write one line to stdout."""
    sys.stdout.write(f"{text}\n")


def warn(message: str) -> None:
    """Write one line to stderr."""
    sys.stderr.write(f"warning: {message}\n")


def new_table(
    title: str,
    left: Sequence[str],
    right: Sequence[str] = (),
    *,
    fold: str | tuple[str, ...] = "",
) -> Table:
    """A table with left-aligned columns, then right-aligned ones for figures.

    Where the width does not suffice, columns in ``fold`` take several lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    folded = (fold,) if isinstance(fold, str) else fold
    for name in left:
        table.add_column(name, overflow="fold", no_wrap=bool(fold) and name not in folded)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text; brackets in node names are no markup."""
    from rich.text import Text

    table.add_row(*(Text(cell) for cell in cells))


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Generator[Progress]:
    """A progress bar on stderr where that is a terminal; else nothing."""
    if quiet or not sys.stderr.isatty():
        yield _silent
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(done: int, total: int, what: str = "") -> None:
            text = f"{title}: {what}" if what else title
            bar.update(task, completed=done, total=total, description=text)

        yield report


def _silent(done: int, total: int, what: str = "") -> None:
    pass


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
