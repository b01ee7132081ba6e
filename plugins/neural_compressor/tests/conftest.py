"""What all tests of the compatibility layers share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _stated_rates(fast_bf16: None) -> None:
    """Measured rates differ from device to device, and on a busy one from run to run."""
