"""Random graphs under random plans.

10,000 of them: ``python -m tests.frontends.random_plans``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import Prepared
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.planning.edits import edits
from finecast.planning.plan import Decision, Plan
from finecast.rules.policy import Policy
from tests.frontends.random_graphs import Generator
from tests.frontends.random_plans import try_one

SEEDS = st.integers(min_value=0, max_value=2**40)


@pytest.mark.long
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS)
def test_the_converted_model_is_valid_and_equals_the_emulated_plan(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try_one(Random(seed), Path(folder))


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS)
def test_rounding_is_found_again(seed: int) -> None:
    """Of operands of any op, anywhere: a plan's own tf32 once more edits nothing."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.onnx", Path(folder) / "target.onnx"
        onnx.save(Generator(random).model(), source)
        file = frontend.load(source)
        graph = frontend.prepare(file, Policy.parse("all:tf32")).graph
        able = [n for n in graph.float_nodes if n.op != "phi" and not by_name(n.op).exact]
        low = [n for n in able if n.format is Format.FP32 and random.random() < 0.6]
        decisions = (Decision(node=n.name, op=n.op, format=Format.TF32) for n in low)
        plan = Plan(model=file.digest, policy="all:tf32", opset=17, decisions=tuple(decisions))
        frontend.save(frontend.apply(file, plan).model, target)
        frontend.check(target)
        again = frontend.prepare(frontend.load(target), Policy.parse("none")).graph
        ids = {n.name: n.id for n in again.nodes}
        assert not edits(again, {ids[n]: f for n, f in plan.formats.items()})


def ops_of(prepared: Prepared) -> list[str]:
    """Ops in order; what nodes compute from constants alone may have become initializers."""
    return [node.native for node in prepared.graph.nodes]
