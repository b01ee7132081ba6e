r"""All that the command line prints: reports to stdout, errors and progress to stderr.

Law: text from a file or an exception moves no cursor, sets no colour, starts no line and
reorders no text: characters that would are shown escaped, as ``\x1b``. JSON escapes them too.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from finecast.progress import Progress, silent

if TYPE_CHECKING:
    from rich.table import Table


_PIPE_COLUMNS = 140
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
    sys.stdout.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def write_table(table: Table, *notes: str, columns: int = _PIPE_COLUMNS) -> None:
    """Write a rich table to stdout, then each note on a line.

    The table is no wider than the terminal; in a file or a pipe, than ``columns``.
    """
    from rich.console import Console

    # Rich's own width for a file or a pipe, 80 columns, would fold every name.
    console = Console(width=None if sys.stdout.isatty() else columns)
    with console.capture() as rendered:
        console.print(table)
    _write(sys.stdout, rendered.get().removesuffix("\n"))
    for note in notes:
        write_line(note)


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
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    stream.flush()  # a pipe without a reader is noticed here, not when Python exits


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
    """A progress bar on stderr if that is a terminal; otherwise nothing is shown."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(stage: str, done: int, total: int) -> None:
            text = escape(safe(f"{title}: {stage}"))
            bar.update(task, completed=done, total=total, description=text)

        yield report


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
