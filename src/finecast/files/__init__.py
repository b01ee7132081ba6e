"""The files of a command: which are read, which are written, and writing in one step.

Law: a command never writes a file that it reads, nor into a folder that it reads, and writes
no file twice, whatever names are given for a file: links are followed, and hard links are one
file. An existing file is only replaced with ``force``.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from finecast.errors import UsageError
from finecast.files.locks import locked, remove_dead
from finecast.files.saved import DATABASE
from finecast.files.staging import remove_abandoned, staging

DATA_SUFFIX: Final = ".data"
"""Suffix of the file beside an ONNX model that holds its tensors."""
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
        force: Whether existing files may be replaced.
    """

    def __init__(self, *, force: bool = False) -> None:
        self._force = force
        self._claims: list[_Claim] = []
        self._before: dict[Path, tuple[int, int] | None] = {}
        self._outputs: dict[Path, str] = {}
        self._kept: list[Path] = []
        self._accepted = False

    def read(self, role: str, *paths: str | Path | None) -> None:
        """Declare inputs; None declares nothing.

        Args:
            role: The option or argument that names them.
            paths: The files. That they exist is checked where they are read.

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
        """Declare an output; None declares nothing.

        Args:
            role: The option that names it.
            path: The file.
            beside: Files that may be written with it.
            replaces: Whether an existing file would be replaced. Otherwise it is added to,
                and what writes it checks that it can be.
            folder: For a model that is a folder, the file in it by which it is recognised.

        Raises:
            UsageError: If it is another file of the command, or cannot be written. That it
                exists is reported by ``check_replaced``, with all others that do.
        """
        if path is None:
            return
        path = Path(path)
        with writing(path):  # a name may be too long for the file system
            self._claim(role, path, written=True)
            for part in beside:
                self._claim(f"{role} (with {part.name})", part, written=True)
            if folder:
                check_writable_folder(path, folder, force=True)
            else:
                check_writable(path if replaces else Path(os.path.realpath(path)), force=True)
            if replaces and not self._force and path.exists():
                self._kept.append(path)
        self._outputs[path] = role
        if replaces:
            self._before |= {part: _state(part) for part in (path, *beside)}

    def check_replaced(self) -> None:
        """Raise UsageError if outputs exist that must not be replaced; names all of them."""
        if self._kept:
            raise exists(*self._kept)
        self._accepted = True

    def stale(self) -> tuple[Path, ...]:
        """Outputs that existed before the command and that it did not replace.

        A file that the command also reads is an input of the user's, not an old output. There
        are none where the command was refused for the names of its files.
        """
        if not self._accepted:
            return ()
        read = {claim.identity for claim in self._claims if not claim.written}
        return tuple(
            path
            for path, was in self._before.items()
            if was is not None
            and path in self._outputs
            and _state(path) == was
            and _identity(path) not in read
        )

    def replaced(self) -> tuple[Path, ...]:
        """Outputs that the command wrote. Each is put at its path in one step, as a whole."""
        return tuple(p for p in self._outputs if self._is_replaced(p))

    def _is_replaced(self, path: Path) -> bool:
        return path in self._before and _state(path) not in (None, self._before[path])

    @contextmanager
    def locked(self) -> Generator[list[str]]:
        """Keep other commands from the outputs while this one works.

        What commands that were killed left beside the outputs, and where temporary files are,
        is removed first, their locks, too; yields a text on each folder. Outputs belong
        together: if the command is interrupted, those that it wrote are removed.

        Raises:
            UsageError: If another command is writing one of them.
        """
        self.check_replaced()
        with locked(self._outputs):
            places = dict.fromkeys((None, *(output.parent for output in self._outputs)))
            for folder in filter(None, places):
                remove_dead(folder)
            try:
                yield [text for place in places for text in remove_abandoned(place)]
            except KeyboardInterrupt:
                for path in filter(self._is_replaced, self._before):
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
                raise

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
            self._check_outside(folder)

    def _check_outside(self, folder: Path) -> None:
        """Raise UsageError if an output lies in ``folder``, which is read."""
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
        status = path.stat()
    except OSError:
        # It does not exist yet. Case is ignored, as some file systems do.
        folder, name = os.path.split(os.path.realpath(path))
        return folder, name.casefold()
    return status.st_dev, status.st_ino


def _state(path: Path) -> tuple[int, int] | None:
    """The file's inode and modification time in ns; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def check_spelling(path: Path) -> None:
    """Raise UsageError for the path of a model that the models' libraries cannot be given.

    They take paths in UTF-8, whatever the locale. Python reads and writes other files, such as
    data and plans, under any name.
    """
    stated = str(path.absolute())
    try:
        spelled = os.fsencode(stated).decode()
    except UnicodeDecodeError:
        raise UsageError(
            "the path is not in UTF-8, and libraries cannot read or write a model there",
            where=str(path),
            fix="rename the file or the folder",
        ) from None
    if spelled != stated:
        raise UsageError(
            "the path cannot be spelled in this locale, whose encoding is"
            f" {sys.getfilesystemencoding()}, and libraries read paths in UTF-8",
            where=spelled,
            fix="set PYTHONUTF8=1 in the environment, or a locale such as LC_ALL=C.UTF-8",
        )


