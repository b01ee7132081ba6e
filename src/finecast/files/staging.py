"""Temporary folders: of models in memory, and beside an output that is written in them first.

Law: whatever ends a process, the next command that converts a model, or writes to the place,
removes what it left, and nothing of a process that lives. In each folder is a file that its
process holds locked, as ``locks`` does with outputs: the system unlocks it with the process,
on whatever machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from finecast.errors import TOO_MANY_FILES
from finecast.files.locks import dead_owner, hold, release

_PREFIX: Final = ".finecast-"
_OWNER: Final = "owner"
_CONTENT: Final = "content"


@contextmanager
def staging(place: Path | None = None) -> Generator[Path]:
    """An empty folder in ``place``, or where temporary files are; it is removed at the end.

    Raises:
        OSError: If it cannot be made.
    """
    folder = tempfile.TemporaryDirectory(dir=place, prefix=_PREFIX)
    path = Path(folder.name)
    spare = descriptor = None
    try:
        spare = os.open(os.devnull, os.O_RDONLY)
        descriptor = hold(path / _OWNER)
        content = path / _CONTENT
        content.mkdir()
        yield content
    finally:
        # While it is removed it is still this process's: another one would find it dead.
        try:
            folder.cleanup()
        except KeyboardInterrupt:
            folder.cleanup()  # which removes the rest
            raise
        except OSError as error:
            if error.errno not in TOO_MANY_FILES:
                raise
            release(spare)
            spare = None
            _remove(path)
        finally:
            release(spare)
            release(descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder with one open file at a time; ``shutil`` has two for each level.

    An empty folder takes none: where there are no files left it may be the only kind.
    """
    with suppress(OSError):
        folder.rmdir()
        return
    for path in map(folder.joinpath, os.listdir(folder)):
        if path.is_dir() and not path.is_symlink():
            _remove(path)
        else:
            path.unlink()
    folder.rmdir()


class Stage:
    """A temporary folder that is deleted with this object."""

    def __init__(self) -> None:
        held = ExitStack()
        self.folder = held.enter_context(staging())
        weakref.finalize(self, held.close)


def remove_abandoned(place: Path | None = None) -> list[str]:
    """Remove what processes that no longer run left in ``place``; a text if there was any.

    Without a place it is done where temporary files are.
    """
    place = place or Path(tempfile.gettempdir())
    owners: dict[Path, str] = {}
    size = 0
    with suppress(OSError):
        for folder in sorted(place.glob(f"{_PREFIX}*")):
            if _is_own(folder) and (owner := dead_owner(folder / _OWNER)):
                size += sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
                shutil.rmtree(folder, ignore_errors=True)
                owners[folder.absolute()] = owner
    if not owners:
        return []
    processes = ", ".join(sorted({*owners.values()}))
    if len(owners) == 1:
        folders, ended = str(*owners), "it was ended"
    else:
        folders = f"{len(owners)} temporary folders in {place.absolute()}"
        ended = "they were ended"
    return [f"removed {folders} ({size / 1e6:.1f} MB), which {processes} left as {ended}"]


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, and no link, of this user."""
    owner = folder.lstat().st_uid
    return folder.is_dir() and not folder.is_symlink() and owner == os.getuid()
