"""Writing small files in one step: complete, or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from finecast.errors import UsageError


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to a temporary file beside ``path``, then rename it.

    Raises:
        UsageError: If the file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".finecast-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(path)) from error
