"""What verbs give, in the forms in which people look at it: text, tables, JSON, a notebook.

Law: all forms say the same. Text that comes from a model is escaped: on a terminal it moves no
cursor, and in a notebook it is no markup.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from html import escape
from pathlib import Path
from typing import Any, Final

from finecast.errors import WarningText, in_python
from finecast.files import check_writable, write_text
from finecast.naming import left_out, listed, percent
from finecast.terminal import Verbatim, finite, one_line, safe

_VERSION: Final = 1
"""Of the files that ``Report.save`` writes."""
_MOST_ROWS: Final = 100
"""Rows of a table in a notebook."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TextTable:
    """A table of text, which ``print`` shows in aligned columns.

    Attributes:
        left: Headings of the columns of words.
        right: Headings of the columns of figures, which follow these.
        title: A line above it; may be empty.
        fold: Columns of words whose cells take several lines where the width does not suffice.
        notes: Lines below it.
    """

    left: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()
    title: str = ""
    fold: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        """Title, headings and rows in aligned columns, then the notes; nothing is cut."""
        cells = [[one_line(cell) for cell in row] for row in (self._heads, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        words = len(self.left)
        rows = (
            [
                cell.rjust(width) if number >= words else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            for row in (cells if self.rows else ())
        )
        lines = [one_line(self.title), *("  ".join(row).rstrip() for row in rows)]
        lines += [safe(_in_python(note)) for note in self.notes]
        return "\n".join(lines if self.title else lines[1:])

    @property
    def _heads(self) -> tuple[str, ...]:
        return *self.left, *self.right

    def html(self) -> str:
        """The table as HTML, folded away under its title."""
        shown = self.rows[:_MOST_ROWS]
        heads = "".join(f"<th>{escape(one_line(head))}</th>" for head in self._heads)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(safe(cell))}</td>" for cell in row) + "</tr>"
            for row in shown
        )
        notes = (*self.notes, *left_out(len(self.rows), _MOST_ROWS, " rows"))
        below = "".join(f"<p>{escape(safe(_in_python(note)))}</p>" for note in notes)
        title = escape(safe(self.title or self.left[0]))
        return (
            f"<details><summary>{title}</summary><table><tr>{heads}</tr>{body}</table>{below}"
            "</details>"
        )


class Report(ABC):
    """What a verb gives.

    ``print`` shows its ``lines``, a terminal's verb and a notebook its ``tables``, too. In
    Python options have the names of keywords there, and in the field ``warnings`` of those
    that have one. ``to_dict`` is what ``--json`` prints, and ``save`` writes that.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Let Python read the field ``warnings`` with the names of its keywords."""
        texts = getattr(self, "warnings", ())
        if all(isinstance(text, str) for text in texts) and texts:
            object.__setattr__(self, "warnings", tuple(map(WarningText, texts)))

    @property
    @abstractmethod
    def lines(self) -> Sequence[str]:
        """It in a few lines; the first one stands above the tables."""

    @property
    def tables(self) -> Sequence[TextTable]:
        """It in full; none if the lines say all."""
        return ()

    @abstractmethod
    def _content(self) -> dict[str, Any]:
        """All of it as JSON has it, where numbers may be NaN or infinite."""

    def __repr__(self) -> str:
        """The lines, each escaped; those after the first are indented, unless copied."""
        first, *rest = map(_in_python, self.lines)
        more = (safe(x) if isinstance(x, Verbatim) else f"  {one_line(x)}" for x in rest)
        return "\n".join((one_line(first), *more))

    def to_dict(self) -> dict[str, Any]:
        """All of it, as ``--json`` prints it: strict JSON."""
        content: dict[str, Any] = finite(self._content())
        return content

    def _repr_html_(self) -> str:
        """The lines and the tables, for a notebook."""
        text = escape("\n".join(map(safe, map(_in_python, self.lines))))
        return "".join((f"<pre>{text}</pre>", *(table.html() for table in self.tables)))

    def save(self, output: str | Path, *, force: bool = False) -> None:
        """Write ``to_dict`` to a file, as JSON.

        Raises:
            UsageError: If the file exists and ``force`` is not given, or cannot be written.
        """
        path = Path(output)
        check_writable(path, force=force)
        content = {"version": _VERSION, "report": type(self).__name__, **self.to_dict()}
        write_text(path, json.dumps(content, indent=1) + "\n")


def _in_python(line: str) -> str:
    """A line by Python's names of options; one that is copied to a shell is as it was."""
    return line if isinstance(line, Verbatim) else in_python(line)


# ----------------------------------------- lines on the outputs that errors and metrics are of

_HARDLY: Final = 0.0001
"""A loss that is not told as a number, of a metric of 1."""
_LISTED: Final = 4
"""Outputs that are named in one line; JSON has all."""


def output_lines(
    errors: Mapping[str, float], left_out: Sequence[str], scores: Mapping[str, float]
) -> list[str]:
    """Lines that name the outputs which errors and metric are of; none if a model has one.

    Args:
        errors: Relative errors by output, the worst first.
        left_out: Outputs that no error is of.
        scores: The metric by output, the worst first.
    """
    if len(errors) + len(left_out) < 2:
        return []
    lines = [f"error by output, worst first: {_listed(errors, percent)}"]
    if len(scores) > 1 or scores.keys() != errors.keys():
        lines += (
            [f"metric by output, worst first: {_listed(scores, '{:.4g}'.format)}"]
            if scores
            else []
        )
    if left_out:
        few = listed(left_out, _LISTED)
        lines.append(
            f"outputs that are not compared, as copies of inputs, caches, or by --of: {few}"
        )
    return lines


def expected_text(metric: float, loss: float | None, deviation: float) -> str:
    """What is expected on other data, with the standard error of that mean.

    ``loss`` is beside fp32's metric; None or infinite where fp32 has no finite one.
    """
    if loss is None or not math.isfinite(loss):
        return f"{metric:.4g} on average (standard error {_digit(deviation)})"
    largest = max(abs(metric), abs(loss))
    hardly = _HARDLY * 10 ** math.ceil(math.log10(largest)) if largest else 0.0
    if abs(loss) + deviation < hardly:
        return f"a loss of less than {hardly:g}"
    kind = "gain" if loss < 0 else "loss"
    return f"a {kind} of {_digit(abs(loss))} on average (standard error {_digit(deviation)})"


def _digit(figure: float) -> str:
    """One digit of a figure."""
    return f"{Decimal(f'{figure:.1g}'):f}"


def _listed(figures: Mapping[str, float], text: Callable[[float], str]) -> str:
    return listed([f"{name} {text(value)}" for name, value in figures.items()], _LISTED)
