"""Which constants a bias correction may adjust, and how a plan states it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from finecast.errors import ModelError, UsageError
from finecast.frontends.onnx.editor import name_nodes
from finecast.frontends.onnx.reader import read
from finecast.frontends.onnx.types import infer
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.planning.biases import RULE, biases, corrected
from finecast.planning.plan import Decision, Plan
from tests.frontends.tools import parse

TEXT = """net (float[2,3,4,4] x, float[2,3] u)
=> (float[2,2,4,4] y, float[2,3] z, float[2,3] q)
<float[2,3,1,1] w0 = {1,2,3,4,5,6}, float[2] b0 = {1,2}, float[2] both = {1,2},
 float[3,3] v = {1,2,3,4,5,6,7,8,9}, float[1,3] c = {1,2,3}, float one = {1},
 float[3] d = {1,2,3}, float[3] d1 = {4,5,6}> {
  [own] a = Conv (x, w0, b0)
  [bare] e = Conv (x, w0)
  [first] f = Conv (x, w0, both)
  [second] g = Conv (x, w0, both)
  [sum1] h = Add (a, e)
  [sum2] i = Add (f, g)
  [sum3] y = Add (h, i)
  [product] m = MatMul (u, v)
  [after] n = Add (c, m)
  [read_twice] o = MatMul (n, v)
  [add_one] p = Add (o, one)
  [again] r = Mul (o, p)
  [scaled] s = Gemm <beta = 0.5> (r, v, d)
  [last] z = MatMul (s, v)
  [gemm] q = Gemm <transB = 1> (s, v, d1)
}"""


@pytest.fixture(scope="module")
def graph() -> Graph:
    model = ir.from_proto(parse(TEXT))
    name_nodes(model)
    infer(model, shapes=True)
    return read(model)[0]


def coded(graph: Graph) -> dict[int, Format]:
    return {n.id: Format.INT8 for n in graph.nodes if n.op in ("conv", "matmul", "gemm")}


def test_a_bias_is_the_product_s_own_or_what_is_added_alone(graph: Graph) -> None:
    found = {
        graph.nodes[b.product].name: (graph.nodes[b.node].name, b.port, b.channels, b.rank)
        for b in biases(graph, coded(graph))
    }
    assert found == {
        "own": ("own", 2, 2, 4),
        "product": ("after", 0, 3, 0),
        "gemm": ("gemm", 2, 3, 0),
    }


def test_biases_of_ops_that_are_not_on_codes_stay(graph: Graph) -> None:
    formats = dict.fromkeys(coded(graph), Format.BF16)
    assert biases(graph, formats) == ()


def plan_of(graph: Graph) -> Plan:
    return Plan(
        model="m",
        policy="all:int8+bias",
        opset=17,
        decisions=tuple(
            Decision(node=n.name, op=n.op, format=Format.FP32) for n in graph.nodes
        ),
    )


@pytest.fixture
def plan(graph: Graph) -> Plan:
    places = biases(graph, coded(graph))
    errors = [np.linspace(-0.1, 0.123456, p.channels) for p in places]
    return corrected(plan_of(graph), graph, places, errors)


def test_a_correction_is_of_the_errors_in_few_digits(graph: Graph, plan: Plan) -> None:
    own = plan.adjustments[0]
    assert (own.node, own.port, own.add) == ("own", 2, (0.1, -0.1235))
    said = {d.node for d in plan.decisions for r in d.reasons if r.rule == RULE}
    assert said == {"own", "product", "after", "gemm"}
    assert plan.digest != plan_of(graph).digest


def test_a_plan_keeps_its_adjustments(graph: Graph, plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    plan.check(graph, where="here")


@pytest.mark.parametrize(
    "wrong",
    [
        Adjustment(node="none", port=2, add=(1.0, 1.0)),
        Adjustment(node="own", port=7, add=(1.0, 1.0)),
        Adjustment(node="own", port=2, add=(1.0,)),
        Adjustment(node="own", port=0, add=(1.0, 1.0)),
        Adjustment(node="first", port=2, add=(1.0, 1.0)),
    ],
)
def test_what_is_no_constant_of_one_op_is_not_adjusted(
    graph: Graph, plan: Plan, wrong: Adjustment
) -> None:
    with pytest.raises(ModelError, match=f"adjusts input {wrong.port} of '{wrong.node}'"):
        replace(plan, adjustments=(wrong,)).check(graph, where="here")


@pytest.mark.parametrize("add", ['"0.1 much"', '"nan 1"', "[0.1, 0.2]"])
def test_invalid_adjustments_are_refused(plan: Plan, add: str) -> None:
    text = plan.to_json().replace('"0.1 -0.1235"', add)
    with pytest.raises(UsageError, match="not a finecast plan"):
        Plan.from_json(text)
