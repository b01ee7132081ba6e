"""Temporary folders beside an output, in which it is written before it takes its name.

Law: whatever ends a process, the next command that writes to the folder removes what it left,
and nothing of a process that lives. In each folder is a file that its process holds locked, as
``locks`` does with outputs: the system unlocks it with the process, on whatever machine.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from finecast.files.locks import dead_owner, hold, release

_PREFIX: Final = ".finecast-"
_OWNER: Final = "owner"
_CONTENT: Final = "content"


@contextmanager
def staging(place: Path | None) -> Generator[Path]:
    """An empty folder in ``place``, or where temporary files are; it is removed at the end.

    Raises:
        OSError: If it cannot be made.
    """
    if place is None:
        with tempfile.TemporaryDirectory(prefix="finecast-") as name:
            yield Path(name)
        return
    with tempfile.TemporaryDirectory(dir=place, prefix=_PREFIX) as name:
        descriptor = hold(Path(name) / _OWNER)
        try:
            content = Path(name) / _CONTENT
            content.mkdir()
            yield content
        finally:
            release(descriptor)


def remove_abandoned(place: Path) -> list[str]:
    """Remove what processes that no longer run left in ``place``; a text on each folder."""
    found: list[str] = []
    with suppress(OSError):
        for folder in sorted(place.glob(f"{_PREFIX}*")):
            if _is_own(folder) and (owner := dead_owner(folder / _OWNER)):
                size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
                shutil.rmtree(folder, ignore_errors=True)
                told = f"{folder.name} ({size / 1e6:.1f} MB)"
                found.append(f"removed {told}, which {owner} left as it was ended")
    return found


def _is_own(folder: Path) -> bool:
    """Whether it is a folder, and no link, of this user."""
    owner = folder.lstat().st_uid
    return folder.is_dir() and not folder.is_symlink() and owner == os.getuid()
