"""Results that take seconds to compute, kept in ``build/lab`` for the next run.

Law: what is kept is what would be computed, as its name has a digest of the code it is of.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[np.float64]]

_ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = _ROOT / "build" / "lab"


def kept(name: str, code: Sequence[str], compute: Callable[[], Arrays]) -> Arrays:
    """What ``compute`` gives, from a file if an earlier run of the same code wrote one.

    Args:
        name: Tells results apart.
        code: The modules that decide it, as paths below ``benchmarks``.
        compute: Computes it.
    """
    path = FOLDER / f"{name.replace('/', '-')}-{_digest(*code)}.npz"
    if path.is_file():
        with np.load(path) as file:
            return {key: file[key] for key in file.files}
    computed = compute()
    FOLDER.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f"{path.stem}.{os.getpid()}.tmp.npz")
    arrays: dict[str, Any] = {**computed}
    np.savez_compressed(staged, **arrays)
    staged.replace(path)
    return computed


@cache
def _digest(*code: str) -> str:
    state = hashlib.sha256()
    for path in code:
        state.update((_ROOT / "benchmarks" / path).read_bytes())
    return state.hexdigest()[:12]
