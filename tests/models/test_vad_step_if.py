"""Twelve nested If with an LSTM inside: low bodies, and the metric holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.shared import MODELS
from tests.models.vad_step_if import compare

pytestmark = pytest.mark.skipif(not MODELS.is_dir(), reason=f"{MODELS} is absent")


def test_bodies_are_low_and_the_metric_stays(tmp_path: Path) -> None:
    """Within 0.001 of fp32; all clips: ``python -m tests.models.vad_step_if``."""
    found = compare(tmp_path, clips=3)
    assert found.body_ops_low == found.body_ops > 0
    assert "LSTM" in found.body_types
    assert abs(found.fp16 - found.fp32) <= 0.001
