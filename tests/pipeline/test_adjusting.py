"""Which adjustments are kept: those that gain beside the ones before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from finecast.pipeline.adjusting import Gain, gains, kept, share_left
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.rules.policy import Adjust

PLAN = Plan(model="m", policy="auto:int8", opset=17, decisions=())
EQUALISE, SMOOTH, BIAS = Adjust


class Examined:
    """Adjusts one constant for each kind, but for those of ``lacking``."""

    def __init__(self, *lacking: Adjust) -> None:
        self.lacking = lacking

    def adjusted(self, plan: Plan, kinds: Sequence[Adjust]) -> Plan:
        found = (k for k in kinds if k not in self.lacking)
        made = (Adjustment(node=k.value, port=1, add=(1.0,)) for k in found)
        return replace(plan, adjustments=(*plan.adjustments, *made))


def error(shares: Mapping[Adjust, float], plan: Plan) -> float:
    found = 0.1
    for one in plan.adjustments:
        found *= shares[Adjust(one.node)]
    return found


@pytest.mark.parametrize(
    ("shares", "lacking", "tried", "stay"),
    [
        ((0.5, 0.5, 0.5), (), (EQUALISE, SMOOTH, BIAS), (EQUALISE, SMOOTH, BIAS)),
        ((0.99, 0.5, 0.5), (), (EQUALISE, SMOOTH, BIAS), (SMOOTH, BIAS)),
        ((1.5, 1.0, 0.9), (SMOOTH,), (EQUALISE, BIAS), (BIAS,)),
        ((1.5, 1.5, float("inf")), (), (EQUALISE, SMOOTH, BIAS), ()),
        ((0.5, 0.5, 0.5), (EQUALISE, SMOOTH, BIAS), (), ()),
    ],
)
def test_each_is_tried_beside_those_that_gain(
    shares: tuple[float, float, float],
    lacking: tuple[Adjust, ...],
    tried: tuple[Adjust, ...],
    stay: tuple[Adjust, ...],
) -> None:
    by_kind = dict(zip(Adjust, shares, strict=True))
    examined = Examined(*lacking)
    found = gains(PLAN, tuple(Adjust), examined, lambda plan: error(by_kind, plan))
    assert tuple(g.kind for g in found) == tried
    assert kept(found) == stay
    at = 0.1
    for gain in found:
        assert gain.operands == 1
        assert gain.error_without == pytest.approx(at)
        assert gain.error_with == pytest.approx(at * by_kind[gain.kind])
        at = gain.error_with if gain.gains else at
    assert share_left(found) == pytest.approx((at / 0.1) ** 2)


def test_a_gain_is_told() -> None:
    one = Gain(kind=SMOOTH, operands=2, error_without=0.02, error_with=0.01)
    assert one.text == "smooth: 2 operands, relative output error 0.02 -> 0.01"
    assert one.share == pytest.approx(0.25)
    assert not replace(one, error_with=0.0199).gains
    broken = replace(one, error_without=float("inf"), error_with=float("inf"))
    assert not broken.gains
    nothing = replace(one, error_without=0.0, error_with=0.0)
    assert not nothing.gains
    assert nothing.share == 1.0
