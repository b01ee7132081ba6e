"""How many CPUs there are for this process."""

from __future__ import annotations

import os


def cpus() -> int:
    """What this process may use, as in a container; not all that the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
