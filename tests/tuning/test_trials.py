"""What trials say of the plans that are left: where to look, and what may be better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.data.criterion import Criterion, CriterionKind
from finecast.data.metrics import Score
from finecast.measure.study import Study
from finecast.native.orders import InOrder, OrderSpread
from finecast.numbers.summation import orders
from finecast.planning.plan import Plan
from finecast.progress import silent
from finecast.tuning.executor import LostTrialError
from finecast.tuning.goal import Budget, Goal
from finecast.tuning.search import Candidate
from finecast.tuning.trials import Trials


class Workload:
    digest = "data"


def candidate(name: str, cost: float, error: float, spread: float = 0.0) -> Candidate:
    plan = Plan(model=name, policy="auto:bf16", opset=22, decisions=())
    return Candidate(
        name=name,
        plan=plan,
        error=error,
        cost=cost,
        latency_s=cost,
        casts=0,
        spread=spread,
    )


def trials(
    metrics: Mapping[str, float],
    candidates: list[Candidate],
    *,
    tolerance: float = 0.1,
    higher_is_better: bool = True,
    max_trials: int | None = None,
    timeout_s: float | None = None,
) -> Trials:
    """Of a model whose metric is 1: all ``candidates`` that have a metric are evaluated."""
    criterion = Criterion(
        kind=CriterionKind.ABSOLUTE, tolerance=tolerance, higher_is_better=higher_is_better
    )
    workload: Any = Workload()
    made = Trials(
        model="m",
        workload=workload,
        baseline=1.0,
        runner="toy",
        study=None,
        progress=silent,
        budget=Budget(
            goal=Goal(criterion=criterion, max_trials=max_trials, timeout_s=timeout_s)
        ),
    )
    for one in candidates:
        if one.name in metrics and made.may_go_on():
            made.passes(one, lambda plan: metrics[plan.model])
    return made


def test_what_is_as_fast_as_the_plan_found_missed_nothing() -> None:
    """Of plans that miss, those are told that would be faster by more than matters."""
    found, *others = all_ = [
        candidate("found", 1.0, 1.0),
        candidate("faster", 0.9, 4.0),
        candidate("as fast", 0.99, 3.0),
        candidate("slower", 1.02, 2.0),
        candidate("not tried", 0.8, 5.0),
    ]
    made = trials({"found": 1.0, "faster": 0.5, "as fast": 0.5, "slower": 0.5}, all_)
    assert [c.name for c in made.missed(others, found)] == ["faster"]
    assert [c.name for c in made.missed(others, None)] == ["faster", "as fast", "slower"]


@pytest.mark.parametrize(
    ("metrics", "allowed"),
    [
        ({"1": 0.9}, None),  # none failed
        ({"4": 0.8}, 2.0),  # halfway from the baseline
        ({"1": 0.95, "3": 0.85}, 2.0),
        ({"1": 0.95, "3": 0.85, "5": 0.91}, 2.0),  # one beyond passed by chance
        ({"3": 0.99, "2": 0.8}, 1.0),
        ({"1": math.nan}, None),
    ],
)
def test_the_error_that_is_allowed_lies_where_the_metric_meets_the_target(
    metrics: dict[str, float], allowed: float | None
) -> None:
    """By errors, not by their squares."""
    candidates = [candidate(name, 1.0, float(name) ** 2) for name in metrics]
    found = trials(metrics, candidates).allowed_error()
    assert found == (None if allowed is None else pytest.approx(allowed**2))


def test_the_error_that_is_allowed_is_that_of_enough_orders_of_summation() -> None:
    """In this machine's order a plan loses .08 of .1; in two of ten .2."""
    runs = [
        InOrder(order=order, metric=0.92 if number < 8 else 0.8, error=0.0, keeps=number < 8)
        for number, order in enumerate(orders(10, blocked=False))
    ]
    plan = candidate("2", 1.0, 4.0)
    made = trials({}, [])
    made.spread_of = lambda *_: OrderSpread(runs=tuple(runs))
    assert not made.passes(plan, lambda _: 0.92)
    assert made.deciding(plan.plan.digest) == 0.8
    assert made.metric(plan.plan) == 0.92
    assert made.allowed_error() == pytest.approx(1.0)  # half of the error loses half as much


@pytest.mark.parametrize("higher", [True, False])
def test_the_nearest_to_the_target_is_the_best_of_those_tried(*, higher: bool) -> None:
    sign = 1 if higher else -1
    metrics = {"far": 1 - 0.9 * sign, "near": 1 - 0.2 * sign, "none": math.nan}
    candidates = [candidate(name, 1.0, 1.0) for name in (*metrics, "not tried")]
    made = trials(metrics, candidates, higher_is_better=higher)
    nearest = made.nearest(candidates)
    assert nearest is not None
    assert nearest.name == "near"


def test_a_budget_counts_trials_and_not_the_baseline() -> None:
    candidates = [candidate(name, 1.0, 1.0) for name in "abc"]
    made = trials(dict.fromkeys("abc", 0.5), candidates, max_trials=2)
    assert len(made.tried) == 2
    assert not made.may_go_on()
    assert made.evaluations == 3


def test_the_first_plan_is_tried_after_the_time_is_over() -> None:
    plan = candidate("plan", 1.0, 1.0)
    made = trials({}, [], timeout_s=1e-9)
    assert made.may_go_on()
    assert made.passes(plan, lambda plan: 1.0)
    assert not made.may_go_on()


def test_an_evaluation_that_ends_its_process_is_one_trial(tmp_path: Path) -> None:
    """It misses, counts, is told in one line, and no study keeps it."""
    made = trials({}, [], max_trials=2)
    made.study = Study(tmp_path / "study.db")
    bad, good = candidate("bad", 1.0, 2.0), candidate("good", 2.0, 1.0)

    def measure(plan: Plan) -> float:
        if plan.model == "bad":
            raise LostTrialError("crashed (SIGSEGV)")
        return 1.0

    assert not made.passes(bad, measure)
    assert made.passes(good, measure)
    assert made.lost == ["bad was left out: its evaluation crashed (SIGSEGV)"]
    assert made.evaluations == 3
    assert made.study.count() == 1


def test_what_passed_by_chance_is_not_taken() -> None:
    """No decision changed here, and moves as large as these change many elsewhere."""
    rng = np.random.default_rng(0)
    exact = np.sort(rng.exponential(size=100)) + 0.01
    made = trials({}, [], tolerance=0.01)
    made.baseline = Score(1.0, margins={"y": exact})
    moves = np.where(np.arange(100) < 40, 0.0, rng.standard_normal(100))
    large = Score(1.0, margins={"y": exact + 0.5 * moves})
    small = Score(1.0, margins={"y": exact + 0.001 * rng.standard_normal(100)})
    expected = made.elsewhere(large)
    assert expected is not None
    assert expected.loss > 0.01
    assert not made.passing(large)
    assert made.passing(small)
    assert made.passing(1.0)  # of a trial of an earlier run margins are not known
    assert not made.passes(candidate("large", 1.0, 1.0), lambda _: large)
    why = made.none_passes(1)
    assert "1 plan keeps it on your data alone" in why
    assert "expect a loss of" in why


def test_time_is_no_reason_against_the_first_trial() -> None:
    """Else all that was measured before is for nothing."""
    goal = Goal(
        criterion=Criterion(kind=CriterionKind.ABSOLUTE, tolerance=0.1), timeout_s=1e-9
    )
    budget = Budget(goal=goal)
    assert not budget.spent(0)
    assert "limit of 1e-09 s" in budget.spent(1)
