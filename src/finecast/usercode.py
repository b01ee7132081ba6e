"""Running what users wrote: whatever it raises becomes one clear error."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import TracebackType

from finecast.errors import FinecastError, OutOfMemoryError, UserCodeError


@contextmanager
def guarded(what: str, *, where: str, fix: str) -> Generator[None]:
    """Turn what a user's code inside raises into one error, made of the arguments.

    ``sys.exit`` in the code does not end the program; Ctrl-C does. finecast's own errors,
    which the code may cause by calling finecast, are raised unchanged. A process that the code
    forks ends with the code: there would be two of what called it. The current folder is what
    it was before, so that relative paths mean the same.

    Raises:
        UserCodeError: If the code raises an exception or calls ``sys.exit``.
        OutOfMemoryError: If it takes more memory than there is.
    """
    process, folder = os.getpid(), _current_folder()
    try:
        yield
        _end_fork(process, 0)
    except FinecastError:
        _end_fork(process, 1)
        raise
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{what}: out of memory{_detail(error)}",
            where=where,
            fix="give it less data at a time",
        ) from error
    except SystemExit as error:
        _end_fork(process, error.code)
        raise UserCodeError(
            f"{what}: it calls sys.exit({error.code!r})", where=where, fix=fix
        ) from error
    except Exception as error:
        if os.getpid() != process:
            traceback.print_exc()
        _end_fork(process, 1)
        raise UserCodeError(
            f"{what}: {type(error).__name__}{_detail(error)}", where=where, fix=fix
        ) from error
    finally:
        if folder is not None and _current_folder() != folder:
            os.chdir(folder)


def _current_folder() -> str | None:
    """The current folder; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _end_fork(process: int, code: object) -> None:
    """End this process if it is another one than ``process``, as ``sys.exit(code)`` would."""
    if os.getpid() == process:
        return
    with suppress(OSError, ValueError):
        if code is not None and not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def line_in(file: str, trace: TracebackType | None) -> str:
    """``file:line`` of the last frame in ``file``, else ``file``."""
    lines = [f.lineno for f in traceback.extract_tb(trace) if f.filename == file]
    return f"{file}:{lines[-1]}" if lines else file


def _detail(error: BaseException) -> str:
    text = str(error)
    return f": {text}" if text else ""