def check_writable(path: Path, *, force: bool) -> None:
    """Raise UsageError unless a file may be put at ``path``."""
    _check_link(path)
    if path.is_dir():
        raise UsageError("output is a directory", where=str(path), fix="give a file name")
    if path.exists():
        if not path.is_file():
            raise UsageError("output is no ordinary file", where=str(path), fix="name a file")
        if not force:
            raise exists(path)
    _check_parent(path)


def exists(*paths: Path) -> UsageError:
    """The error for outputs that exist and must not be replaced."""
    return UsageError(
        "output exists" if len(paths) == 1 else "outputs exist",
        where=", ".join(map(str, paths)),
        fix="choose another name or pass --force",
    )


def check_writable_folder(path: Path, marker: str, *, force: bool) -> None:
    """Raise UsageError unless a model that is a folder may be put at ``path``.

    An existing folder is replaced only with ``force``, and only if it is such a model: if it
    has a file ``marker``.
    """
    _check_link(path)
    if path.exists():
        if not (path / marker).is_file():
            raise UsageError(
                f"output exists and is no model (it has no {marker})",
                where=str(path),
                fix="choose another name",
            )
        if not force:
            raise exists(path)
    _check_parent(path)


def _check_link(path: Path) -> None:
    """Raise UsageError for a link: it would be replaced, and what it leads to stay as it was.

    What is written beside a model (its tensors, its plan) has to be where the model is.
    """
    if path.is_symlink():
        raise UsageError(
            f"output is a link to {os.path.realpath(path)}",
            where=str(path),
            fix="give the name that it leads to, or remove the link",
        )


def _check_parent(path: Path) -> None:
    """Raise UsageError for a folder in which nothing can be made.

    That is tried, as rights do not tell it all: root has every right, and still /proc takes no
    file.
    """
    folder = path.parent
    try:
        with staging(folder):
            return
    except OSError as error:
        raise UsageError(
            "output folder does not exist or is not writable",
            where=str(folder),
            fix="create it or choose another",
        ) from error


@contextmanager
def suffix_in_lower_case(path: Path) -> Generator[Path]:
    """A path to the file with its suffix in lower case: some libraries reject ``.KERAS``.

    Where that is another name it is a temporary link, gone when the context ends.
    """
    suffix = path.suffix.lower()
    if path.suffix == suffix or not path.is_file():
        yield path
        return
    with staging() as folder:
        link = folder / f"{path.stem}{suffix}"
        link.symlink_to(path.resolve())
        yield link


@contextmanager
def writing(path: Path | str) -> Generator[None]:
    """Turn an error of the system inside into one that names ``path`` as what is written.

    Raises:
        UsageError: Instead of an OSError, as where the disk is full.
    """
    try:
        yield
    except OSError as error:
        too_long = error.errno == errno.ENAMETOOLONG
        raise UsageError(
            f"cannot write the output: {error.strerror or error}",
            where=str(path),
            fix="choose a shorter name: files beside the output have longer names than it"
            if too_long
            else "choose a folder that exists, is writable and has room",
        ) from error


def holds_object(path: Path) -> bool:
    """Whether it is a JSON object, as plans are: by a first byte that no model has."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(1) == b"{"
    return False


def read_text(path: Path, *, what: str, most_bytes: int, fix: str) -> str:
    """The text of a file that may come from anybody, of a bounded size.

    Args:
        path: The file.
        what: What it is in messages: "plan".
        most_bytes: The largest size that is read.
        fix: What to do where it cannot be read.

    Raises:
        UsageError: If it cannot be read, is larger, or is no text.
    """
    try:
        size = path.stat().st_size
        if size > most_bytes:
            raise UsageError(
                f"a {what} of {size} bytes: {most_bytes} are the most that are read",
                where=str(path),
                fix=fix,
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or _no_text(path)
        raise UsageError(f"cannot read the {what}: {why}", where=str(path), fix=fix) from error


def _no_text(path: Path) -> str:
    """What a file that is no text is."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(DATABASE)) == DATABASE:
            return "it is a database, as a study is"
    return "it is no text"


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, in one step as ``write_bytes``.

    Raises:
        UsageError: If the file cannot be written.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes, *, make_folder: bool = False) -> None:
    """Write to a temporary file beside ``path``, then rename it.

    With ``make_folder`` a missing folder is made.

    Raises:
        UsageError: If the file cannot be written.
    """
    with writing(path):
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        # In a temporary folder: a temporary file would be readable by its owner alone.
        with staging(path.parent) as folder:
            staged = folder / path.name
            staged.write_bytes(content)
            staged.replace(path)


def digest(path: Path, *more: Path) -> str:
    """The first 16 hex digits of the SHA-256 of a file and those of ``more``, in order."""
    total = hashlib.sha256()
    for part in (path, *more):
        with part.open("rb") as file:
            while piece := file.read(_DIGEST_PIECE_BYTES):
                total.update(piece)
    return total.hexdigest()[:16]
