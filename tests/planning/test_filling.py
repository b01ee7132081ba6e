"""Choices between two steps of the frontier keep to the given error."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Roundings, predicted_error
from finecast.planning.proposing import frontier_of, near, near_alone, within
from finecast.planning.sensitivity import Saturation
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from tests.graph.text import from_text

FP32, BF16, FP16 = Format.FP32, Format.BF16, Format.FP16
COUNT = 6


def chain() -> Graph:
    nodes = (
        f"node n{i} matmul onnx::MatMul fp32 (%{i}) -> (%{i + 1} v{i} fp32)\n"
        for i in range(COUNT)
    )
    return from_text("input %0 x fp32\n" + "".join(nodes) + f"output %{COUNT}\n")


def problem(
    gains: list[float], errors: list[float], cast_s: float
) -> tuple[Planner, Analysis]:
    graph = chain()
    allowed = {
        i: Permission(formats=frozenset({FP32, BF16}), reasons=()) for i in range(COUNT)
    }
    analysis = Analysis(
        units=make_units(graph, allowed, (BF16,)),
        times={FP32: np.full(COUNT, 9.0), BF16: 9.0 - np.array(gains)},
        cast_time=lambda _value, source, to: 0.0 if source is to else cast_s,
        rounded={
            BF16: Roundings(
                units=np.array(errors),
                shared=np.zeros(len(np.array(errors))),
                lists=[],
                errors=np.zeros(0),
            )
        },
    )
    policy = Policy.parse("auto:bf16")
    return Planner(graph=graph, policy=policy, permissions=allowed), analysis


@pytest.mark.parametrize("low", range(1, COUNT))
def test_of_units_alike_as_many_are_low_as_the_error_allows(low: int) -> None:
    """Units of equal price change in one step of the frontier."""
    planner, analysis = problem([4.0] * COUNT, [1.0] * COUNT, 0.0)
    steps = frontier_of(planner, analysis)
    assert [s.error for s in steps] == [0.0, COUNT]
    found = within(planner, analysis, steps, low + 0.5)
    assert found is not None
    assert found.error == low
    assert found.time_s == pytest.approx(9.0 * COUNT - 4.0 * low)


@pytest.mark.parametrize("together", [3.0, 12.0])
def test_the_error_to_keep_is_that_of_all_together(together: float) -> None:
    """The single errors have the sum 6; all together cause half of that, or twice."""
    planner, analysis = problem([4.0] * COUNT, [1.0] * COUNT, 0.0)
    adds_up = Saturation.through(COUNT, together)
    rounded = {BF16: replace(analysis.rounded[BF16], saturation=adds_up)}
    analysis = replace(analysis, rounded=rounded)
    steps = frontier_of(planner, analysis)
    for low in range(1, COUNT):
        found = within(planner, analysis, steps, adds_up.together(low + 0.5))
        assert found is not None
        assert found.formats.count(BF16) == low
        assert found.error == pytest.approx(adds_up.together(low))


positive = st.floats(0.1, 5.0)
six = st.lists(positive, min_size=COUNT, max_size=COUNT)


@given(six, six, st.floats(0.0, 2.0), st.floats(0.0, 1.0))
@example(  # an error that is too small to divide by
    gains=[1.0] * COUNT, errors=[1.0] * COUNT, cast_s=0.0, share=2.225073858507e-311
)
@example(  # the last digit of a sum that was taken apart
    gains=[1.0] * COUNT,
    errors=[1.0, 1.0, 1.111451348571757, 1.1, 2.9693996334414496, 1.05],
    cast_s=0.0,
    share=0.9999999999999999,
)
def test_it_is_faster_than_the_step_that_keeps_the_error(
    gains: list[float], errors: list[float], cast_s: float, share: float
) -> None:
    planner, analysis = problem(gains, errors, cast_s)
    steps = frontier_of(planner, analysis)
    error = share * steps[-1].error
    found = within(planner, analysis, steps, error)
    if found is not None:
        kept = max((s for s in steps if s.error <= error), key=lambda s: s.error)
        assert found.error <= error
        assert found.time_s < kept.time_s


def test_beyond_the_frontier_there_is_nothing() -> None:
    planner, analysis = problem([4.0] * COUNT, [1.0] * COUNT, 0.0)
    steps = frontier_of(planner, analysis)
    assert within(planner, analysis, steps, 100.0) is None
    assert within(planner, analysis, steps, -1.0) is None
    assert within(planner, analysis, steps, steps[-1].error) is None  # it is a step


def test_after_a_miss_plans_have_shares_of_the_error_that_is_allowed() -> None:
    """The shares 1, .9, .8 and .7 of the error are 1, .81, .64 and .49 of its square."""
    planner, analysis = problem([4.0] * COUNT, [1.0] * COUNT, 0.0)
    found = near(planner, analysis, 5.5)
    assert [p.error for p in found] == [5.0, 4.0, 3.0, 2.0]
    assert [list(p.plan.formats.values()).count(BF16) for p in found] == [5, 4, 3, 2]


def test_plans_of_one_low_format_each_keep_the_error_that_is_allowed() -> None:
    """Half of the units are faster in either format, so that the frontier mixes them."""
    planner, analysis = problem([4.0, 1.0] * 3, [1.0] * COUNT, 0.1)
    assert near_alone(planner, analysis, 4.5, (1.0,)) == []  # there is no other low format
    analysis = replace(
        analysis,
        times={**analysis.times, FP16: 9.0 - np.array([1.0, 4.0] * 3)},
        rounded=dict.fromkeys((BF16, FP16), analysis.rounded[BF16]),
    )
    allowed = {
        i: Permission(formats=frozenset({*analysis.times}), reasons=()) for i in range(COUNT)
    }
    planner = replace(planner, policy=Policy.parse("auto:bf16,fp16"), permissions=allowed)
    mixed = near(planner, analysis, 4.5, (1.0,))
    assert {BF16, FP16} <= {fmt for p in mixed for fmt in p.plan.formats.values()}
    alone = near_alone(planner, analysis, 4.5, (1.0,))
    assert [{*p.plan.formats.values()} - {FP32} for p in alone] == [{BF16}, {FP16}]
    assert [p.name.rpartition(", ")[2] for p in alone] == ["bf16 alone", "fp16 alone"]
    assert all(p.error <= 4.5 for p in alone)


@pytest.mark.long
@given(st.data(), *([st.floats(0.1, 10.0)] * 2))
def test_an_error_of_several_formats_is_kept_as_they_add_up(
    data: st.DataObject, first: float, second: float
) -> None:
    """Each format adds up in its own way: errors on the frontier grow, and limits are kept."""
    planner, analysis = problem(data.draw(six), data.draw(six), 0.5)
    mine = analysis.rounded[BF16]
    other = replace(mine, units=np.array(data.draw(six)))
    analysis = replace(
        analysis,
        times={**analysis.times, FP16: 9.0 - np.array(data.draw(six))},
        rounded={
            of: replace(one, saturation=Saturation.through(one.total, times * one.total))
            for of, one, times in ((BF16, mine, first), (FP16, other, second))
        },
    )
    allowed = {
        i: Permission(formats=frozenset({FP32, BF16, FP16}), reasons=()) for i in range(COUNT)
    }
    planner = replace(planner, policy=Policy.parse("auto:bf16,fp16"), permissions=allowed)
    steps = frontier_of(planner, analysis)
    for before, after in pairwise(steps):
        assert before.time_s > after.time_s
        assert before.error < after.error
    for choice in steps:
        formats = choice.by_node(analysis.units)
        assert choice.error == pytest.approx(predicted_error(analysis, formats))
    error = data.draw(st.floats(0.1, 1.0)) * steps[-1].error
    found = within(planner, analysis, steps, error)
    if found is not None:
        assert found.error <= error


def test_the_error_of_a_plan_does_not_depend_on_formats_that_it_has_not() -> None:
    _, alone = problem([4.0] * COUNT, [1.0] * COUNT, 0.0)
    rounded = alone.rounded[BF16]
    mine = replace(rounded, saturation=Saturation.through(COUNT, 0.1))
    worse = replace(rounded, saturation=Saturation.through(COUNT, 9.0))
    alone = replace(alone, rounded={BF16: mine})
    beside = replace(alone, rounded={FP16: worse, BF16: mine})
    for low in range(COUNT + 1):
        formats = dict.fromkeys(range(low), BF16)
        assert predicted_error(beside, formats) == predicted_error(alone, formats)
