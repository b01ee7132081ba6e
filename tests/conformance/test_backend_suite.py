"""A fast sample of ONNX's own suite.

The whole of it: ``python -m tests.conformance.backend_suite``.
"""

from __future__ import annotations

import pytest

from finecast.numbers.formats import Format
from tests.conformance.backend_suite import BAD, FORMATS, run_apart, sample
from tests.conformance.cases import all_cases

# Every 17th case: a prime, so that neighbours, which test one op, are not always left out.
_EVERY = 17


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.label)
def test_a_sample_of_onnx_s_own_suite(fmt: Format) -> None:
    cases = all_cases()
    outcomes = run_apart(sample(cases, len(cases) // _EVERY), [fmt])
    assert len(outcomes) == len(cases) // _EVERY
    assert not [f"{o.case}: {o.result.value}: {o.reason}" for o in outcomes if o.result in BAD]
    assert all(o.reason or o.result.name in ("AGREES", "NO_FLOAT") for o in outcomes)
