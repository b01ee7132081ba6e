"""Plans have the parameters of encodings, and those of a plan file are checked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from finecast.errors import ModelError, UsageError
from finecast.graph import ConstantStats, Graph
from finecast.numbers.encodings import Encodings, Scaled
from finecast.numbers.formats import Format
from finecast.planning.edits import RoundTrip, Use, cast_count, edits
from finecast.planning.plan import Decision, Plan
from tests import toy_encoding
from tests.graph.text import from_text


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Format:
    return toy_encoding.install(monkeypatch)


def graph() -> Graph:
    found = from_text("""\
input %0 x fp32[2, 3]
constant %1 w fp32[3, 2] size=6
node first relu onnx::Relu fp32 (%0) -> (%2 a fp32[2, 3])
node one matmul onnx::MatMul fp32 (%2, %1) -> (%3 y fp32[2, 2])
node two matmul onnx::MatMul fp32 (%2, %1) -> (%4 z fp32[2, 2])
output %3
output %4
""")
    stats = ConstantStats(size=6, read=lambda: np.ones((3, 2), np.float32))
    values = [replace(v, constant=stats) if v.name == "w" else v for v in found.values]
    return replace(found, values=tuple(values))


def scaled(toy: Format, scale: float = 0.5) -> Encodings:
    value = Scaled(format=toy, grid=toy_encoding.VALUES, scale=(scale,), zero_point=3)
    constant = Scaled(format=toy, grid=toy_encoding.CONSTANTS, scale=(0.5, 0.25), axis=1)
    return Encodings(operands={0: value}, constants={1: constant})


def plan(toy: Format, encodings: Encodings | None = None) -> Plan:
    decision = Decision(
        node="one", op="matmul", format=toy, encodings=encodings or scaled(toy)
    )
    return Plan(model="m", policy="all:toy8", opset=13, decisions=(decision,))


def test_a_plan_is_read_back_with_its_parameters(toy: Format) -> None:
    assert Plan.from_json(plan(toy).to_json()) == plan(toy)
    assert plan(toy).encodings == {"one": scaled(toy)}
    plan(toy).check(graph(), where="m.onnx")


def test_a_plan_names_the_encoding_of_the_result(toy: Format) -> None:
    (decision,) = json.loads(plan(toy).to_json())["decisions"]
    assert decision["result"] == "fp32"


def test_the_digest_is_of_the_parameters_too(toy: Format) -> None:
    assert plan(toy, scaled(toy, 0.25)).digest != plan(toy).digest


def changed(toy: Format, change: dict[str, Any]) -> str:
    content = json.loads(plan(toy).to_json())
    content["decisions"][0] |= change
    return json.dumps(content)


GOOD = {"scale": [0.5], "zero_point": 3, "axis": None}


@pytest.mark.parametrize(
    "change",
    [
        {"operands": None},
        {"operands": []},
        {"operands": {}, "constants": {}},
        {"operands": {"x": GOOD}},
        {"operands": {"0": {}}},
        {"operands": {"0": GOOD | {"scale": [0.0]}}},
        {"operands": {"0": GOOD | {"scale": [-0.5]}}},
        {"operands": {"0": GOOD | {"zero_point": 128}}},
        {"constants": {"1": GOOD}},  # constants have no zero point
        {"result": "toy8"},  # results are stored in fp32
        {"result": "bf16"},
        {"format": "bf16"},  # which has no parameters
        {"format": "fp32", "operands": {}},
    ],
)
def test_invalid_parameters_are_refused(change: dict[str, Any], toy: Format) -> None:
    with pytest.raises(UsageError, match=r"not a finecast plan.*p\.json"):
        Plan.from_json(changed(toy, change), where="p.json")


def test_parameters_that_were_changed_are_refused(toy: Format) -> None:
    text = changed(toy, {"operands": {"0": GOOD | {"scale": [0.25]}}})
    with pytest.raises(UsageError, match="the plan was changed"):
        Plan.from_json(text)


@pytest.mark.parametrize("what", ["operands", "constants", "result"])
def test_parameters_that_are_left_out_are_refused(toy: Format, what: str) -> None:
    content = json.loads(plan(toy).to_json())
    del content["decisions"][0][what]
    with pytest.raises(UsageError, match=f"not a finecast plan: it has no {what!r}"):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("index", [-1, 1, 2])
def test_operands_that_the_op_has_not_are_refused(index: int, toy: Format) -> None:
    wrong = replace(scaled(toy), operands={index: scaled(toy).operands[0]})
    with pytest.raises(ModelError, match=f"input {index} of 'one'"):
        plan(toy, wrong).check(graph(), where="m.onnx")


@pytest.mark.parametrize(("index", "scales", "axis"), [(0, 2, 1), (1, 3, 1), (1, 2, 2)])
def test_constants_of_another_shape_are_refused(
    index: int, scales: int, axis: int, toy: Format
) -> None:
    constant = replace(scaled(toy).constants[1], scale=(0.5,) * scales, axis=axis)
    wrong = replace(scaled(toy), constants={index: constant})
    with pytest.raises(ModelError, match=f"input {index} of 'one'"):
        plan(toy, wrong).check(graph(), where="m.onnx")


def test_readers_with_equal_parameters_share_a_rounding(toy: Format) -> None:
    found = edits(graph(), {1: toy, 2: toy}, encodings={1: scaled(toy), 2: scaled(toy)})
    trips = [e for e in found if isinstance(e, RoundTrip)]
    assert [e.value for e in trips] == [1, 2]
    assert [e.to for e in trips] == [scaled(toy).constants[1], scaled(toy).operands[0]]
    assert {e.uses for e in trips} == {
        (Use(node=1, index=0), Use(node=2, index=0)),
        (Use(node=1, index=1), Use(node=2, index=1)),
    }
    assert found == tuple(trips)
    assert cast_count(graph(), found) == 2
    apart = edits(graph(), {1: toy, 2: toy}, encodings={1: scaled(toy), 2: scaled(toy, 2)})
    assert len(apart) == 3


def test_what_a_plan_does_not_encode_stays(toy: Format) -> None:
    only = replace(scaled(toy), constants={})
    (found,) = edits(graph(), {1: toy}, encodings={1: only})
    assert isinstance(found, RoundTrip)
    assert found.value == 2
