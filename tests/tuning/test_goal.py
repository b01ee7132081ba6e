"""What presets stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import finecast
from finecast.errors import UsageError
from finecast.tuning.goal import Execution, Goal, Preset


@pytest.mark.parametrize(
    ("preset", "trials", "ends", "goes_on"),
    [
        ("fast", None, True, False),
        ("balanced", None, False, False),
        ("Exact", 20, False, True),
    ],
)
def test_a_preset_stands_for_a_budget(
    preset: str, trials: int | None, ends: bool, goes_on: bool
) -> None:
    goal: Any = Goal(preset=preset)  # pyright: ignore[reportArgumentType] - as users write it
    assert (goal.max_trials, goal.first_is_enough, goal.goes_on) == (trials, ends, goes_on)


def test_what_is_given_goes_before_the_preset() -> None:
    assert Goal(preset=Preset.EXACT, max_trials=7).max_trials == 7
    assert replace(Goal(preset=Preset.EXACT), timeout_s=9.0).max_trials == 20


def test_an_unknown_preset_is_told_all() -> None:
    with pytest.raises(UsageError, match="unknown preset 'slow'"):
        finecast.tune("m.onnx", preset="slow")


@pytest.mark.parametrize(("given", "jobs"), [("local", 1), ("local:4", 4), ("local:0", 0)])
def test_the_executor_may_state_how_many_processes(given: str, jobs: int) -> None:
    execution = Execution(executor=given)
    assert (execution.executor, execution.jobs) == ("local", jobs)


def test_what_is_no_number_of_processes() -> None:
    with pytest.raises(UsageError, match="'local:many' is nothing that evaluates"):
        Execution(executor="local:many")
