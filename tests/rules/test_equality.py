"""A maximum and the value that it is compared with are both unrounded."""

from __future__ import annotations

from collections.abc import Callable

from finecast.rules import Ruling
from finecast.rules.equality import EQUALITY

Judged = Callable[..., dict[str, Ruling | None]]

GRAPH = """
input %0 x fp32[4, 8]
node made mul aten::mul fp32 (%0) -> (%1 a fp32[4, 8])
node moved transpose aten::t fp32 (%1) -> (%2 b fp32[8, 4])
node top reduce_max aten::amax fp32 (%2) -> (%3 c fp32[8, 1])
node same equal aten::eq fp32 (%2, %3) -> (%4 d bool[8, 4])
node other reduce_max aten::amax fp32 (%1) -> (%5 e fp32[4, 1])
output %4
output %5
"""


def test_what_selects_for_an_equality_keeps_fp32(judged: Judged) -> None:
    found = judged(EQUALITY, GRAPH)
    kept = {name for name, verdict in found.items() if verdict is not None}
    assert kept == {"same", "top", "moved"}


def test_without_an_equality_it_has_no_opinion(judged: Judged) -> None:
    found = judged(EQUALITY, GRAPH.replace(" equal ", " greater "))
    assert set(found.values()) == {None}
