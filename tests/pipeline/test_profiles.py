"""What profiles of a model's two ends say before errors are probed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from finecast.engines.base import KernelTime
from finecast.numbers.formats import Format
from finecast.pipeline.profiles import Profiles

WEIGHTS = Format.INT8_WEIGHTS


def profile(high_s: float, low_s: Mapping[Format, float]) -> Profiles:
    def kernels(time_s: float) -> list[KernelTime]:
        half = KernelTime(kernel="k", kind="", ops=(), format="", time_s=time_s / 2)
        return [half, half]

    return Profiles(high=kernels(high_s), low={f: kernels(s) for f, s in low_s.items()})


@pytest.mark.parametrize(
    ("low_s", "slow"),
    [
        ({Format.BF16: 2.0, WEIGHTS: 0.5}, ()),
        ({Format.BF16: 2.0, WEIGHTS: 1.5}, (WEIGHTS,)),  # casts may be what bf16 loses by
        ({WEIGHTS: 1.5}, ()),
    ],
)
def test_weights_that_gain_nothing_are_left_out(
    low_s: dict[Format, float], slow: tuple[Format, ...]
) -> None:
    found, left_out = profile(1.0, low_s).without_gainless()
    assert left_out == slow
    assert found.low.keys() == low_s.keys() - set(slow)
