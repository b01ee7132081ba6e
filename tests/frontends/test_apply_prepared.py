"""What was prepared for planning may be given to ``apply``: less work, the same model."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from finecast.frontends import onnx as frontend
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
