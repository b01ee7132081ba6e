"""finecast's exceptions; every message says what is wrong, where, and what to do next."""

from __future__ import annotations

import errno
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self, TypeAlias


class ExitCode(IntEnum):
    """Exit statuses of the command line."""

    DONE = 0
    NOT_IMPROVED = 1
    USAGE = 2
    FAILED = 3
    USER_CODE = 4
    MEMORY = 5
    BUG = 70
    INTERRUPTED = 130


TOO_MANY_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""Errors of the system where a process, or all together, may open no more files."""

_VALUES: Final = (
    *("--batch", "--blame", "--calib", "--check", "--confidence", "--criterion", "--data"),
    *("--decode-steps", "--diff", "--engine", "--executor", "--from-type", "--groups"),
    *("--jobs", "--keep", "--labels", "--lock", "--lower-is-better", "--max-bits"),
    *("--max-drop", "--max-error", "--max-size", "--max-trials", "--metric", "--model"),
    *("--objective", "--of", "--ops", "--output", "--plan", "--plan-out", "--preset"),
    *("--report", "--runs", "--score-range", "--seconds", "--slices", "--start", "--state"),
    *("--study", "--target", "--to", "--tolerance"),
)
_SWITCHES: Final = (
    *("--force", "--freeze-inputs", "--memory", "--per-op", "--resume", "--strict", "--trust"),
)
_OF_POLICY: Final = ("--adjust", "--calibration", "--exclude", "--include", "--io")


def _keyword(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


KEYWORDS: Final[Mapping[str, str]] = {
    **{option: _keyword(option) for option in _VALUES},
    **{option: f"{_keyword(option)}=True" for option in _SWITCHES},
    **{option: f"Policy.{_keyword(option)}" for option in _OF_POLICY},
    "--dim": "dims",
    "--eval": "evaluate",
    "--external-data/--one-file": "external_data",
    "--freeze-inputs/--no-freeze-inputs": "freeze_inputs",
    "--no-freeze-inputs": "freeze_inputs=False",
    "--no-lock": "lock=False",
    "--no-memory": "memory=False",
    "--no-verify": "verify=False",
    "--op": "Policy.op_formats",
    "--rules": "user_rules",
    "--sample-axis": "DataOptions.sample_axes",
    "--set": "settings",
    "--timeout": "timeout_s",
}
"""The Python API's names for the command line's options in messages. Options that say what is
cast (``--auto-cast``) have none: in Python a policy says it."""
_OPTION: Final = re.compile(
    r"`[a-z][^`]*`|(?<![\w-])--[a-z]+(?:-[a-z]+)*(?:/--[a-z-]+)?(?![\w-])"
)


def in_python(text: str) -> str:
    """``text`` with options of the command line replaced by their names in the Python API.

    Commands between backticks stay as they are.
    """
    return _OPTION.sub(lambda found: KEYWORDS.get(found[0], found[0]), text)


class WarningText(str):
    """A warning in Python's words, as ``str`` of an error is.

    Attributes:
        line: The warning as the command line prints it.
    """

    __slots__ = ("line",)
    line: str

    def __new__(cls, text: str) -> Self:
        """The warning that ``text`` states with the command line's options."""
        line = text.line if isinstance(text, WarningText) else text
        notice = super().__new__(cls, in_python(line))
        notice.line = line
        return notice

    def __reduce__(self) -> tuple[type[WarningText], tuple[str]]:
        """Pickled by its line, which the words of Python are made of."""
        return WarningText, (self.line,)


def in_shell(warnings: Iterable[str]) -> list[str]:
    """Warnings by the command line's names of options, whoever has read them before."""
    return [text.line if isinstance(text, WarningText) else text for text in warnings]


def shown(value: object) -> str:
    """A value of a file as messages show it: shortened, as a file may hold any."""
    return shortened(repr(value))


def shortened(text: str) -> str:
    """``text`` without its middle, if it is longer than a value that messages show."""
    return _cut(text, _MOST_OF_A_VALUE)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class FormError(ValueError):
    """Content of another form; the message names the place and shows the value in short."""


def malformed(error: Exception) -> str:
    """What is wrong with a file's content that could not be read, without Python's words."""
    match error:
        case FormError():
            return str(error)
        case KeyError(args=(str(key),)):
            return f"it has no {key!r}"
        case _ if type(error) is ValueError and not _PYTHON_SAYS.search(str(error)):
            return f"its content is of another form ({_cut(str(error), _MOST_OF_A_LINE)})"
        case _:
            return "its content is of another form"


