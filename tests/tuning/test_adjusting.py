"""Which adjustments are kept: those that gain beside the ones before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finecast.engines.base import Array, Feeds
from finecast.errors import EngineError
from finecast.native.gains import Gain, gaining_kinds, measure_gains, share_left
from finecast.native.subject import Examined
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.rules.policy import Adjust
from finecast.tuning.goal import Objective
from finecast.tuning.measuring import Measuring
from finecast.tuning.search import Adjustments, Candidate

PLAN = Plan(model="m", policy="auto:int8", opset=17, decisions=())
SMOOTH, BIAS = KINDS = (Adjust.SMOOTH, Adjust.BIAS)


class Adjusted(Examined):
    """Adjusts one constant for each kind, but for those of ``lacking``."""

    @property
    def adjusts(self) -> Sequence[Adjust]:
        return KINDS

    def analysis(self, *, of_time: bool = True, lost: Any = None) -> Any:
        raise NotImplementedError

    def without(self, unfit: Any) -> Any:
        raise NotImplementedError

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
        ((0.5, 0.5), (), (SMOOTH, BIAS), (SMOOTH, BIAS)),
        ((0.99, 0.5), (), (SMOOTH, BIAS), (BIAS,)),
        ((0.5, 0.99), (), (SMOOTH, BIAS), (SMOOTH,)),
        ((1.0, 0.9), (SMOOTH,), (BIAS,), (BIAS,)),
        ((1.5, float("inf")), (), (SMOOTH, BIAS), ()),
        ((0.5, 0.5), (SMOOTH, BIAS), (), ()),
    ],
)
def test_each_is_tried_beside_those_that_gain(
    shares: tuple[float, float],
    lacking: tuple[Adjust, ...],
    tried: tuple[Adjust, ...],
    stay: tuple[Adjust, ...],
) -> None:
    by_kind: dict[Adjust, float] = dict(zip(KINDS, shares, strict=True))
    examined = Adjusted(*lacking)
    found = measure_gains(PLAN, KINDS, examined.adjusted, lambda plan: error(by_kind, plan))
    assert tuple(g.kind for g in found) == tried
    assert gaining_kinds(found) == stay
    at = 0.1
    for gain in found:
        assert gain.operands == 1
        assert gain.error_without == pytest.approx(at)
        assert gain.error_with == pytest.approx(at * by_kind[gain.kind])
        at = gain.error_with if gain.gains else at
    assert share_left(found) == pytest.approx((at / 0.1) ** 2)


def test_a_gain_is_told() -> None:
    one = Gain(kind=SMOOTH, operands=2, error_without=0.02, error_with=0.01)
    assert one.text == "smooth: 2 operands, relative output error 2% -> 1%"
    assert one.share == pytest.approx(0.25)
    assert not replace(one, error_with=0.0199).gains
    broken = replace(one, error_without=float("inf"), error_with=float("inf"))
    assert not broken.gains
    nothing = replace(one, error_without=0.0, error_with=0.0)
    assert not nothing.gains
    assert nothing.share == 1.0


@dataclass
class ToySubject:
    """Runs plans whose adjustments leave so much of the error; none but ``runs``."""

    shares: Mapping[Adjust, float]
    runs: bool = True
    loaded: list[Plan] = field(default_factory=list[Plan])

    @property
    def model(self) -> Any:
        return self

    @property
    def reference(self) -> Any:
        return Session(0.0)

    def feeds(self, workload: object) -> Sequence[Feeds]:
        return [{"x": np.ones(1, np.float32)}]

    def build(self, plan: Plan) -> Any:
        self.loaded.append(plan)
        return Built(plan)

    def tried(self, built: Any) -> Any:
        if not self.runs:
            raise EngineError("no kernel")
        return Session(error(self.shares, built.plan))


@dataclass
class Built:
    plan: Plan


@dataclass
class Session:
    """Gives 1, and so much of it more."""

    error: float
    free: Sequence[Any] = ()

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return {"y": np.array([1.0 + self.error]) * feeds["x"]}


def measuring(subject: Any) -> Measuring:
    workload: Any = SimpleNamespace(of=(), slices=None)
    return Measuring(objective=Objective.LATENCY, subject=subject, workload=workload)


def test_each_gain_of_a_plan_that_was_made_is_told_beside_those_before() -> None:
    subject: Any = ToySubject(dict(zip(KINDS, (0.25, 0.8), strict=True)))
    adjustments = Adjustments(measuring=measuring(subject), examined=Adjusted(), kinds=KINDS)
    found = adjustments.measure(PLAN)
    wanted = Candidate(
        name="lowest",
        plan=PLAN,
        error=0.01,
        cost=2.0,
        latency_s=2.0,
        casts=0,
        predicted_cost=1.0,
    )
    (made,) = adjustments.proposals([wanted.proposal], found)
    assert (made.name, made.time_s) == ("lowest, adjusted by smooth, bias", 1.0)
    assert made.error == pytest.approx(0.01 * 0.2**2, rel=1e-5)
    assert adjustments.gained(made.plan) == found
    assert [g.error_with for g in found] == pytest.approx([0.025, 0.02], rel=1e-4)
    assert adjustments.gained(PLAN) == ()


def test_a_plan_that_does_not_run_has_no_error_that_gains() -> None:
    subject: Any = ToySubject({}, runs=False)
    assert measuring(subject).plan_error(PLAN) == float("inf")


def test_an_error_is_measured_once() -> None:
    subject: Any = ToySubject(dict(zip(KINDS, (0.25, 0.8), strict=True)))
    adjustments = Adjustments(measuring=measuring(subject), examined=Adjusted(), kinds=KINDS)
    (made,) = adjustments.proposals(
        [Proposal(name="lowest", plan=PLAN, time_s=1.0, error=0.01)], adjustments.measure(PLAN)
    )
    adjustments.gained(made.plan)
    assert len(subject.loaded) == len({plan.digest for plan in subject.loaded})
