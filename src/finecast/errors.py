"""finecast's exceptions; every message says what is wrong, where, and what to do next."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Final


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


KEYWORDS: Final[Mapping[str, str]] = {
    "--adjust": "Policy.adjust",
    "--batch": "batch",
    "--calib": "calib",
    "--calibration": "Policy.calibration",
    "--check": "check",
    "--clean": "clean=True",
    "--confidence": "confidence",
    "--criterion": "criterion",
    "--data": "data",
    "--decode-steps": "decode_steps",
    "--dim": "dims",
    "--engine": "engine",
    "--eval": "evaluate",
    "--exclude": "Policy.exclude",
    "--executor": "executor",
    "--external-data/--one-file": "external_data",
    "--force": "force=True",
    "--from-type": "from_type",
    "--include": "Policy.include",
    "--io": "Policy.io",
    "--jobs": "jobs",
    "--keep": "keep",
    "--labels": "labels",
    "--lower-is-better": "lower_is_better",
    "--max-drop": "max_drop",
    "--max-error": "max_error",
    "--max-trials": "max_trials",
    "--metric": "metric",
    "--min-speedup": "min_speedup",
    "--no-verify": "verify=False",
    "--objective": "objective",
    "--of": "of",
    "--op": "Policy.op_formats",
    "--partial": "partial=True",
    "--resume": "resume=True",
    "--sample-axis": "DataOptions.sample_axes",
    "--score-range": "score_range",
    "--start": "start",
    "--state": "state",
    "--study": "study",
    "--target": "target",
    "--timeout": "timeout_s",
    "--tolerance": "tolerance",
    "--trial-memory": "trial_memory_gib",
    "--trial-timeout": "trial_timeout_s",
    "--trust": "trust=True",
}
"""The Python API's names for the command line's options in messages. Options that say what is
cast (``--auto-cast``) have none: in Python a policy says it."""
_OPTION: Final = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?:/--[a-z-]+)?(?![\w-])")


def in_python(text: str) -> str:
    """``text`` with options of the command line replaced by their names in the Python API."""
    return _OPTION.sub(lambda found: KEYWORDS.get(found[0], found[0]), text)


class FinecastError(Exception):
    """A user-facing failure, one line: ``what (where): what to do next``.

    Messages are written with the command line's option names. The command line prints
    ``line``; ``str(error)`` has the Python API's names in their place.

    Args:
        what: What went wrong, stating what was got and what was expected.
        where: The file, node or option at fault; empty when the whole call is.
        fix: What the user can do next; empty only when nothing can be done.
    """

    exit_code = ExitCode.FAILED

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
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
    """A converted model whose outputs cannot be explained by its formats; not written.

    ``miscomputed`` names the op that the engine computes wrongly in its format, if one was
    found; the same model with that op in fp32 may be right.
    """

    exit_code = ExitCode.NOT_IMPROVED

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", miscomputed: str = ""
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.miscomputed = miscomputed


class EngineError(FinecastError):
    """An engine that is absent, or that cannot load or run a model."""


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
        FinecastError.__init__(error, what, where=where, fix=fix)
        raise
