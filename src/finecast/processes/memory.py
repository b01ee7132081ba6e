"""The memory of this machine, or of the container that this process runs in; what fits.

Besides bytes, a process has so many mappings at most. OpenVINO takes one for each kernel, and
ends the process where there are no more: that was so with 13 models of 5,000 ops.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

_UNKNOWN: Final = 1 << 60
_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")
"""The limit of a container by version 2 of control groups: bytes, or ``max``."""

_MOST_MAPPINGS: Final = Path("/proc/sys/vm/max_map_count")
"""The mappings of a process that Linux allows; 65,530 by default."""

_MOST_LOADED: Final = 0.5
"""The largest share of the memory that files may have of models which are loaded at once. An
engine arranges weights anew for its kernels, and a second copy is read from the file. Of the
mappings kernels may have the same share."""


def memory_bytes() -> int:
    """The memory in bytes; where the system does not tell, more than any model takes."""
    if not hasattr(os, "sysconf"):
        return _UNKNOWN
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        found = min(found, int(_CONTAINER.read_text(encoding="ascii")))
    return found


def most_mappings() -> int:
    """The mappings that a process may have; where there is no limit, more than there are."""
    with suppress(OSError, ValueError):
        return int(_MOST_MAPPINGS.read_text(encoding="ascii"))
    return _UNKNOWN


def most_loaded_bytes() -> int:
    """What models that are loaded at once may count as together, by ``loaded_bytes``."""
    return int(_MOST_LOADED * memory_bytes())


def loaded_bytes(size: int, ops: int) -> int:
    """What a loaded model of ``size`` bytes and ``ops`` ops counts as, in bytes of memory.

    Its ops count as the share of the memory that their mappings are of all mappings: three of
    two ops, with those of casts and of models that were loaded before.
    """
    return max(size, 3 * ops * memory_bytes() // (2 * most_mappings()))


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
