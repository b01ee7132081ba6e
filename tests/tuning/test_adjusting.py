"""Corrected biases: kept where they gain, and told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from finecast.engines.base import Array, Feeds
from finecast.engines.exact import Exact
from finecast.errors import EngineError
from finecast.native.gains import Gain, bias_gain
from finecast.native.subject import Examined
from finecast.planning.adjustments import Adjustment
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.rules.policy import Adjust
from finecast.tuning.goal import Objective
from finecast.tuning.measuring import Measuring
from finecast.tuning.search import Corrections

PLAN = Plan(model="m", policy="auto:int8", opset=17, decisions=())


class Adjusted(Examined):
    """Corrects one bias."""

    @property
    def adjusts(self) -> Sequence[Adjust]:
        return (Adjust.BIAS,)

    def analysis(self, *, of_time: bool = True, lost: Any = None) -> Any:
        raise NotImplementedError

    def without(self, unfit: Any) -> Any:
        raise NotImplementedError

    def corrected(self, plan: Plan) -> Plan:
        bias = Adjustment(node="one", port=2, add=(1.0,))
        return replace(plan, adjustments=(*plan.adjustments, bias))


def error(share: float, plan: Plan) -> float:
    return 0.1 * share ** len(plan.adjustments)


@pytest.mark.parametrize(("share", "gains"), [(0.5, True), (0.99, False), (1.5, False)])
def test_a_correction_gains_where_less_is_left_than_noise(share: float, gains: bool) -> None:
    gain = bias_gain(PLAN, Adjusted().corrected, partial(error, share))
    assert gain is not None
    assert (gain.kind, gain.operands, gain.gains) == (Adjust.BIAS, 1, gains)
    assert (gain.error_without, gain.error_with) == pytest.approx((0.1, 0.1 * share))


def test_where_no_bias_can_be_corrected_nothing_is_measured() -> None:
    assert bias_gain(PLAN, lambda plan: plan, lambda plan: pytest.fail("measured")) is None


def test_a_gain_is_told() -> None:
    one = Gain(kind=Adjust.BIAS, operands=2, error_without=0.02, error_with=0.01)
    assert one.text == "bias: 2 operands, relative output error 2% -> 1%"
    assert one.share == pytest.approx(0.25)
    assert not replace(one, error_with=0.0199).gains
    broken = replace(one, error_without=float("inf"), error_with=float("inf"))
    assert not broken.gains
    nothing = replace(one, error_without=0.0, error_with=0.0)
    assert not nothing.gains
    assert nothing.share == 1.0


@dataclass
class ToySubject:
    """Runs plans whose correction leaves such a share of the error; none but ``runs``."""

    share: float
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

    def exact(self, workload: Any, calls: Sequence[Feeds]) -> Exact:
        return Exact.of(self.reference, calls, workload.of, workload.slices)

    def build(self, plan: Plan) -> Any:
        self.loaded.append(plan)
        return Built(plan)

    def tried(self, built: Any) -> Any:
        if not self.runs:
            raise EngineError("no kernel")
        return Session(error(self.share, built.plan))


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


def corrections(share: float, *, wanted: bool = True) -> Corrections:
    subject: Any = ToySubject(share)
    return Corrections(measuring=measuring(subject), examined=Adjusted(), wanted=wanted)


def test_the_gain_of_a_plan_that_was_corrected_is_told() -> None:
    made_by = corrections(0.25)
    gain = made_by.gain(PLAN)
    assert gain is not None
    proposal = Proposal(name="lowest", plan=PLAN, time_s=1.0, error=0.01)
    (made,) = made_by.proposals([proposal], gain)
    assert (made.name, made.time_s) == ("lowest, biases corrected", 1.0)
    assert made.error == pytest.approx(0.01 * 0.25**2, rel=1e-5)
    assert made_by.gained(made.plan) == (gain,)
    assert made_by.gained(PLAN) == ()
    assert corrections(0.25, wanted=False).gain(PLAN) is None


def test_a_plan_that_does_not_run_has_no_error_that_gains() -> None:
    subject: Any = ToySubject(1.0, runs=False)
    assert measuring(subject).plan_error(PLAN) == float("inf")


def test_an_error_is_measured_once() -> None:
    subject: Any = ToySubject(0.25)
    made_by = Corrections(measuring=measuring(subject), examined=Adjusted())
    gain = made_by.gain(PLAN)
    assert gain is not None
    proposal = Proposal(name="lowest", plan=PLAN, time_s=1.0, error=0.01)
    (made,) = made_by.proposals([proposal], gain)
    made_by.gained(made.plan)
    assert len(subject.loaded) == len({plan.digest for plan in subject.loaded})
