"""What all tests of PyTorch share."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _stated_rates(fast_bf16: None) -> None:
    """Measured rates differ from device to device, and on a busy one from run to run."""


@pytest.fixture
def op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled graphs run op by op: their plans are the same, and no kernel is built."""
    pytest.importorskip("finecast_training")
    from plugins.training.tests.uncompiled import run_op_by_op

    run_op_by_op(monkeypatch)
