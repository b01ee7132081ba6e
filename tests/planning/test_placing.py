"""A plan on another version of its model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from finecast.errors import ModelError
from finecast.graph import Graph
from finecast.graph.structure import structure_of
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.planning.placing import NEW, Placement, place
from finecast.planning.plan import Decision, Plan
from tests.planning.nets import drawn, prepared

NET = """
net (float[2,4] x) => (float[2,3] y) {
  [first] a = MatMul(x, v)
  [between] b = Relu(a)
  [last] c = MatMul(b, w)
  [end] y = Softmax(c)
}"""
# Exported anew: other names, one more op that only moves numbers, and one that computes.
AGAIN = """
net (float[2,4] x) => (float[2,3] y) {
  [n0] a = MatMul(x, v)
  [n1] b = Relu(a)
  [n2] t = Transpose<perm = [0, 1]>(b)
  [n3] c = MatMul(t, w)
  [n4] d = Tanh(c)
  [n5] y = Softmax(d)
}"""
OTHER = """
net (float[2,4] x) => (float[2,4] y) {
  [n0] a = Sin(x)
  [n1] y = Cos(a)
}"""


def graph_of(text: str, seed: int = 0) -> Graph:
    return prepared(text, drawn(seed, v=(4, 5), w=(5, 3))).graph


def plan_of(graph: Graph, **formats: Format) -> Plan:
    decisions = tuple(
        Decision(node=n.name, op=n.op, format=formats.get(n.name, Format.FP32))
        for n in graph.float_nodes
    )
    return Plan(
        model=graph.digest,
        policy="all:bf16",
        opset=0,
        decisions=decisions,
        structure=structure_of(graph),
    )


def placed(plan: Plan, graph: Graph) -> Placement:
    return place(plan, graph, lambda _: 17)


LOW = plan_of(graph_of(NET), first=Format.BF16, between=Format.BF16, last=Format.BF16)


def test_on_its_own_model_nothing_changes() -> None:
    found = placed(LOW, graph_of(NET))
    assert found.plan.formats == LOW.formats
    assert (found.share, found.gone, found.new) == (1.0, (), ())


def test_a_note_says_whether_weights_are_the_same() -> None:
    same, trained = placed(LOW, graph_of(NET)), placed(LOW, graph_of(NET, seed=1))
    assert same.same
    assert "4 of its 4 ops are here, with the same weights" in same.note
    assert not trained.same
    assert trained.note == (
        "of another version of the model: 4 of its 4 ops are here; with other weights,"
        " attributes or inputs: 2 (first, last)"
    )
    assert not placed(replace(LOW, structure=()), graph_of(NET)).same  # it is not known


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_exported_anew_or_trained_further(seed: int) -> None:
    graph = graph_of(AGAIN, seed)
    found = placed(LOW, graph)
    assert found.placed == {"n0": "first", "n1": "between", "n3": "last", "n5": "end"}
    assert found.plan.formats == {
        "n0": Format.BF16,
        "n1": Format.BF16,
        "n2": Format.BF16,  # it only moves what n1 gives
        "n3": Format.BF16,
        "n4": Format.FP32,
        "n5": Format.FP32,
    }
    assert (found.moving, found.new) == (("n2",), ("n4",))
    decision = found.plan.decision("n4")
    assert decision is not None
    assert decision.deciding[0].text == NEW
    assert found.plan.model == graph.digest
    assert found.plan.opset == 17
    found.plan.check(graph, where="again")
    found.plan.check_complete(graph, where="again")
    found.check(where="again")


def test_an_older_plan_finds_its_ops_by_name() -> None:
    old = replace(LOW, structure=())
    assert placed(old, graph_of(NET, seed=1)).plan.formats == LOW.formats
    assert placed(old, graph_of(AGAIN)).share == 0.0


def test_the_plan_of_another_model_is_refused_unless_forced() -> None:
    found = placed(LOW, graph_of(OTHER))
    assert found.gone == ("first", "between", "last", "end")
    with pytest.raises(ModelError, match="made for another model: 0 of its 4 ops are here"):
        found.check(where="other")
    assert set(found.plan.formats.values()) == {Format.FP32}


def test_scales_of_weights_are_those_of_the_new_weights() -> None:
    graph = graph_of(NET)
    value = Scaled.of_value(Format.INT8, -1.0, 3.0)
    stale = Scaled.of_constant(Format.INT8, np.ones((4, 5), np.float32), (1,))
    plan = plan_of(graph, first=Format.INT8)
    encodings = Encodings(operands={0: value}, constants={1: stale})
    plan = replace(
        plan, decisions=(replace(plan.decisions[0], encodings=encodings), *plan.decisions[1:])
    )
    again = graph_of(AGAIN, seed=1)
    found = placed(plan, again)
    encoded = found.plan.encodings["n0"]
    weights = drawn(1, v=(4, 5), w=(5, 3))["v"]
    assert encoded.operands == {0: value}
    assert encoded.constants == {1: Scaled.of_constant(Format.INT8, weights, (1,))}
    found.plan.check(again, where="again")


def test_an_op_that_cannot_have_the_format_here_stays_fp32() -> None:
    graph = graph_of(NET)
    narrow = tuple(replace(n, admits=frozenset({Format.FP16})) for n in graph.nodes)
    found = placed(LOW, replace(graph, nodes=narrow))
    assert set(found.plan.formats.values()) == {Format.FP32}
    assert set(found.refused) == {"first", "between", "last"}
    assert "does not allow bf16" in found.text
