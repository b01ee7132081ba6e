"""What all tests of PyTorch share."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _stated_rates(fast_bf16: None) -> None:
    """Measured rates differ from device to device, and on a busy one from run to run."""


@pytest.fixture
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs run op by op: their plans are the same, and no kernel is built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's modules warn of themselves
        from functorch.compile import make_boxed_func

        from finecast.training import inductor

    def inner(module: Any, inputs: Any, **options: Any) -> Any:
        del inputs, options
        return make_boxed_func(module.forward)

    monkeypatch.setattr(inductor, "compile_inner", inner)
