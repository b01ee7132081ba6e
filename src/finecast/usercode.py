"""Running what users wrote: whatever it raises becomes one clear error."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType

from finecast.errors import FinecastError, OutOfMemoryError, UserCodeError


@contextmanager
def guarded(what: str, *, where: str, fix: str) -> Generator[None]:
    """Turn what a user's code inside raises into one error, made of the arguments.

    ``sys.exit`` in the code does not end the program; Ctrl-C does. finecast's own errors,
    which the code may cause by calling finecast, are raised unchanged.

    Raises:
        UserCodeError: If the code raises an exception or calls ``sys.exit``.
        OutOfMemoryError: If it takes more memory than there is.
    """
    try:
        yield
    except FinecastError:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{what}: out of memory{_detail(error)}",
            where=where,
            fix="give it less data at a time",
        ) from error
    except SystemExit as error:
        raise UserCodeError(
            f"{what}: it calls sys.exit({error.code!r})", where=where, fix=fix
        ) from error
    except Exception as error:
        raise UserCodeError(
            f"{what}: {type(error).__name__}{_detail(error)}", where=where, fix=fix
        ) from error


def line_in(file: str, trace: TracebackType | None) -> str:
    """``file:line`` of the last frame in ``file``, else ``file``."""
    lines = [f.lineno for f in traceback.extract_tb(trace) if f.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def _detail(error: BaseException) -> str:
    text = str(error)
    return f": {text}" if text else ""
