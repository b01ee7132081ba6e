"""Ops that lead to a write into an input of the graph keep fp32."""

from __future__ import annotations

from collections.abc import Callable

from finecast.rules import Ruling
from finecast.rules.state import STATE

Judged = Callable[..., dict[str, Ruling | None]]

# p <- p - lr * (0.9 m + grad), and m is updated, too; the loss is no state.
OPTIMIZER = """
input %0 p fp32[8, 4]
input %1 m fp32[8, 4]
input %2 grad fp32[8, 4]
node decay mul aten::mul fp32 (%1) -> (%3 a fp32[8, 4])
node moment add aten::add fp32 (%3, %2) -> (%4 b fp32[8, 4])
node norm reduce_sum aten::sum fp32 (%4) -> (%5 c fp32[])
node clip div aten::div fp32 (%4, %5) -> (%6 d fp32[8, 4])
node turned transpose aten::t fp32 (%6) -> (%7 e fp32[4, 8])
node mixed matmul aten::mm fp32 (%7, %6) -> (%8 f fp32[4, 4])
node back matmul aten::mm fp32 (%6, %8) -> (%9 g fp32[8, 4])
node step sub aten::sub fp32 (%0, %9) -> (%10 h fp32[8, 4])
node said mul aten::mul fp32 (%5) -> (%11 l fp32[])
node keep_m assign aten::copy_ - (~%1, ~%4) -> (~%12 m2 fp32[8, 4])
node keep_p assign aten::copy_ - (~%0, ~%10) -> (~%13 p2 fp32[8, 4])
output %11
"""

# The gradients of a layer's weight and bias, subtracted in the graph that makes them.
STEP = """
input %0 w fp32[8, 4]
input %1 b fp32[8]
input %2 x fp32[32, 4]
input %3 dy fp32[32, 8]
node masked mul aten::mul fp32 (%3) -> (%4 dz fp32[32, 8])
node turned transpose aten::t fp32 (%4) -> (%5 dzt fp32[8, 32])
node product matmul aten::mm fp32 (%5, %2) -> (%6 dw fp32[8, 4])
node summed reduce_sum aten::sum fp32 (%4) -> (%7 db fp32[8])
node step_w sub aten::sub fp32 (%0, %6) -> (%8 w1 fp32[8, 4])
node step_b sub aten::sub fp32 (%1, %7) -> (%9 b1 fp32[8])
node keep_w assign aten::copy_ - (~%0, ~%8) -> (~%10 w2 fp32[8, 4])
node keep_b assign aten::copy_ - (~%1, ~%9) -> (~%11 b2 fp32[8])
"""


def kept(found: dict[str, Ruling | None]) -> set[str]:
    return {name for name, verdict in found.items() if verdict is not None}


def test_all_of_an_optimizer_keeps_fp32_and_what_is_beside_it_does_not(judged: Judged) -> None:
    found = judged(STATE, OPTIMIZER)
    assert kept(found) == set(found) - {"said"}
    verdict = found["moment"]
    assert verdict is not None
    assert "written to m" in verdict.text


def test_the_way_back_ends_at_the_products_and_sums_over_data(judged: Judged) -> None:
    # The weight gradient's product may be low, the bias gradient's sum keeps fp32; what is in
    # front of both is no state.
    assert kept(judged(STATE, STEP)) == {"summed", "step_w", "step_b"}


def test_statistics_that_a_kernel_keeps_in_fp32_leave_it_free(judged: Judged) -> None:
    graph = """
    input %0 mean fp32[8]
    input %1 x fp32[4, 8]
    node n batch_norm_training aten::n fp32 (%1, ~%0) -> (%2 y fp32[4, 8], ~%3 m fp32[8])
    node keep assign aten::copy_ - (~%0, ~%3) -> (~%4 m2 fp32[8])
    output %2
    """
    assert kept(judged(STATE, graph)) == set()


def test_a_graph_that_writes_nothing_is_left_alone(judged: Judged) -> None:
    assert kept(judged(STATE, OPTIMIZER.replace(" assign ", " identity "))) == set()


def test_a_write_of_several_tensors_is_one_of_each(judged: Judged) -> None:
    found = judged(
        STATE,
        """
        input %0 p fp32[4]
        input %1 q fp32[4]
        input %2 grad fp32[4]
        node step_p sub aten::sub fp32 (%0, %2) -> (%3 p1 fp32[4])
        node step_q sub aten::sub fp32 (%1, %2) -> (%4 q1 fp32[4])
        node keep assign aten::_foreach_copy_ - (~%0, ~%1, ~%3, ~%4) -> ()
        """,
    )
    assert kept(found) == {"step_p", "step_q"}
