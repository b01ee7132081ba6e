"""Graphs as they are, in place of kernels that take a C++ compiler seconds each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch.fx import GraphModule

if TYPE_CHECKING:
    import pytest


class OpByOp:
    """A graph, with the interface of what Inductor makes of it; casts among its ops."""

    def __init__(self, module: GraphModule) -> None:
        from torch._functorch._aot_autograd.utils import make_boxed_func

        self._boxed_call = True  # of the instance: torch's wrappers copy its attributes
        self.current_callable: Callable[[list[Any]], Any] = make_boxed_func(module.forward)

    def __call__(self, inputs: list[Any]) -> Any:
        return self.current_callable(inputs)


def compile_op_by_op(module: GraphModule, inputs: object, **options: object) -> OpByOp:
    """In place of Inductor's ``compile_fx_inner``."""
    del inputs, options
    return OpByOp(module)


def run_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on what finecast compiles builds no kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's modules warn of themselves
        from finecast_training import inductor

    monkeypatch.setattr(inductor, "compile_inner", compile_op_by_op)


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
