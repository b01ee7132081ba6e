"""Plans that differ from another plan in one unit."""

from __future__ import annotations

import numpy as np

from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Roundings
from finecast.planning.proposing import lowered_by_one, raised_by_one
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from tests.graph.text import from_text

FP32, BF16 = Format.FP32, Format.BF16
LOSS_S = (4.0, 3.0, 2.0, 1.0)  # additional seconds of each op in fp32
ERROR = (1.0, 9.0, 1.0, 9.0)  # squared error of each op in bf16


def chain(*kernels: tuple[int, ...]) -> tuple[Planner, Analysis]:
    lines = ["input %0 x fp32"]
    lines += [
        f"node n{i} matmul onnx::MatMul fp32 (%{i}) -> (%{i + 1} v{i} fp32)" for i in range(4)
    ]
    graph = from_text("\n".join([*lines, "output %4\n"]))
    allowed = {i: Permission(formats=frozenset({FP32, BF16}), reasons=()) for i in range(4)}
    planner = Planner(graph=graph, policy=Policy.parse("auto:bf16"), permissions=allowed)
    units = make_units(graph, allowed, (BF16,), kernels)
    firsts = [members[0] for members in units.members]
    analysis = Analysis(
        units=units,
        times={
            FP32: np.array([5.0 + LOSS_S[i] for i in firsts]),
            BF16: np.full(len(firsts), 5.0),
        },
        cast_time=lambda _value, source, to: 0.0 if source is to else 0.25,
        rounded={
            BF16: Roundings(
                units=np.array([ERROR[i] for i in firsts]),
                shared=np.zeros(len(np.array([ERROR[i] for i in firsts]))),
                lists=[],
                errors=np.zeros(0),
            )
        },
    )
    return planner, analysis


def low(planner: Planner, *names: str) -> dict[int, Format]:
    return {n.id: BF16 if n.name in names else FP32 for n in planner.graph.nodes}


def test_one_unit_more_gives_the_most_time_for_its_error_first() -> None:
    planner, analysis = chain()
    found = lowered_by_one(planner, analysis, planner.plan(low(planner, "n0"), "by hand"))
    more = [[n for n, f in p.plan.formats.items() if f is BF16] for p in found]
    # n1 costs no cast beside n0: 3 s and no second pair of casts, for an error of 9.
    assert more == [["n0", "n2"], ["n0", "n1"], ["n0", "n3"]]
    assert all(p.time_s < 4 * 5 + 6 + 0.5 for p in found)
    assert found[0].error == 2.0
    assert found[0].name == "with one more group in reduced precision, error 1.41"


def test_one_unit_less_loses_the_least_time_for_its_error_first() -> None:
    planner, analysis = chain()
    found = raised_by_one(planner, analysis, planner.lowest(), most=2)
    kept = [[n for n, f in p.plan.formats.items() if f is FP32] for p in found]
    assert kept == [["n3"], ["n1"]]
    assert all(p.error == 11.0 for p in found)


def test_the_model_in_fp32_is_no_proposal() -> None:
    planner, analysis = chain()
    alone = planner.plan(low(planner, "n1"), "by hand")
    assert raised_by_one(planner, analysis, alone) == []
    assert len(lowered_by_one(planner, analysis, planner.highest())) == 4


def test_a_unit_that_is_low_in_part_is_not_lowered_again() -> None:
    """An engine's hint may keep some of the ops of a kernel."""
    planner, analysis = chain((0, 1))
    found = lowered_by_one(planner, analysis, planner.plan(low(planner, "n1"), "by hand"))
    more = [[n for n, f in p.plan.formats.items() if f is BF16] for p in found]
    assert sorted(more) == [["n0", "n1", "n2"], ["n0", "n1", "n3"]]
