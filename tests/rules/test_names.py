"""Includes and excludes by node name."""

from __future__ import annotations

import re
from collections.abc import Callable

from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.policy import Policy
from finecast.rules.user_rules import NAMES

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = """\
input %0 x fp32[4]
node enc/0/relu relu onnx::Relu fp32 (%0) -> (%1 a fp32[4])
node enc/1/relu relu onnx::Relu fp32 (%1) -> (%2 b fp32[4])
node head/relu relu onnx::Relu fp32 (%2) -> (%3 c fp32[4])
"""


def kept(found: dict[str, Ruling | None]) -> set[str]:
    assert all(v is None or v.permits == {Format.FP32} for v in found.values())
    return {name for name, v in found.items() if v is not None}


def test_without_patterns_no_opinion(judged: Judged) -> None:
    assert not kept(judged(NAMES, GRAPH))


def test_only_what_is_included_may_be_low(judged: Judged) -> None:
    policy = Policy(include=(re.compile("enc/0"), re.compile("head")))
    assert kept(judged(NAMES, GRAPH, policy=policy)) == {"enc/1/relu"}


def test_what_is_excluded_stays_even_if_included(judged: Judged) -> None:
    policy = Policy(include=(re.compile("enc"),), exclude=(re.compile("/1/"),))
    found = judged(NAMES, GRAPH, policy=policy)
    assert kept(found) == {"enc/1/relu", "head/relu"}
    excluded = found["enc/1/relu"]
    assert excluded is not None
    assert excluded.waives  # the user's word against other rules of thumb
    assert "'/1/'" in excluded.text
