r"""Text for a terminal: escaped, on one line, in the encoding that the terminal has.

Laws: text from a file or an exception moves no cursor, sets no colour, starts no line and
reorders no text: characters that would are shown escaped, as ``\x1b``. In a process of
finecast's only its results reach standard output: what libraries print goes to standard error.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, Final, TextIO

from finecast.errors import UsageError

# Control characters, bidirectional and zero-width marks, tags, separators, lone surrogates.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)

_STDOUT: Final = 1
_STDERR: Final = 2
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


class _Results:
    """The stream of results where it is no longer ``sys.stdout``."""

    stream: TextIO | None = None


def results() -> TextIO:
    """Where results are printed: standard output."""
    return _Results.stream or sys.stdout


def claim_standard_output() -> None:
    """Give standard output a descriptor of its own, which libraries do not know.

    Libraries in C++ print to descriptor 1, which from here on is that of standard error, in
    processes that are started, too. It is for the start of a process of finecast's, not for a
    library's call. Closed standard streams are opened on the null device: the next file that
    is opened would have their descriptors, and get what is printed to them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    before = sys.stdout
    try:
        if before.fileno() != _STDOUT:
            return
        before.flush()
    except (OSError, ValueError):  # no file, or one that is full: writing to it tells that
        return
    sys.stdout = os.fdopen(
        os.dup(_STDOUT),
        "w",
        encoding=before.encoding,
        errors=before.errors,
        buffering=1 if before.line_buffering else -1,
    )
    os.dup2(_STDERR, _STDOUT)


@contextmanager
def prints_to(stream: TextIO) -> Generator[None]:
    """Inside, what Python code prints goes to ``stream``; results stay where they are."""
    before, _Results.stream = _Results.stream, results()
    try:
        with redirect_stdout(stream):
            yield
    finally:
        _Results.stream = before


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
    buffer as it exits. That is all that happens to what goes to standard error, of which
    nobody can be told: the exit code says how a command ended.
    """
    try:
        yield
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise  # its reader has read enough
        if stream is sys.stderr:
            return
        raise UsageError(
            f"cannot print the result: {error.strerror}",
            where="standard output",
            fix="print it elsewhere; files are written before the result is printed",
        ) from error
