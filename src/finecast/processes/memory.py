"""The memory of this machine, or of the container that this process runs in; what fits.

Besides bytes, a process has so many mappings at most. OpenVINO takes one for each kernel, and
ends the process where there are no more: that was so with 13 models of 5,000 ops.
"""

from __future__ import annotations

import errno
import importlib
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from finecast.errors import (
    TOO_MANY_FILES,
    FinecastError,
    OutOfMemoryError,
    UsageError,
    first_line,
)

try:
    import resource
except ImportError:  # on Windows, where memory is not limited
    resource = None

_UNKNOWN: Final = 1 << 60
_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")
"""The limit of a container by version 2 of control groups: bytes, or ``max``."""
_IN_CONTAINER: Final = Path("/sys/fs/cgroup/memory.current")
_MEMORY: Final = Path("/proc/meminfo")
_UNTOUCHED: Final = 4 << 30
"""Addresses that engines reserve for threads and pools, and that take no memory."""
_COPIES: Final = 3
"""Of a model that is loaded: its file, its weights as kernels read them, and on the way."""

_MOST_MAPPINGS: Final = Path("/proc/sys/vm/max_map_count")
"""The mappings of a process that Linux allows; 65,530 by default."""

_MOST_LOADED: Final = 0.5
"""The largest share of the memory that files may have of models which are loaded at once. An
engine arranges weights anew for its kernels, and a second copy is read from the file. Of the
mappings kernels may have the same share."""

_STATUS: Final = Path("/proc/self/status")
_LARGEST_STEP: Final = 256 << 20
"""A process that came so near to its limit failed at it: libraries, and the pools of memory
that they take for each thread, have up to so many bytes."""

_PRODUCT: Final = 256
"""Rows of a product that OpenBLAS computes by its buffer; small ones need none."""

_LEAST_BYTES: Final = 512 << 20
"""What the libraries of a small conversion take (580 MB in all). Some of them crash, or try
for ever, where they get no memory while they are loaded: so less is refused before that."""

_ERROR_BYTES: Final = 16 << 20
"""What naming an error takes: modules, and the file of this process's state."""

_OF_MEMORY: Final = re.compile(
    r"bad[_ ]alloc|cannot allocate|can't alloc|failed to (allocate|map segment)"
    r"|out of memory|unable to allocate",
    re.IGNORECASE,
)
"""What libraries and the system say where memory does not suffice."""

_MORE: Final = "close other programs, or use smaller batches (--batch)"


def limit_error(error: BaseException) -> FinecastError | None:
    """The error of a limit of files or memory that ``error`` comes of; None if of none."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in TOO_MANY_FILES:
            return UsageError(
                f"too many open files: {_what(error)}",
                fix="raise the limit (ulimit -n), or close what else has files open",
            )
    return memory_error(error)


def memory_error(error: BaseException) -> OutOfMemoryError | None:
    """The error of memory that ``error`` comes of; None if it has another cause.

    Libraries that get no memory say that they have no device or no such format, that they
    cannot start a thread, or that they are not there. So an error counts also where the
    process came to its limit of addresses (``ulimit -v``).
    """
    for cause in _causes(error):
        if isinstance(cause, MemoryError):
            what = " ".join(("out of memory", *map(str, cause.args)))
            return OutOfMemoryError(what, fix=_MORE)
        no_memory = isinstance(cause, OSError) and cause.errno == errno.ENOMEM
        if no_memory or _OF_MEMORY.search(str(cause)):
            return OutOfMemoryError(f"out of memory: {_what(cause)}", fix=_MORE)
    limit = _reached_limit()
    if not limit or isinstance(error, UsageError):
        return None
    return OutOfMemoryError(
        f"out of memory: the limit of {limit / 1e6:.0f} MB was reached, and what failed was:"
        f" {_what(error)}",
        fix=f"raise the limit (ulimit -v), {_MORE}",
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it comes of, each once."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _what(error: BaseException) -> str:
    return error.what if isinstance(error, FinecastError) else first_line(error)


def _reached_limit() -> int:
    """The limit in bytes of this process's addresses if it came near to that, else 0."""
    limit = _limit()
    return limit if limit and status_bytes("VmPeak") > limit - _LARGEST_STEP else 0


def status_bytes(name: str) -> int:
    """An amount of memory that Linux states of this process; 0 where the system does not."""
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0


def _limit() -> int:
    """The limit in bytes of this process's addresses; 0 where there is none."""
    if resource is None:
        return 0
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return 0 if limit == resource.RLIM_INFINITY else limit


def reserve_memory() -> mmap.mmap | None:
    """Where addresses are limited, take now what later work cannot fail to get.

    numpy and scipy each have an OpenBLAS, which takes a buffer for each of its threads:
    numpy's at the first product, scipy's where it is loaded. Where numpy's gets none it ends
    the process, with status 1 and nothing cleaned up; scipy's tries for ever. With one thread
    there is one buffer each, and both have it before all other work.

    Returns:
        Memory that is to be closed before an error is named: without any left, Python itself
        can crash. None where nothing is limited.

    Raises:
        OSError: If less is left than the libraries take.
    """
    if not _limit():
        return None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    mmap.mmap(-1, _LEAST_BYTES).close()
    import numpy as np

    importlib.import_module("scipy.linalg")  # loads its OpenBLAS
    square = np.ones((_PRODUCT, _PRODUCT))
    np.matmul(square, square)
    return mmap.mmap(-1, _ERROR_BYTES)


def memory_bytes() -> int:
    """The memory in bytes; where the system does not tell, more than any model takes."""
    if not hasattr(os, "sysconf"):
        return _UNKNOWN
    size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        size_bytes = min(size_bytes, int(_CONTAINER.read_text(encoding="ascii")))
    return size_bytes


def available_bytes() -> int:
    """The memory in bytes that is not in use; all of it where the system does not tell."""
    free_bytes = memory_bytes()
    with suppress(OSError, ValueError):
        text = _MEMORY.read_text(encoding="ascii")
        free_bytes = min(
            free_bytes, int(text.partition("MemAvailable:")[2].split(maxsplit=1)[0]) << 10
        )
    with suppress(OSError, ValueError):
        used = int(_IN_CONTAINER.read_text(encoding="ascii"))
        free_bytes = min(
            free_bytes, max(int(_CONTAINER.read_text(encoding="ascii")) - used, 0)
        )
    return free_bytes


def most_tried_bytes(size: int) -> int:
    """Addresses that a process may take to load and run a model of ``size`` bytes.

    Half of the memory that is available, as the model is loaded in this process, too. A model
    may state constants and values of any size.
    """
    return available_bytes() // 2 + _UNTOUCHED + _COPIES * size


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
