"""Graphs as they are, in place of kernels that take a C++ compiler seconds each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

if TYPE_CHECKING:
    import pytest


def run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on what finecast compiles builds no kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's modules warn of themselves
        from finecast_training import inductor

    monkeypatch.setattr(inductor, "compile_inner", inductor.compile_op_by_op)


@contextmanager
def kernels_that_compute_nothing() -> Generator[None]:
    """A block in which Inductor's kernels do nothing; memory is allocated as for real ones."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.utils import fresh_cache

    def nothing(*_: object) -> None: ...

    def made(*_: object) -> Callable[..., None]:
        return nothing

    # Other tests must not meet these kernels in a cache.
    with fresh_cache(), patch.object(AsyncCompile, "cpp_pybinding", made):
        yield
