"""A fast part of the table of opsets: each op from its first opset to two later ones.

The whole of it: ``python -m tests.conformance.opsets``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.opset_cases import CASES, OpsetCase
from tests.conformance.opsets import Reading, cells

_TO = (13, 22)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_a_raised_model_is_read_as_the_model_itself(case: OpsetCase, tmp_path: Path) -> None:
    own = case.opsets[0]
    found = cells(case, own, [to for to in _TO if to > own], tmp_path)
    assert not [c for c in found if c.reading is Reading.OTHER]


def test_axes_are_read_at_an_opset_that_only_one_engine_reads(tmp_path: Path) -> None:
    """OpenVINO 2026.4 does not read the axes of this op at opset 13 to 17."""
    case = next(c for c in CASES if c.text == "y = ReduceL1<axes = [1]>(x)")
    raised = cells(case, 11, [13, 16], tmp_path)
    assert {c.reading for c in raised} == {Reading.SAME}
    assert Reading.OWN in {c.reading for c in cells(case, 13, [13], tmp_path)}
