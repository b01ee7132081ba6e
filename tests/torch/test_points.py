"""Where a PyTorch program can be rounded: before and after what only moves it is one place."""

from __future__ import annotations

from finecast.planning.points import moves
from tests.graph.text import from_text

GRAPH = from_text(
    "input %0 x fp32[4, 4]\n"
    "node turned transpose aten::transpose.int fp32 (%0) -> (%1 t fp32[4, 4])\n"
    "node powers exp aten::exp fp32 (%1) -> (%2 e fp32[4, 4])\n"
    "node joined concat aten::cat fp32 (%1, %2) -> (%3 c fp32[8, 4])\n"
    "node total add aten::add.Tensor fp32 (%2, %1) -> (%4 s fp32[4, 4])\n"
    "output %3\noutput %4\n"
)


def test_only_what_hands_on_the_numbers_of_one_value_moves_it() -> None:
    assert [n.name for n in GRAPH.nodes if moves(n)] == ["turned"]
