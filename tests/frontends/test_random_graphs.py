"""Random graphs under random plans.

10,000 of them: ``python -m tests.frontends.random_plans``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.frontends.random_plans import try_one


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(min_value=0, max_value=2**40))
def test_the_converted_model_is_valid_and_equals_the_emulated_plan(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try_one(Random(seed), Path(folder))