_PYTHON_SAYS: Final = re.compile(
    r"invalid literal|could not convert|cannot convert|unpack|update sequence|buffer size"
    r"|Exceeds the limit|inhomogeneous|embedded null|is not in (list|tuple)"
)
"""What Python and numpy say where a value is of another type than was expected."""
_MOST_OF_A_VALUE: Final = 120
"""Characters of a quoted value, or of a word, that a message shows."""
_MOST_OF_A_LINE: Final = 200
"""Characters of what is wrong with a file's content."""
_MOST_OF_A_PATH: Final = 300
"""Characters of a word where a message tells a place: a path has up to 255 a part."""
_MOST_SHOWN: Final = 2000
"""Characters of each part of a message."""
_OMISSION: Final = 40
"""Characters, at most, that say how many were left out."""

_LONG_VALUE: Final = re.compile(
    rf"(?<!\w)(['\"])(?:(?!\1).){{{_MOST_OF_A_VALUE},}}\1(?!\w)"
    rf"|[^\s/]{{{_MOST_OF_A_VALUE + 1},}}"
)
_LONG_PART: Final = re.compile(rf"[^\s/]{{{_MOST_OF_A_PATH + 1},}}")


def _readable(text: str, long: re.Pattern[str], most: int) -> str:
    """``text`` without the middle of what is too long to be read: a file has any text."""
    return _cut(long.sub(lambda match: _cut(match[0], most), text), _MOST_SHOWN)


def _cut(text: str, most: int) -> str:
    """``text``, or its ends and a count of what is between them, in ``most`` characters."""
    if len(text) <= most:
        return text
    kept = most - _OMISSION
    end = kept // 5
    left = len(text) - kept
    return f"{text[: kept - end]}... ({left} more characters) ...{text[-end:]}"


Unfit: TypeAlias = Mapping[str, tuple[str, str]]
"""By an op's name: the label of the format that it is planned in, and what the engine does
instead, as ``runs it in fp32 all the same``."""


class FinecastError(Exception):
    """A user-facing failure, one line: ``what (where): what to do next``.

    Messages are written with the command line's option names. The command line prints
    ``line``; ``str(error)`` has the Python API's names in their place.

    Args:
        what: What went wrong, stating what was got and what was expected.
        where: The file, node or option at fault; empty when the whole call is.
        fix: What the user can do next; empty only when nothing can be done.
        unfit: Ops of a plan that the engine does not run as planned, if they are known: the
            same model with these ops in other formats may run, and be right.
    """

    exit_code = ExitCode.FAILED

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", unfit: Unfit = MappingProxyType({})
    ) -> None:
        self.what = _readable(what, _LONG_VALUE, _MOST_OF_A_VALUE)
        self.where, self.fix = (
            _readable(text, _LONG_PART, _MOST_OF_A_PATH) for text in (where, fix)
        )
        self.unfit = dict(unfit)  # errors of workers are pickled
        super().__init__(in_python(self.line))

    @property
    def line(self) -> str:
        """The message as the command line prints it."""
        place = f" ({self.where})" if self.where else ""
        advice = f": {self.fix}" if self.fix else ""
        return f"{self.what}{place}{advice}"


class UsageError(FinecastError):
    """An option, a rule file or a data file that does not fit the call."""

    exit_code = ExitCode.USAGE


class UserCodeError(UsageError):
    """The user's own function or file raised an exception, or called ``sys.exit``."""

    exit_code = ExitCode.USER_CODE


class OutOfMemoryError(FinecastError):
    """There is not enough memory for the call."""

    exit_code = ExitCode.MEMORY


class InterruptedRunError(FinecastError):
    """Ctrl-C ended the run; ``fix`` says what was kept and how to go on."""

    exit_code = ExitCode.INTERRUPTED


class ModelError(FinecastError):
    """A model that cannot be read, is invalid, or cannot be converted as asked."""


class WrongNumbersError(ModelError):
    """A converted model whose outputs cannot be explained by its formats; not written."""

    exit_code = ExitCode.NOT_IMPROVED


class EngineError(FinecastError):
    """An engine that is absent, or that cannot load or run a model."""


class NoKernelError(EngineError):
    """An engine that has no kernel for an op of a model, whatever numbers it is given."""


def not_imported(
    name: str, error: ImportError, *, install: str, where: str = ""
) -> EngineError:
    """The error for a library that is not installed, or is and fails as it is loaded."""
    if isinstance(error, ModuleNotFoundError):
        return EngineError(f"{name} is not installed", where=where, fix=install)
    return EngineError(
        f"{name} is installed and cannot be imported: {first_line(error)}",
        where=where,
        fix=f"mend it, or install it anew: {install}",
    )


class RuleConflictError(FinecastError):
    """Rules that together leave an op without any permitted format."""


@contextmanager
def naming(path: Path, name: str) -> Generator[None]:
    """In errors raised inside, replace the temporary file ``path`` by ``name``.

    Users know nothing of the temporary file; ``name`` is what they gave or asked for.
    """
    try:
        yield
    except FinecastError as error:
        texts = (t.replace(str(path), name) for t in (error.what, error.where, error.fix))
        what, where, fix = texts
        FinecastError.__init__(error, what, where=where, fix=fix, unfit=error.unfit)
        raise
