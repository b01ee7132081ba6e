"""A fast sample of ONNX's own suite.

The whole of it: ``python -m tests.conformance.backend_suite``.
"""

from __future__ import annotations

import pytest

from finecast.numbers.formats import Format
from tests.conformance.backend_suite import BAD, FORMATS, run_apart, sample
from tests.conformance.cases import LIGHT, all_cases, light_cases
from tests.conformance.outcome import Result

# Every 31st case: a prime, so that neighbours, which test one op, are not always left out.
_EVERY = 31


@pytest.mark.long
def test_a_sample_of_onnx_s_own_suite() -> None:
    """In all formats at once: to make the cases takes longer than to run the sample."""
    cases = [c for c in all_cases() if c.kind != LIGHT]
    count = len(cases) // _EVERY
    outcomes = run_apart(sample(cases, count), FORMATS)
    assert len(outcomes) == count * len(FORMATS)
    assert not [
        f"{o.case} {o.format}: {o.result.value}: {o.reason}"
        for o in outcomes
        if o.result in BAD
    ]
    assert all(o.reason or o.result.name in ("AGREES", "NO_FLOAT") for o in outcomes)


def test_a_net_of_an_old_opset() -> None:
    """Its logits are equal but for the order of sums: its softmax has no certain digit."""
    nets = [c for c in light_cases() if "squeezenet" in c.name]
    if not nets:
        pytest.skip("this release of onnx ships no light nets")
    (found,) = run_apart(nets, [Format.BF16])
    assert found.result is Result.AGREES, found.reason
    assert found.low > 50
