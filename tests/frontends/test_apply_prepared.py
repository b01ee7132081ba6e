"""What was prepared for planning may be given to ``apply``: less work, the same model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from finecast.frontends import onnx as frontend
from finecast.planning.adjustments import Adjustment
from finecast.rules.policy import Policy
from tests.frontends.test_invalid_graphs import FUNCTIONS, IF, LOOP, SCAN
from tests.frontends.tools import parse, planner_of

MODELS = {"if": IF, "loop": LOOP, "scan": SCAN, "functions": FUNCTIONS}


@pytest.mark.parametrize("opset", [12, 17])
@pytest.mark.parametrize("policy", ["all:fp16", "all:bf16", "matmult:bf16", "none:bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_result_is_the_same(tmp_path: Path, name: str, policy: str, opset: int) -> None:
    imports = '"local" : 1' if name == "functions" else ""
    text = MODELS[name].replace('"" : 17', f'"" : {opset}')
    onnx.save(parse(text, opset=opset, imports=imports), tmp_path / "m.onnx")
    file, asked = frontend.load(tmp_path / "m.onnx"), Policy.parse(policy)
    prepared = frontend.prepare(file, asked)
    plan = planner_of(prepared, asked).lowest()
    again = frontend.apply(file, plan)
    once = frontend.apply(file, plan, prepared)
    assert once.edits == again.edits
    assert frontend.to_bytes(once.model) == frontend.to_bytes(again.model)


def test_what_was_prepared_for_another_policy_is_left_alone(tmp_path: Path) -> None:
    onnx.save(parse(IF), tmp_path / "m.onnx")
    file = frontend.load(tmp_path / "m.onnx")
    asked = Policy.parse("all:fp16")
    prepared = frontend.prepare(file, asked)
    plan = planner_of(prepared, asked).lowest()
    other = frontend.prepare(file, Policy.parse("all:bf16"))
    before = frontend.to_bytes(other.model)
    assert frontend.apply(file, plan, other).model is not other.model
    assert frontend.to_bytes(other.model) == before


# As PyTorch's exporter writes layers whose biases are equal: one constant, and copies of it.
COPIED_BIASES = """net (float[2,3] x) => (float[2,3] y)
<float[3,3] v = {1,2,3,4,5,6,7,8,9},
 float[3,3] t = {9,8,7,6,5,4,3,2,1}, float[3] b = {1,2,3}> {
  b1 = Identity (b)
  w1 = Transpose <perm = [1, 0]> (t)
  [product] m = MatMul (x, v)
  [after] n = Add (b1, m)
  [second] o = MatMul (n, w1)
  [last] y = Add (o, b)
}"""


@pytest.mark.parametrize(
    "adjustment",
    [
        Adjustment(node="after", port=0, add=(0.5, 0.25, 0.125)),
        Adjustment(node="second", port=1, exponents=(1, 2, 3)),
    ],
    ids=["a bias", "weights"],
)
def test_what_constants_give_is_adjusted_without_what_was_prepared(
    tmp_path: Path, adjustment: Adjustment
) -> None:
    onnx.save(parse(COPIED_BIASES), tmp_path / "m.onnx")
    file, asked = frontend.load(tmp_path / "m.onnx"), Policy.parse("all:bf16")
    prepared = frontend.prepare(file, asked)
    plan = planner_of(prepared, asked).highest().adjusted([adjustment], {})
    again = frontend.apply(file, plan)
    once = frontend.apply(file, plan, prepared)
    assert frontend.to_bytes(once.model) == frontend.to_bytes(again.model)
