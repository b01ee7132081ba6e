"""Pauses of Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

# Fewer objects than this, some 10 MB, are not worth a collection.
_UNSEEN_MOST: Final = 100_000


class _Unseen:
    """Objects made in pauses since the last collection, and how many bring the next."""

    count = 0
    most = _UNSEEN_MOST


@contextmanager
def paused_collection(*, keeps: bool = True) -> Generator[None]:
    """No garbage collection while many objects are made that all live on.

    Otherwise every collection walks them all, and time grows faster than the model. What was
    made goes to the oldest generation without a walk. Python does not count it there; so
    before a pause everything is collected if earlier ones made as many objects as were left
    the last time, and dropped models do not pile up. Not before one that ``keeps`` little of
    what it makes.
    """
    was = gc.isenabled()
    if was and keeps and _Unseen.count > _Unseen.most:
        gc.collect()
        _Unseen.count, _Unseen.most = 0, max(_UNSEEN_MOST, len(gc.get_objects()))
    gc.disable()
    before = gc.get_count()[0]
    try:
        yield
    finally:
        if was:
            _Unseen.count += max(gc.get_count()[0] - before, 0)
            if not gc.get_freeze_count():  # others' frozen objects stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()
