"""Writing a result, in one step; its folder is made where there is none."""

from __future__ import annotations

import tempfile
from pathlib import Path

from finecast.errors import UsageError


def write_bytes(path: Path, content: bytes) -> None:
    """Write to a temporary file beside ``path``, then rename it.

    Raises:
        UsageError: If the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as folder:
            staged = Path(folder) / path.name
            staged.write_bytes(content)
            staged.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=str(path)) from error
