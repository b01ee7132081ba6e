"""Locks on a command's outputs, so that no two commands write one file at the same time.

Law: of two commands that would write one file the second is refused before it does any work,
and a command that ended, however it ended, holds nothing. A lock is a file beside the output
that the system unlocks with the process; it is removed when the command ends.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from finecast.errors import UsageError

try:
    import fcntl
except ImportError:  # on Windows, where outputs are not locked
    fcntl = None

_PREFIX: Final = ".finecast-"
_SUFFIX: Final = ".lock"
_MOMENT_S: Final = 0.05
"""After it a lock is tried again: ``remove_dead`` holds each for less."""
_HOLDERS: Final[dict[Path, int]] = {}
"""Of each lock that this process holds, the thread: a call inside another one passes."""
_GUARD: Final = threading.Lock()

# No link is followed: in a folder that others may write to it could lead to any file.
_OPENED: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW if fcntl else 0


class OutputBusyError(UsageError):
    """Another command is writing an output of this one."""


@contextmanager
def locked(outputs: Mapping[Path, str]) -> Generator[None]:
    """Hold the locks of ``outputs``, each with its role in the command.

    Raises:
        OutputBusyError: If another process, or another thread of this one, writes one of them.
    """
    with ExitStack() as stack:
        for output, role in outputs.items():
            stack.enter_context(_lock(output, role))
        yield


def hold(path: Path) -> int | None:
    """Lock a new file as this process's; its descriptor, None where there are no locks."""
    if fcntl is None:
        return None
    descriptor = os.open(path, _OPENED, 0o666)
    with suppress(OSError):  # waits for one who asks at this moment whether it is held
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    _sign(descriptor)
    return descriptor


def release(descriptor: int | None) -> None:
    """Unlock a file that this process holds."""
    if descriptor is not None:
        os.close(descriptor)


def dead_owner(path: Path) -> str | None:
    """The process that held a file, if none does any more; None where that is not known."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        signed = _signature(descriptor)
        return None if signed is None else f"process {signed[0]}"
    except OSError:
        return None
    finally:
        os.close(descriptor)


def remove_dead(place: Path) -> None:
    """Remove locks in ``place`` of processes that ended without doing so.

    They hold nothing, but lie there until a command writes the same output.
    """
    if fcntl is None:
        return
    for path in place.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # it is held, another user's, or no file
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _signature(descriptor) is not None and _is_at(descriptor, path):
                    path.unlink()
            finally:
                os.close(descriptor)


def release_all() -> None:
    """Remove the files of all locks, where the process ends without leaving contexts."""
    for path in list(_HOLDERS):
        path.unlink(missing_ok=True)


@contextmanager
def _lock(output: Path, role: str) -> Generator[None]:
    target = Path(os.path.realpath(output))
    path = target.with_name(f"{_PREFIX}{target.name}{_SUFFIX}")
    thread = threading.get_ident()
    with _GUARD:
        holder = _HOLDERS.get(path)
        if holder not in (None, thread):
            raise _busy(output, role, "another thread of this process", "wait for it")
        descriptor = _taken(path, output, role) if holder is None else None
        if descriptor is not None:
            _HOLDERS[path] = thread
    try:
        yield
    finally:
        if descriptor is not None:
            with _GUARD:
                del _HOLDERS[path]
                # While it is locked: another process could have a file of the same name.
                path.unlink(missing_ok=True)
                os.close(descriptor)


def _taken(path: Path, output: Path, role: str) -> int | None:
    """The descriptor of the locked file; None where the file system has no locks."""
    if fcntl is None:
        return None
    asked = False
    while True:
        try:
            descriptor = os.open(path, _OPENED, 0o666)
        except OSError:
            return None  # no file can be made here: what writes the output tells why
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if asked:
                raise _busy(output, role, *_writer(descriptor)) from error
            os.close(descriptor)
            time.sleep(_MOMENT_S)
            asked = True
            continue
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return None
        if _is_at(descriptor, path):
            _sign(descriptor)
            return descriptor
        os.close(descriptor)  # its holder has just removed it


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at ``path``."""
    try:
        status = path.stat()
    except OSError:
        return False
    own = os.fstat(descriptor)
    return (own.st_dev, own.st_ino) == (status.st_dev, status.st_ino)


def _sign(descriptor: int) -> None:
    """Write into the lock who holds it; a full disk leaves it unsigned."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}".encode(), 0)


def _writer(descriptor: int) -> tuple[str, str]:
    """Who holds the locked file, and what the user can do; closes the file."""
    try:
        signed = _signature(descriptor)
    finally:
        os.close(descriptor)
    if signed is None:
        return "another process", "wait for it"
    number, host = signed
    if host == socket.gethostname():
        return f"process {number}", f"wait for it, end it (kill {number})"
    return f"process {number} on {host}", "wait for it"


def _signature(descriptor: int) -> tuple[str, str] | None:
    """The process and the host that signed the file; None if it is not signed yet."""
    number, _, host = os.pread(descriptor, 512, 0).decode(errors="replace").partition(" ")
    return (number, host) if number.isdigit() else None


def _busy(output: Path, role: str, writer: str, wait: str) -> OutputBusyError:
    return OutputBusyError(
        f"{role} is being written by another finecast, {writer}",
        where=str(output),
        fix=f"{wait}, or choose another name",
    )
