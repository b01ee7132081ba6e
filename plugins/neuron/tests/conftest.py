"""The command line as a function, with small models and their data."""

from __future__ import annotations

from tests.cli.conftest import data, finecast, mlp, mlp_data, net

__all__ = ["data", "finecast", "mlp", "mlp_data", "net"]
