"""What the choices say of themselves."""

from __future__ import annotations

import pytest

from finecast.choices import Choice
from finecast.formats import Format

FP32, BF16 = Format.FP32, Format.BF16


@pytest.mark.parametrize(
    ("formats", "lowers"),
    [
        ((), False),
        ((FP32,), False),
        ((FP32, FP32), False),
        ((FP32, BF16), True),
        ((BF16,), True),
    ],
)
def test_a_choice_with_any_op_low_lowers(formats: tuple[Format, ...], lowers: bool) -> None:
    choice = Choice(how="by hand", index=0, formats=formats, time_s=1.0, error=0.0, casts=0)
    assert choice.lowers == lowers
