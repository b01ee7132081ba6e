"""What fuzzing found stays found."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.fuzz.target import try_bytes

FOUND = sorted((Path(__file__).parent / "found").glob("*"))


@pytest.mark.parametrize("path", FOUND, ids=lambda p: p.name)
def test_what_fuzzing_found(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    try_bytes(path.read_bytes())
