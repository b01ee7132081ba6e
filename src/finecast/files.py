"""The files of a command: which are read, which are written, and writing in one step.

Law: what a command reads it never writes, nor anything into a folder that it reads, and it
writes no file twice, whatever names are given for it: links are followed, and hard links are
one file. A file that is there is only replaced with ``force``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finecast.errors import UsageError

DATA_SUFFIX: Final = ".data"
"""Of the file beside an ONNX model that holds its tensors."""
_DIGEST_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """A file and its role in the command."""

    role: str
    path: Path
    identity: Hashable
    written: bool


class CommandFiles:
    """All files of one command; every one is declared before any work is done.

    ``read`` and ``write`` raise UsageError as soon as two declared files are the same and one
    of them is written. The order of the calls does not matter.

    Args:
        force: Whether files that are there may be replaced.
    """

    def __init__(self, *, force: bool = False) -> None:
        self._force = force
        self._claims: list[_Claim] = []
        self._before: dict[Path, tuple[int, int]] = {}

    def read(self, role: str, *paths: str | Path | None) -> None:
        """Declare inputs; None is none.

        Args:
            role: The option or argument that names them.
            paths: The files. Whether they exist is for their reader to say.

        Raises:
            UsageError: If one of them is written too.
        """
        for path in paths:
            if path is not None:
                self._claim(role, Path(path), written=False)

    def write(
        self,
        role: str,
        path: str | Path | None,
        *,
        beside: Sequence[Path] = (),
        replaces: bool = True,
        folder: str = "",
    ) -> None:
        """Declare an output; None is none.

        Args:
            role: The option that names it.
            path: The file.
            beside: Files that may be written with it.
            replaces: Whether a file that is there would be replaced; else its writer says
                whether it can be added to.
            folder: The file by which a model is told that is a folder, if it is one.

        Raises:
            UsageError: If it is another file of the command, cannot be written, or is there
                and must not be replaced.
        """
        if path is None:
            return
        path = Path(path)
        self._claim(role, path, written=True)
        for part in beside:
            self._claim(f"{role} (with {part.name})", part, written=True)
        if folder:
            check_writable_folder(path, folder, force=self._force)
        else:
            check_writable(path, force=self._force or not replaces)
        state = _state(path)
        if replaces and state is not None:
            self._before[path] = state

    def stale(self) -> tuple[Path, ...]:
        """Outputs that were there before the command and that it did not replace.

        What the command reads as well is the user's own, and no output of before.
        """
        read = {claim.identity for claim in self._claims if not claim.written}
        return tuple(
            path
            for path, was in self._before.items()
            if _state(path) == was and _identity(path) not in read
        )

    def _claim(self, role: str, path: Path, *, written: bool) -> None:
        claim = _Claim(role=role, path=path, identity=_identity(path), written=written)
        others = [c for c in self._claims if c.identity == claim.identity]
        self._claims.append(claim)
        for other in others:
            if written or other.written:
                raise UsageError(
                    f"{role} and {other.role} are the same file",
                    where=str(path),
                    fix=f"give {role if written else other.role} another name",
                )
        for folder in [c.path for c in self._claims if not c.written and c.path.is_dir()]:
            self._outside(folder)

    def _outside(self, folder: Path) -> None:
        """Raise UsageError if something is written into a model that is a folder."""
        for claim in self._claims:
            if claim.written and folder.resolve() in claim.path.resolve().parents:
                raise UsageError(
                    f"{claim.role} is in a folder that is read",
                    where=str(claim.path),
                    fix="choose another folder",
                )


def _identity(path: Path) -> Hashable:
    """Equal for two paths that are, or would be, one file."""
    try:
        found = path.stat()
    except OSError:
        # Not there yet. Case does not count: on some file systems it makes no other file.
        folder, name = os.path.split(os.path.realpath(path))
        return folder, name.casefold()
    return found.st_dev, found.st_ino


def _state(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file is replaced or written to; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def check_writable(path: Path, *, force: bool) -> None:
    """Raise UsageError unless a file may be put at ``path``."""
    if path.is_dir():
        raise UsageError("output is a directory", where=str(path), fix="give a file name")
    if path.exists():
        if not path.is_file():
            raise UsageError("output is no ordinary file", where=str(path), fix="name a file")
        if not force:
            raise UsageError(
                "output exists", where=str(path), fix="choose another name or pass --force"
            )
    _check_parent(path)


def check_writable_folder(path: Path, marker: str, *, force: bool) -> None:
    """Raise UsageError unless a model that is a folder may be put at ``path``.

    One that is there is replaced with ``force`` alone, and only if ``marker`` in it says that
    it is such a model.
    """
    if path.exists():
        if not (path / marker).is_file():
            raise UsageError(
                f"output exists and is no model (it has no {marker})",
                where=str(path),
                fix="choose another name",
            )
        if not force:
            raise UsageError(
                "output exists", where=str(path), fix="choose another name or pass --force"
            )
    _check_parent(path)


def _check_parent(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            "output folder does not exist or is not writable",
            where=str(folder),
            fix="create it or choose another",
        )


def publish_folder(staged: Path, path: Path) -> None:
    """Give a finished folder its name; what is there goes, or comes back if that fails.

    ``staged`` lies in a temporary folder beside ``path``, which takes what was there.

    Raises:
        OSError: If it cannot be renamed.
    """
    before = staged.with_name(f"{staged.name}.before")
    if path.exists():
        path.replace(before)
    try:
        staged.replace(path)
    except OSError:
        if before.exists():
            before.replace(path)
        raise


def folder_files(folder: Path, *, leave_out: Sequence[str] = ()) -> list[Path]:
    """All files in a folder, in the order of their names."""
    found = (p for p in folder.rglob("*") if p.is_file() and p.name not in leave_out)
    return sorted(found)


@contextmanager
def suffix_in_lower_case(path: Path) -> Generator[Path]:
    """The file by a name that libraries know its kind by: some do not read ``.KERAS``."""
    suffix = path.suffix.lower()
    if path.suffix == suffix or not path.is_file():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="finecast-") as folder:
        link = Path(folder) / f"{path.stem}{suffix}"
        link.symlink_to(path.resolve())
        yield link


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; as ``write_bytes``.

    Raises:
        UsageError: If the file cannot be written.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes, *, make_folder: bool = False) -> None:
    """Write to a temporary file beside ``path``, then rename it.

    Args:
        path: The file.
        content: All of it.
        make_folder: Whether the folder is made where there is none.

    Raises:
        UsageError: If the file cannot be written.
    """
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        # A folder, not a temporary file: that would stay unreadable for others.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as folder:
            staged = Path(folder) / path.name
            staged.write_bytes(content)
            staged.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(path)) from error


def digest(path: Path, *more: Path) -> str:
    """Sha256 of a file, and of ``more`` that belong to it."""
    total = hashlib.sha256()
    for part in (path, *more):
        with part.open("rb") as file:
            while piece := file.read(_DIGEST_PIECE_BYTES):
                total.update(piece)
    return total.hexdigest()[:16]
