"""A ``.pt2`` file as it was loaded: the program, and its graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.export import ExportedProgram

from finecast.files import digest
from finecast.frontends.torch.archive import load_program
from finecast.frontends.torch.capture import Captured, capture, quiet


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """An exported program and the file that it came from."""

    path: Path
    program: ExportedProgram
    captured: Captured
    digest: str
    """Of the file."""

    @property
    def name(self) -> str:
        """The file's name, for messages."""
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return self.path.stat().st_size


def load_file(path: Path, *, trust: bool = False) -> ExportedFile:
    """Read a ``.pt2`` file; nothing in it is executed unless ``trust``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute what it brings.
    """
    with quiet():
        program = load_program(path, trust=trust)
    return ExportedFile(
        path=path, program=program, captured=capture(program, ()), digest=digest(path)
    )
