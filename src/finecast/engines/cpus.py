"""How many CPUs there are for this process."""

from __future__ import annotations

import os


def cpus() -> int:
    """The CPUs that this process may use, which in a container may be fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
