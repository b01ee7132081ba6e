"""The memory of this machine, or of the container that this process runs in; what fits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_UNKNOWN: Final = 1 << 60
_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")
"""The limit of a container by version 2 of control groups: bytes, or ``max``."""

MOST_LOADED: Final = 0.5
"""The largest share of the memory that files may have of models which are loaded at once. An
engine arranges weights anew for its kernels, and a second copy is read from the file."""


def memory_bytes() -> int:
    """The memory in bytes; where the system does not tell, more than any model takes."""
    if not hasattr(os, "sysconf"):
        return _UNKNOWN
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        found = min(found, int(_CONTAINER.read_text(encoding="ascii")))
    return found


def packed(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Groups of names, in order, of at most ``limit`` bytes each, or of one larger value."""
    groups: list[list[str]] = []
    total = limit + 1
    for name, size in sizes.items():
        if total + size > limit:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups
