"""Pauses of Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

# Fewer objects than this, some 10 MB, are not worth a collection.
_LEAST_LIMIT: Final = 100_000


class _Uncollected:
    """How many objects pauses made since the last full collection; it is due at ``limit``."""

    count = 0
    limit = _LEAST_LIMIT


@contextmanager
def paused_collection(*, keeps: bool = True) -> Generator[None]:
    """Pause garbage collection while many objects are made that all live on.

    Otherwise every collection walks all of them, and time grows faster than the model. After
    the pause the new objects are moved to the oldest generation without a walk. Python does
    not count them there, and would not collect dropped models. So a pause begins with a full
    collection if earlier pauses made more objects than the last such collection left.

    Args:
        keeps: False if little of what is made lives on: such a pause never collects.
    """
    was_enabled = gc.isenabled()
    if was_enabled and keeps and _Uncollected.count > _Uncollected.limit:
        gc.collect()
        _Uncollected.count = 0
        _Uncollected.limit = max(_LEAST_LIMIT, _count())
    gc.disable()
    before = gc.get_count()[0]
    try:
        yield
    finally:
        if was_enabled:
            _Uncollected.count += max(gc.get_count()[0] - before, 0)
            if not gc.get_freeze_count():  # objects that the host program froze would thaw
                # All objects move to the oldest generation, in a time that does not depend on
                # them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _count() -> int:
    """How many objects there are; walks all of them.

    They are not listed for it: a list would refer to tuples that other threads are making, and
    Python makes no tuple to the end that something else refers to. Where the host program
    froze objects, those are counted: the others cannot be told from them.
    """
    frozen = gc.get_freeze_count()
    if frozen:
        return frozen
    gc.freeze()
    count = gc.get_freeze_count()
    gc.unfreeze()
    return count
