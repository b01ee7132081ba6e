"""Values that contain a constant beyond the range keep fp32, unless they were observed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.constants import CARRIED
from finecast.rules.facts import ValueFacts
from tests.graph.text import from_text

Judged = Callable[..., dict[str, Ruling | None]]
MASK = 3.0e38
GRAPH = from_text(f"""\
input %0 x fp32[4]
constant %1 mask fp32 size=1 largest={MASK!r} smallest_nonzero=1.0
node masked add onnx::Add fp32 (%0, %1) -> (%2 a fp32[4])
node turned transpose onnx::Transpose fp32 (%2) -> (%3 b fp32[4])
node softmax softmax onnx::Softmax fp32 (%3) -> (%4 c fp32[4])
node after relu onnx::Relu fp32 (%4) -> (%5 y fp32[4])
output %5
""")
IDS = {v.name: v.id for v in GRAPH.values}


def kept(judged: Judged, **context: object) -> set[str]:
    return {n for n, v in judged(CARRIED, GRAPH, policy="all:fp16", **context).items() if v}


def test_it_is_carried_by_what_moves_and_adds_and_no_further(judged: Judged) -> None:
    found = judged(CARRIED, GRAPH, policy="all:fp16")
    assert {n for n, v in found.items() if v} == {"turned", "softmax"}
    verdict = found["softmax"]
    assert verdict is not None
    assert verdict.permits == {Format.FP32}
    assert "b has a constant" in verdict.text


def test_a_format_of_the_same_range_carries_it(judged: Judged) -> None:
    assert not any(judged(CARRIED, GRAPH, policy="all:bf16").values())


@pytest.mark.parametrize("seen", ["a", "b"])
def test_observed_facts_beat_carried_constants(judged: Judged, seen: str) -> None:
    facts = {IDS[seen]: ValueFacts.of(np.ones(4, np.float32))}
    reader = {"a": "turned", "b": "softmax"}[seen]
    assert kept(judged, facts=facts) == {"turned", "softmax"} - {reader}
