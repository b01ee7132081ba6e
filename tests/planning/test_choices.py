"""Choices: their texts, and the solver that makes them."""

from __future__ import annotations

import numpy as np
import pytest

from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Choice, Roundings
from finecast.planning.proposing import frontier_of
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from tests.graph.text import from_text

FP32, BF16, FP16 = Format.FP32, Format.BF16, Format.FP16


@pytest.mark.parametrize(
    ("formats", "lowers"),
    [
        ((), False),
        ((FP32,), False),
        ((FP32, FP32), False),
        ((FP32, BF16), True),
        ((BF16,), True),
    ],
)
def test_a_choice_with_any_op_low_lowers(formats: tuple[Format, ...], lowers: bool) -> None:
    choice = Choice(formats=formats, time_s=1.0, error=0.0)
    assert choice.lowers == lowers


@pytest.mark.parametrize("lows", [(BF16,), (BF16, FP16)])
def test_choices_are_of_the_first_of_equal_formats(lows: tuple[Format, ...]) -> None:
    graph = from_text(
        "input %0 x fp32\nnode mm matmul onnx::MatMul fp32 (%0) -> (%1 y fp32)\noutput %1\n"
    )
    formats = (FP32, *lows)
    allowed = {0: Permission(formats=frozenset(formats), reasons=())}
    units = make_units(graph, allowed, lows)
    policy = Policy(formats=lows)
    found = frontier_of(
        Planner(graph=graph, policy=policy, permissions=allowed),
        Analysis(
            units=units,
            times={f: np.array([3.0 if f is FP32 else 1.0]) for f in formats},
            cast_time=lambda _value, _source, _to: 0.5,
            rounded={
                f: Roundings(
                    units=np.ones(1),
                    shared=np.zeros(len(np.ones(1))),
                    lists=[],
                    errors=np.zeros(0),
                )
                for f in lows
            },
        ),
    )
    assert [c.formats for c in found] == [(FP32,), (BF16,)]
