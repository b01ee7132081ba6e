"""What one unit alone changes is what the whole labelling costs with it and without it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.solver.flips import flips
from finecast.solver.labelling import evaluate
from tests.solver.test_expansion import problems


@given(st.data(), st.integers(2, 4))
def test_the_differences_are_those_of_the_labellings(data: st.DataObject, labels: int) -> None:
    problem = data.draw(problems(labels))
    allowed = [np.flatnonzero(np.isfinite(row)).tolist() for row in problem.time]
    label = np.array([data.draw(st.sampled_from(one)) for one in allowed])
    found, before = flips(problem, label), evaluate(problem, label)
    for unit in range(len(label)):
        for to in range(labels):
            other = label.copy()
            other[unit] = to
            after = evaluate(problem, other)
            assert found.error[unit, to] == pytest.approx(after.error - before.error)
            if not np.isfinite(problem.time[unit, to]):
                assert found.time_s[unit, to] == np.inf
                continue
            more = found.time_s[unit, to] + found.casts_s[unit, to]
            assert more == pytest.approx(after.time_s - before.time_s)
            own = problem.time[unit, to] - problem.time[unit, label[unit]]
            assert found.time_s[unit, to] == own
