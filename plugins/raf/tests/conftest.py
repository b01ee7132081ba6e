"""What all tests of RAF's rules share."""

from __future__ import annotations

from tests.torch.conftest import _stated_rates, op_by_op

__all__ = ["_stated_rates", "op_by_op"]
