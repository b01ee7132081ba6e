r"""Text for a terminal: escaped, on one line, in the encoding that the terminal has.

Law: text from a file or an exception moves no cursor, sets no colour, starts no line and
reorders no text: characters that would are shown escaped, as ``\x1b``.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TextIO

from finecast.errors import UsageError

# Control characters, bidirectional and zero-width marks, tags, separators, lone surrogates.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)

# Values of TERM: terminals that show colours as characters.
_COLOURLESS: Final = ("dumb", "unknown")


class Verbatim(str):
    """A line that is copied, to a shell or an editor: it is neither wrapped nor indented."""

    __slots__ = ()


def finite(value: Any, digits: int | None = None) -> Any:
    """``value`` as strict JSON has it: NaN and infinities become null.

    With ``digits`` numbers are rounded to so many.
    """
    if isinstance(value, float):
        shown = value if digits is None else float(f"{value:.{digits}g}")
        return shown if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, digits) for item in value]
    return value


def safe(text: str) -> str:
    """``text`` as one line, with characters escaped that would act on a terminal."""
    return _UNSAFE.sub(lambda m: m.group().encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """``text`` as one line, with line breaks as blanks and other such characters escaped."""
    return safe(" ".join(text.split()))


def coloured(stream: TextIO) -> bool:
    """Whether text may have colours there: by the rule of rich, which prints the tables."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM", "").lower() in _COLOURLESS
    return stream.isatty() and not plain


def write(stream: TextIO, text: str, end: str = "\n") -> None:
    """Write ``text``; characters that the stream's encoding lacks are escaped."""
    encoding = stream.encoding or "utf-8"  # in a C locale ASCII, which lacks most characters
    with printing(stream):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding) + end)
        stream.flush()  # a pipe without a reader is noticed here, not when Python exits


@contextmanager
def printing(stream: TextIO) -> Generator[None]:
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
