"""Writing small files in one step: complete, or not at all."""

from __future__ import annotations

import tempfile
from pathlib import Path

from finecast.errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path``, then rename it.

    Raises:
        UsageError: If the file cannot be written.
    """
    try:
        # A folder, not a temporary file: that would stay unreadable for others.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as folder:
            staged = Path(folder) / path.name
            staged.write_text(text, encoding="utf-8")
            staged.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(path)) from error
