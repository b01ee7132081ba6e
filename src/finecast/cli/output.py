r"""All that the command line prints: reports to stdout, errors and progress to stderr.

Law: text from a file or an exception moves no cursor, sets no colour, starts no line and
reorders no text: characters that would are shown escaped, as ``\x1b``. JSON escapes them too.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from finecast.errors import UsageError
from finecast.progress import Progress, silent

if TYPE_CHECKING:
    from rich.table import Table


_COLUMNS = 80
"""The usual width of a terminal, for output that is read on none known: files and CI logs."""
_LEAST_WIDTH = 9
"""Columns of words are not made narrower than that to keep others on one line."""
_LEAST_NAME = 11
"""And columns that are kept on one line where the width suffices, such as names of rows."""
_BETWEEN = 3
"""Characters between two columns."""
_EVERY_S = 15.0
"""Least time between two lines of progress: short commands write none."""
# Control characters, bidirectional and zero-width marks, tags, separators, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def safe(text: str) -> str:
    """``text`` as one line, with characters escaped that would act on a terminal."""
    return _UNSAFE.sub(lambda m: m.group().encode("unicode_escape").decode(), text)


def write_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write strict JSON to stdout; NaN and infinities become null."""
    text = json.dumps(_finite(value), indent=2, allow_nan=False)
    with _printing(sys.stdout):
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def write_table(table: Table, *notes: str) -> None:
    """Write a rich table to stdout, then each note on a line.

    It is no wider than ``width``, unless its figures alone are: they are never cut.
    """
    from rich.console import Console

    console = Console(width=_fitted(table, width()))
    with _printing(sys.stdout), console.capture() as rendered:
        console.print(table)
    lines = rendered.get().removesuffix("\n").split("\n")
    # In files and pipes without the blanks that fill up a row: some viewers wrap them.
    filled = lines if sys.stdout.isatty() else [line.rstrip() for line in lines]
    _write(sys.stdout, "\n".join(filled))
    for note in notes:
        write_line(note)


def _fitted(table: Table, columns: int) -> int:
    """The width to print at; columns of words take several lines where they have to."""
    from rich.text import Text

    fixed, figures = 0, 0
    least: dict[int, int] = {}
    for index, column in enumerate(table.columns):
        texts = [t for t in (column.header, *column.cells) if isinstance(t, Text)]
        widest = max((line.cell_len for t in texts for line in t.split("\n")), default=0)
        least[index] = widest
        if column.justify != "right":
            least[index] = min(widest, _LEAST_NAME if column.no_wrap else _LEAST_WIDTH)
        fixed += _BETWEEN + (widest if column.no_wrap else least[index])
        figures += _BETWEEN + least[index]
    if fixed > columns:
        for index, column in enumerate(table.columns):
            column.no_wrap = column.justify == "right"
            column.min_width = least[index]
    return max(columns, figures)


def width() -> int:
    """Columns for tables: ``COLUMNS`` if set, else the terminal's, else 80.

    Of output in a pipe (``| less``) the terminal is that of another stream.
    """
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (AttributeError, OSError, ValueError):  # closed, or no terminal
            continue
        if columns:
            return columns
    return _COLUMNS


def write_line(text: str) -> None:
    """Write one line to stdout."""
    _write(sys.stdout, safe(text))


def warn(message: str) -> None:
    """Write a warning to stderr, as one line."""
    _write(sys.stderr, f"warning: {_one_line(message)}")


def write_error(message: str) -> None:
    """Write an error to stderr, as one line."""
    label = "\033[1;31merror:\033[0m" if sys.stderr.isatty() else "error:"
    _write(sys.stderr, f"{label} {_one_line(message)}")


def _one_line(text: str) -> str:
    return safe(" ".join(text.split()))


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"  # in a C locale ASCII, which lacks most characters
    with _printing(stream):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        stream.flush()  # a pipe without a reader is noticed here, not when Python exits


@contextmanager
def _printing(stream: TextIO) -> Generator[None]:
    """Turn an error of the system inside, as of a full disk, into one of the command.

    What is written to the stream from then on is dropped: Python could not empty the stream's
    buffer as it exits.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # its reader has read enough
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        raise UsageError(
            f"cannot print the result: {error.strerror}",
            where="standard output" if stream is sys.stdout else "standard error",
            fix="print it elsewhere; files are written before the result is printed",
        ) from error


def new_table(
    title: str,
    left: Sequence[str],
    right: Sequence[str] = (),
    *,
    fold: str | tuple[str, ...] = "",
) -> Table:
    """A table with left-aligned columns, then right-aligned ones for figures.

    Where the width does not suffice, cells of the columns in ``fold`` take several lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    heading = Text(safe(title), style="table.title") if title else None
    table = Table(title=heading, box=SIMPLE_HEAD, title_justify="left")
    folded = (fold,) if isinstance(fold, str) else fold
    for name in left:
        no_wrap = bool(fold) and name not in folded
        table.add_column(Text(safe(name)), overflow="fold", no_wrap=no_wrap)
    for name in right:  # a heading here may have several lines
        lines = "\n".join(map(safe, name.split("\n")))
        table.add_column(Text(lines), justify="right", no_wrap=True)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text; brackets in it are not read as rich's markup."""
    from rich.text import Text

    table.add_row(*(Text(safe(cell)) for cell in cells))


@contextmanager
def progress(title: str, *, quiet: bool = False) -> Generator[Progress]:
    """Progress on stderr: a bar on a terminal; in a file or a pipe a line now and then."""
    if quiet:
        yield silent
        return
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(stage: str, done: int, total: int) -> None:
            text = escape(safe(f"{title}: {stage}"))
            bar.update(task, completed=done, total=total, description=text)

        yield report


def _lines(title: str) -> Progress:
    """Progress that writes a line where ``_EVERY_S`` have passed since the last one."""
    start = last = time.monotonic()

    def report(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _EVERY_S:
            last = now
            text = f"{title}: {stage}, {done} of {total}, after {now - start:.0f} s"
            _write(sys.stderr, _one_line(text))

    return report


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
