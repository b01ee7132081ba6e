"""A plan says of each op what decided its format: times, casts, errors or something else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.planning.alternatives import explained
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Priced, Roundings
from finecast.planning.proposing import lowest, predicted_cost, propose
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from tests.graph.text import from_text

FP32, BF16, INT8 = Format.FP32, Format.BF16, Format.INT8
US = 1e-6
CAST_S = 6 * US


def chain(
    gains: list[dict[Format, float]], errors: dict[Format, list[float]]
) -> tuple[Planner, Analysis]:
    """Ops one behind the other that take 100 us in fp32 and ``gains`` us less in low formats.

    Each cast takes 6 us, and each op's constants add their squared error.
    """
    count, lows = len(gains), (*errors,)
    nodes = (
        f"node n{i} matmul onnx::MatMul fp32 (%{i}) -> (%{i + 1} v{i} fp32)\n"
        for i in range(count)
    )
    graph = from_text("input %0 x fp32\n" + "".join(nodes) + f"output %{count}\n")
    formats = frozenset({FP32, *lows})
    allowed = {i: Permission(formats=formats, reasons=()) for i in range(count)}
    label = ",".join(f.label for f in lows)
    planner = Planner(graph=graph, policy=Policy.parse(f"auto:{label}"), permissions=allowed)
    times = {f: US * np.array([100 - g.get(f, 0.0) for g in gains]) for f in (FP32, *lows)}
    analysis = Analysis(
        units=make_units(graph, allowed, lows),
        times=times,
        cast_time=lambda _value, source, to: 0.0 if source is to else CAST_S,
        rounded={
            f: Roundings(
                units=np.array(e),
                shared=np.zeros(len(np.array(e))),
                lists=[],
                errors=np.zeros(0),
            )
            for f, e in errors.items()
        },
    )
    return planner, analysis


def said(plan: Plan, node: str = "n0") -> tuple[str, str]:
    """The text of the decision, and what decided."""
    decision = plan.decision(node)
    assert decision is not None
    assert [r.permits for r in decision.reasons] == [(decision.format.label,)]
    return decision.reasons[0].text, str(decision.reasons[0].evidence["decided by"])


def fastest(gains: list[float], errors: list[float]) -> Plan:
    planner, analysis = chain([{BF16: g} for g in gains], {BF16: errors})
    return propose(planner, analysis)[-1].plan


@pytest.mark.parametrize(
    ("gain", "text", "decider"),
    [
        (6.0, "kept fp32: bf16 would save 6 us, but its casts would cost 12 us", "casts"),
        (-3.0, "kept fp32: bf16 would take 3 us more, and its casts would cost 12 us", "time"),
        (0.0, "kept fp32: bf16 would save no time, and its casts would cost 12 us", "time"),
        (20.0, "bf16 saves 20 us, its casts cost 12 us", "time"),
    ],
)
def test_an_op_alone(gain: float, text: str, decider: str) -> None:
    assert said(fastest([gain], [0.0])) == (text, decider)


def test_an_op_among_low_ones_is_low_because_of_their_casts() -> None:
    plan = fastest([90.0, -5.0, 90.0], [0.0, 0.0, 0.0])
    assert set(plan.formats.values()) == {BF16}
    assert said(plan, "n1") == ("bf16 takes 5 us more, but spares casts of 12 us", "casts")


def test_an_op_that_would_gain_is_kept_by_its_error() -> None:
    planner, analysis = chain([{BF16: 50.0}, {BF16: 30.0}], {BF16: [1e-6, 4e-4]})
    middle = propose(planner, analysis)[1].plan
    assert middle.formats == {"n0": BF16, "n1": FP32}
    text, decider = said(middle, "n1")
    assert decider == "error"
    assert text == (
        "kept fp32: bf16 would save 30 us, and raise the predicted error from 0.1% to 2%"
    )


def test_of_several_formats_each_is_named_and_the_best_one_decides() -> None:
    gains = [{BF16: 6.0, INT8: -9.0}]
    planner, analysis = chain(gains, {BF16: [0.0], INT8: [0.0]})
    kept = propose(planner, analysis)[0].plan
    text, decider = said(kept)
    assert decider == "casts"
    assert text == (
        "kept fp32: bf16 would save 6 us, but its casts would cost 12 us;"
        " int8 would take 9 us more, and its casts would cost 6 us"
    )


def test_a_low_op_says_why_it_has_not_the_format_that_gains_more() -> None:
    gains = [{BF16: 40.0, INT8: 60.0}]
    planner, analysis = chain(gains, {BF16: [1e-6], INT8: [1e-2]})
    plans = [p.plan for p in propose(planner, analysis)]
    plan = next(p for p in plans if p.formats == {"n0": BF16})
    text, decider = said(plan)
    assert decider == "time"
    assert text == (
        "bf16 saves 40 us, its casts cost 12 us; int8 instead of bf16 would save 26 us net,"
        " and raise the predicted error from 0.1% to 10%"
    )


def test_the_figures_are_evidence() -> None:
    decision = fastest([6.0], [1e-6]).decision("n0")
    assert decision is not None
    evidence = decision.reasons[0].evidence
    assert evidence == {
        "decided by": "casts",
        "ops in one kernel": 1.0,
        "fp32 us": pytest.approx(100.0),
        "bf16 us": pytest.approx(94.0),
        "casts if bf16 us": pytest.approx(12.0),
        "error if fp32": 0.0,
        "error if bf16": pytest.approx(1e-3),
    }
    plan = fastest([6.0], [1e-6])
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("low", "text"),
    [(2e6, "bf16 saves 2 MB stored"), (6e6, "kept fp32: bf16 adds 2 MB stored")],
)
def test_bytes_are_no_time(low: float, text: str) -> None:
    planner, analysis = chain([{}], {BF16: [0.0]})
    times = {FP32: np.array([4e6]), BF16: np.array([low])}
    sized = replace(analysis, times=times, priced=Priced.SIZE, cast_time=lambda *_: 0.0)
    assert said(propose(planner, sized)[-1].plan) == (text, "bytes")


def test_a_plan_that_no_cost_chose_says_so_first() -> None:
    planner, analysis = chain([{BF16: -3.0}], {BF16: [0.0]})
    plan = lowest(planner, analysis)[0].plan
    text = "every op that may have bf16 does: bf16 takes 3 us more, its casts cost 12 us"
    assert said(plan) == (text, "whole plan")
    hinted = planner.plan({0: FP32}, "the hint lowers it", kept="the hint keeps it in fp32")
    text = (
        "the hint keeps it in fp32: bf16 would take 3 us more, and its casts would cost 12 us"
    )
    assert said(explained(planner, analysis, hinted)) == (text, "whole plan")


def test_lowest_plans_are_named_by_the_formats_that_their_ops_have() -> None:
    planner, analysis = chain([{}, {}], {BF16: [0.0, 0.0], INT8: [0.0, 0.0]})
    both, bf16, int8 = lowest(planner, analysis)
    assert both.plan.low_formats == {BF16}  # each may have the first
    assert (both.name, bf16.name) == ("bf16 where supported",) * 2
    assert int8.name == "int8 where supported"
    only = Permission(formats=frozenset({FP32, INT8}), reasons=())
    mixed = replace(planner, permissions={**planner.permissions, 1: only})
    assert lowest(mixed, analysis)[0].name == "bf16, int8 where supported"


def test_lowest_plans_are_as_fast_as_their_own_kernels() -> None:
    planner, analysis = chain(
        [{BF16: 3.0, INT8: 5.0}] * 2, {BF16: [0.0, 0.0], INT8: [0.0] * 2}
    )
    by_name = {p.name: p for p in lowest(planner, analysis)}
    bf16, int8 = (by_name[f"{fmt.label} where supported"] for fmt in (BF16, INT8))
    assert bf16.time_s == predicted_cost(planner, analysis, bf16.plan)
    assert bf16.time_s > int8.time_s


def test_a_format_that_was_not_timed_is_no_alternative() -> None:
    planner, analysis = chain([{BF16: 3.0}], {BF16: [0.0]})
    analysis = replace(analysis, times={**analysis.times, BF16: np.array([np.inf])})
    text, _ = said(propose(planner, analysis)[0].plan)
    assert text == "kept fp32: no time in another format is known"


def test_the_figures_of_an_earlier_analysis_are_replaced() -> None:
    """As when the errors of single ops are measured after the plan was made."""
    planner, before = chain([{BF16: 6.0}, {BF16: 20.0}], {BF16: [0.0, 0.0]})
    _, after = chain([{BF16: 5.0}, {BF16: 19.0}], {BF16: [0.0, 0.0]})
    for plan in (planner.plan({0: FP32, 1: BF16}, ""), lowest(planner, before)[0].plan):
        twice = explained(planner, after, explained(planner, before, plan))
        assert twice.decisions == explained(planner, after, plan).decisions
        assert "20 us" not in said(twice, "n1")[0]
