"""A fast sample of ONNX's own suite.

The whole of it: ``python -m tests.conformance.backend_suite``.
"""

from __future__ import annotations

from tests.conformance.backend_suite import BAD, FORMATS, run_apart, sample
from tests.conformance.cases import all_cases

# Every 31st case: a prime, so that neighbours, which test one op, are not always left out.
_EVERY = 31


def test_a_sample_of_onnx_s_own_suite() -> None:
    """In all formats at once: to make the cases takes longer than to run the sample."""
    cases = all_cases()
    count = len(cases) // _EVERY
    outcomes = run_apart(sample(cases, count), FORMATS)
    assert len(outcomes) == count * len(FORMATS)
    assert not [
        f"{o.case} {o.format}: {o.result.value}: {o.reason}"
        for o in outcomes
        if o.result in BAD
    ]
    assert all(o.reason or o.result.name in ("AGREES", "NO_FLOAT") for o in outcomes)
