"""Observed values have to fit the range of the low format."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.facts import ValueFacts
from finecast.rules.observed import OBSERVED, range_limit

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = "input %0 x fp32[4]\nnode n exp onnx::Exp fp32 (%0) -> (%1 y fp32[4])\n"


def facts(index: int, *numbers: float) -> dict[int, ValueFacts]:
    return {index: ValueFacts.of(np.array(numbers, np.float32))}


@pytest.mark.parametrize("port", [0, 1])
@pytest.mark.parametrize(
    ("numbers", "low", "kept"),
    [
        ((1.0, 100.0), "fp16", False),
        # Half of fp16's largest number is the limit: later data may be larger.
        ((32751.0,), "fp16", False),
        ((32752.0,), "fp16", True),
        ((-40000.0,), "fp16", True),
        # bf16 has fp32's range, so only what overflows itself counts.
        ((3.3e38,), "bf16", False),
        # Most of it rounds to zero: below half of fp16's smallest subnormal, 2**-25.
        ((1e-9, 1e-9, 1.0), "fp16", True),
        ((1e-9, 1.0, 1.0), "fp16", False),
        # Zeros are exact and do not count.
        ((1e-9, 0.0, 0.0, 0.0), "fp16", True),
        ((0.0, 0.0), "fp16", False),
        ((), "fp16", False),
    ],
)
def test_range(
    judged: Judged, port: int, numbers: tuple[float, ...], low: str, kept: bool
) -> None:
    found = judged(OBSERVED, GRAPH, policy=f"all:{low}", facts=facts(port, *numbers))["n"]
    assert (found is not None) == kept
    if found is not None:
        assert found.permits == {Format.FP32}
        assert "xy"[port] in found.text.split()


def test_nothing_observed_no_opinion(judged: Judged) -> None:
    assert judged(OBSERVED, GRAPH, policy="all:fp16")["n"] is None


def test_ports_of_their_own_type_do_not_count(judged: Judged) -> None:
    own = GRAPH.replace("(%0)", "(~%0)")
    assert judged(OBSERVED, own, policy="all:fp16", facts=facts(0, 1e6))["n"] is None


def test_limits() -> None:
    assert range_limit(Format.FP16) == 32752.0
    assert range_limit(Format.BF16) > Format.BF16.max
