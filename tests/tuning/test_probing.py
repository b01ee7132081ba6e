"""The search for the fastest plan within an error by runs on calibration data."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.judge import by_finecast, case
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Roundings
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from finecast.tuning.probing import Probing
from tests.graph.text import from_text

FP32, BF16 = Format.FP32, Format.BF16
OPS = 8


def chain(saved_s: list[float], errors: list[float]) -> tuple[Planner, Analysis]:
    """Ops in a row that save so many seconds in bf16, for so much squared error each."""
    lines = ["input %0 x fp32"]
    lines += [
        f"node n{i} matmul onnx::MatMul fp32 (%{i}) -> (%{i + 1} v{i} fp32)"
        for i in range(len(saved_s))
    ]
    graph = from_text("\n".join([*lines, f"output %{len(saved_s)}\n"]))
    allowed = {
        i: Permission(formats=frozenset({FP32, BF16}), reasons=()) for i in range(len(saved_s))
    }
    planner = Planner(graph=graph, policy=Policy.parse("auto:bf16"), permissions=allowed)
    low = Roundings(
        units=np.array(errors), shared=np.zeros(len(errors)), lists=[], errors=np.zeros(0)
    )
    analysis = Analysis(
        units=make_units(graph, allowed, (BF16,), ()),
        times={FP32: 1.0 + np.array(saved_s), BF16: np.ones(len(saved_s))},
        cast_time=lambda _value, source, to: 0.0,
        rounded={BF16: low},
    )
    return planner, analysis


def low(plan: Plan) -> set[str]:
    return {name for name, fmt in plan.formats.items() if fmt is BF16}


positive = st.floats(0.01, 10.0)


@settings(max_examples=30, deadline=None)
@given(
    saved_s=st.lists(positive, min_size=OPS, max_size=OPS),
    errors=st.lists(positive, min_size=OPS, max_size=OPS),
    off=st.lists(st.floats(0.1, 3.0), min_size=OPS, max_size=OPS),
    allowed=st.floats(0.1, 40.0),
)
def test_a_plan_found_was_measured_to_keep_the_error_and_is_faster(
    saved_s: list[float], errors: list[float], off: list[float], allowed: float
) -> None:
    planner, analysis = chain(saved_s, errors)
    measured: dict[str, float] = {}

    def error(plan: Plan) -> float:
        assert plan.digest not in measured, "no plan is probed twice"
        lost = (errors[int(n[1:])] * off[int(n[1:])] for n in low(plan))
        return measured.setdefault(plan.digest, sum(lost))

    limit = OPS + 0.7 * sum(saved_s)
    probing = Probing(planner=planner, analysis=analysis, error=error)
    known = [(planner.lowest(), math.fsum(e * o for e, o in zip(errors, off, strict=True)))]
    found = probing.fastest(allowed, known, limit)
    assert len(measured) <= 24
    fast = {p for p, e in measured.items() if e <= allowed}
    assert (found is not None) == bool(fast)
    if found is not None:
        assert measured[found.plan.digest] <= allowed
        assert found.time_s < limit


def test_plans_whose_errors_cancel_are_found_though_they_are_predicted_to_miss() -> None:
    planner, analysis = chain([4.0, 4.0, 1.0, 1.0], [2.0, 2.0, 0.5, 0.5])

    def error(plan: Plan) -> float:
        at = low(plan)
        cancelling = {"n0", "n1"}
        own = 1.0 if cancelling <= at else 2.0 * len(cancelling & at)
        return own + 0.5 * len(at - cancelling)

    probing = Probing(planner=planner, analysis=analysis, error=error)
    lowest = planner.lowest()
    # By prediction one of the first two alone loses more than is allowed, and both far more.
    found = probing.fastest(1.6, [(lowest, error(lowest))], math.inf)
    assert found is not None
    assert {"n0", "n1"} < low(found.plan)
    assert len(low(found.plan)) == 3


def test_of_all_plans_of_a_small_net_one_within_two_percent_of_the_best_is_chosen() -> None:
    for seed in (14, 23, 27):  # ten ops each
        one = case(seed)
        gap = one.gap(by_finecast(one))
        assert gap is not None
        assert gap <= 0.02
