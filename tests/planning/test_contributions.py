"""Which ops cost accuracy: shares of single ops, and what is left without an op."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from finecast.numbers.formats import Format
from finecast.planning.contributions import ERROR_IF, Contributions, confirmed
from finecast.planning.plan import Plan
from finecast.reports.base import expected_text
from tests.planning.test_alternatives import fastest


def plan_of(left: float) -> Plan:
    """A plan of two ops in bf16 whose squared error is ``left`` with one of them in fp32."""
    plan = fastest([20.0, 20.0], [0.5, 0.5])
    figures = {ERROR_IF.format("bf16"): 1.0, ERROR_IF.format("fp32"): math.sqrt(left)}
    reasons = {
        one.node: replace(one.reasons[0], evidence={**one.reasons[0].evidence, **figures})
        for one in plan.decisions
    }
    assert {one.format for one in plan.decisions} == {Format.BF16}
    return plan.explained(reasons)


REST = "; the other 96% goes only if neighbouring ops return to fp32 together"


@pytest.mark.parametrize(
    ("left", "told"),
    [
        (0.5, "n0 (bf16) 50%, n1 (bf16) 50%, as predicted"),
        (0.98, f"n0 (bf16) 2%, n1 (bf16) 2%, as predicted{REST}"),
    ],
)
def test_error_of_no_op_alone_is_reported(left: float, told: str) -> None:
    """In PyTorch a value stays rounded until the ops on both sides of it are in fp32."""
    first, *_ = Contributions.of(plan_of(left)).lines
    assert first == f"shares of the squared output error: {told}"


def test_named_shares_and_the_rest_are_at_most_the_whole() -> None:
    """Printed with errors that cancel: "21%; 6%, 4%; the other 100% goes only if ..."."""
    plan = confirmed(plan_of(0.75), Contributions.of(plan_of(0.75)).low[0], 1.0, math.sqrt(2))
    first, *_ = Contributions.of(plan).lines
    assert first.endswith(
        "n1 (bf16) 25%, as predicted; the other 75% goes only if neighbouring ops return to"
        " fp32 together"
    )


def test_an_op_of_a_small_measured_share_is_not_named_first() -> None:
    """It stood first by its predicted share: 8% before 28%, with advice to keep it in fp32."""
    plan = plan_of(0.5)
    first, second = Contributions.of(plan).low
    measured = confirmed(plan, first, 1.0, math.sqrt(0.9))
    assert [one.main for one in Contributions.of(measured).low] == [second.main, first.main]
    told, *_ = Contributions.of(measured).lines
    assert told == (
        f"shares of the squared output error: {first.main} (bf16) 10%, measured by putting it"
        f" back into fp32; {second.main} (bf16) 50%, as predicted"
    )
    both = confirmed(measured, second, 1.0, math.sqrt(0.6))
    told, *_ = Contributions.of(both).lines
    assert told.endswith(
        "n1 (bf16) 40%, n0 (bf16) 10%, measured by putting each back into fp32"
    )


def test_a_loss_that_is_hardly_one_is_no_figure() -> None:
    assert expected_text(0.93, 0.0, 0.00002) == "a loss of less than 0.0001"
    told = expected_text(0.93, 0.004, 0.001)
    assert told == "a loss of 0.004 on average (standard error 0.001)"
    told = expected_text(0.93, 1e-4, 3e-5)
    assert told == "a loss of 0.0001 on average (standard error 0.00003)"


def test_what_is_expected_is_told_in_the_unit_of_the_metric() -> None:
    """A squared error of 0.000002 is 20% more than one of 0.0000016, and no small loss."""
    told = expected_text(2e-6, 4e-7, 1e-7)
    assert told == "a loss of 0.0000004 on average (standard error 0.0000001)"
    told = expected_text(0.95, -0.01, 0.002)
    assert told == "a gain of 0.01 on average (standard error 0.002)"
    assert expected_text(0.0, 0.0, 0.0) == "a loss of 0 on average (standard error 0)"
    for none in (None, math.inf):
        assert expected_text(31.24, none, 0.43) == "31.24 on average (standard error 0.4)"
