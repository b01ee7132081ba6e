"""All that the command line prints: reports to stdout, errors and progress to stderr.

Law: text from a file or an exception acts on no terminal (``terminal.safe``). JSON escapes it,
too.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from finecast.errors import in_shell
from finecast.terminal import (
    Verbatim,
    coloured,
    finite,
    one_line,
    printing,
    results,
    safe,
    write,
)

if TYPE_CHECKING:
    from rich.table import Table

    from finecast.reports.base import Report, TextTable


_COLUMNS = 80
"""The usual width of a terminal, for output that is read on none known: files and CI logs."""
_LEAST_WIDTH = 9
"""Columns of words are not made narrower than that to keep others on one line."""
_LEAST_NAME = 11
"""Nor columns that are kept on one line where the width suffices, such as names of rows."""
_LONGEST_WORD: Final = 44
"""Words, such as an op's name, are not broken up to this width, if all fits."""
_BETWEEN = 3
"""Characters between two columns."""
_EDGE = 1
"""And at the right edge."""


def write_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write strict JSON to stdout; NaN and infinities become null."""
    text = json.dumps(finite(value), indent=2, allow_nan=False)
    stream = results()
    with printing(stream):
        stream.write(text + "\n")
        stream.flush()


def write_table(table: Table, *notes: str) -> None:
    """Write a rich table to stdout, then the notes, each from a line of its own.

    The table is no wider than ``width``, unless its figures alone are: they are never cut.
    Notes are wrapped between words at that width, and what continues one is indented.
    """
    from rich.console import Console

    stream = results()
    title, table.title = table.title, None  # it may be wider than the table
    console = Console(file=stream, width=_fitted(table, width()))
    with printing(stream), console.capture() as rendered:
        if title:
            console.print(title, width=width())
        console.print(table)
    lines = rendered.get().removesuffix("\n").split("\n")
    # In files and pipes without the blanks that fill up a row: some viewers wrap them.
    filled = lines if stream.isatty() else [line.rstrip() for line in lines]
    write(stream, "\n".join(filled))
    for note in notes:
        write_note(note)


def write_report(report: Report, *tables: TextTable, as_json: bool = False) -> None:
    """Write what a verb gives to stdout: its first line and its tables, or its JSON.

    ``tables`` are shown in place of the report's own.
    """
    if as_json:
        write_json(report.to_dict())
        return
    write_note(report.lines[0])
    for shown in tables or report.tables:
        if not shown.rows:
            for note in shown.notes:
                write_note(note)
            continue
        table = new_table(shown.title, shown.left, shown.right, fold=tuple(shown.fold))
        for row in shown.rows:
            add_row(table, *row)
        write_table(table, *shown.notes)


def write_note(note: str) -> None:
    """Write a line of prose to stdout, wrapped unless it is ``Verbatim``."""
    text = safe(note)
    write(results(), text if isinstance(note, Verbatim) else _wrapped(text))


def _wrapped(text: str) -> str:
    """A line of prose as lines of the usual width; those after the first are indented."""
    return textwrap.fill(
        text,
        width(),
        subsequent_indent=" " * (len(text) - len(text.lstrip()) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fitted(table: Table, columns: int) -> int:
    """The width to print at; columns of words take several lines where they have to.

    Room goes to figures first, then to columns of names, then to the columns whose longest
    word is short, so that long names alone are broken, and what is left to those that lack
    most.
    """
    from rich.cells import cell_len
    from rich.text import Text

    widest: list[int] = []
    longest: list[int] = []
    for column in table.columns:
        texts = [t for t in (column.header, *column.cells) if isinstance(t, Text)]
        words = [cell_len(word) for t in texts for word in t.plain.split()]
        widest.append(max((line.cell_len for t in texts for line in t.split("\n")), default=0))
        longest.append(min(max(words, default=0), _LONGEST_WORD))
    every = range(len(widest))
    figures = [i for i in every if table.columns[i].justify == "right"]
    names = [i for i in every if table.columns[i].no_wrap and i not in figures]
    beside = _BETWEEN * len(widest) + _EDGE
    if sum(widest) + beside <= columns:
        return columns
    least = [min(w, _LEAST_NAME if i in names else _LEAST_WIDTH) for i, w in enumerate(widest)]
    widths = [widest[i] if i in figures else least[i] for i in every]

    def spare() -> int:
        return max(columns - beside - sum(widths), 0)

    if sum(widest[i] - widths[i] for i in names) <= spare():
        for i in names:
            widths[i] = widest[i]
    for i in sorted(every, key=lambda i: longest[i]):
        widths[i] += min(max(longest[i] - widths[i], 0), spare())
    lacking = [widest[i] - widths[i] for i in every]
    room = min(spare(), sum(lacking))
    for i in every:
        widths[i] += room * lacking[i] // (sum(lacking) or 1)
    for i, column in enumerate(table.columns):
        column.no_wrap = i in figures
        column.width = widths[i]
        for text in (t for t in column.cells if isinstance(t, Text) and i not in figures):
            text.plain = "\n".join(_at_separators(text.plain, widths[i]))
    return max(columns, sum(widths) + beside)


def _at_separators(text: str, columns: int) -> Iterator[str]:
    """The parts of a cell that is wider than its column by a name.

    They end after a ``/``, or else after a ``_`` or ``.``; other words are wrapped by the
    table.
    """
    words: list[str] = []
    for word in text.split(" "):
        rest = word
        while len(rest) > columns and (cut := _separator(rest, columns)) > 0:
            yield " ".join([*words, rest[: cut + 1]])
            words, rest = [], rest[cut + 1 :]
        words.append(rest)
    yield " ".join(words)


def _separator(name: str, columns: int) -> int:
    """The last place of a separator within ``columns`` of a name; -1 if there is none."""
    after = name.rfind("/", 1, columns)
    return after if after > 0 else max(name.rfind(mark, 1, columns) for mark in "_.")


def width() -> int:
    """Columns for tables: ``COLUMNS`` if set, else the terminal's, else 80.

    Of output in a pipe (``| less``) the terminal is that of another stream.
    """
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    for stream in (results(), sys.stderr, sys.stdin):
        try:
            columns = os.get_terminal_size(stream.fileno()).columns
        except (AttributeError, OSError, ValueError):  # closed, or no terminal
            continue
        if columns:
            return columns
    return _COLUMNS


def warn(*messages: str) -> None:
    """Write warnings to stderr, each as one line, which a terminal shows wrapped."""
    for message in in_shell(messages):
        text = f"warning: {one_line(message)}"
        write(sys.stderr, _wrapped(text) if sys.stderr.isatty() else text)


def write_error(message: str) -> None:
    """Write an error to stderr, as one line."""
    label = "\033[1;31merror:\033[0m" if coloured(sys.stderr) else "error:"
    write(sys.stderr, f"{label} {one_line(message)}")


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
