"""Writing small files in one step: complete, or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from finecast.errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; as ``write_bytes``.

    Raises:
        UsageError: If the file cannot be written.
    """
    write_bytes(path, text.encode())


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
