"""The command line as a function."""

from __future__ import annotations

from tests.cli.conftest import finecast

__all__ = ["finecast"]
