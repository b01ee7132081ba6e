"""What one model runs in one kernel and another one in several."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

import finecast
from finecast.cli import main
from finecast.engines.fallen_apart import broken_by, fallen_apart
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy, Scope
from tests.frontends.test_restating import PATTERNS


def kernels(*groups: str) -> list[tuple[str, ...]]:
    return [tuple(ops) for ops in groups]


def test_the_nodes_of_one_kernel_in_several() -> None:
    found = fallen_apart(kernels("abc", "de"), kernels("a", "bc", "de"))
    assert [one.parts for one in found] == [(("a",), ("b", "c"))]
    assert found[0].text == "2 kernels of one: a | b c"


def test_what_stays_together_or_is_gone_is_not_told() -> None:
    assert not fallen_apart(kernels("abc", "d"), kernels("abcd"))
    assert not fallen_apart(kernels("abc"), kernels("ab", ""))
    assert not fallen_apart(kernels("a", "b"), kernels("b", "a"))


def test_profile_tells_of_a_swish_that_stands_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, kept, restated = (tmp_path / f"{n}.onnx" for n in ("source", "kept", "restated"))
    model = onnx.ModelProto()
    model.CopyFrom(PATTERNS["scaled swish"])
    for port in (
        *model.graph.input,
        *model.graph.output,
    ):  # OpenVINO lists no kernel below 1 us
        port.type.tensor_type.shape.dim[0].dim_value = 4096
    onnx.save(model, source)
    policy = Policy(scope=Scope.ALL, keep_ops=True)
    finecast.convert(source, kept, policy=policy, verify=False)
    finecast.convert(source, restated, policy="all:bf16", verify=False)
    given = ["profile", *map(str, (source, kept, restated)), "--engine", "openvino", "--ops"]
    assert main([*given, "--runs", "2", "--seconds", "0.01", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    apart = [{node for part in one for node in part} for one in models[1]["fallen_apart"]]
    assert any({"make_s", "make_y"} <= nodes for nodes in apart)
    assert models[0]["fallen_apart"] == models[2]["fallen_apart"] == []


@pytest.fixture
def swish(tmp_path: Path) -> Path:
    path = tmp_path / "swish.onnx"
    onnx.save(PATTERNS["scaled swish"], path)
    return path


def test_convert_tells_of_it(
    swish: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["convert", str(swish), "-o", str(tmp_path / "low.onnx"), "--auto-cast", "all"]
    given += ["--engine", "openvino", "--json", "--force"]
    assert main([*given, "--keep-ops"]) == 0
    kept = json.loads(capsys.readouterr().out)["verified"]
    assert any("make_s" in text and "make_y" in text for text in kept["fallen_apart"])
    assert main(given) == 0
    restated = json.loads(capsys.readouterr().out)["verified"]
    assert restated["fallen_apart"] == []
    assert restated["kernels"][1] < kept["kernels"][1]
    given.remove("--json")
    assert main([*given, "--keep-ops"]) == 0
    assert "not fused" in capsys.readouterr().out


def test_explain_tells_of_it(swish: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["explain", str(swish), "make_s", "--engine", "openvino", "--auto-cast", "all"]
    assert main([*given, "--keep-ops"]) == 0
    assert "its fp32 kernel is not fused any more: " in capsys.readouterr().out
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fallen_apart"] == []


def test_what_a_plan_means_to_cast_is_not_told() -> None:
    plan = finecast.convert(PATTERNS["swish"], policy="all:bf16", verify=False).plan
    before = [("make_d", "make_s", "make_y")]
    after = [("make_d",), ("make_s", "make_y")]
    assert len(broken_by(plan, before, after)) == 1
    first = replace(plan.decisions[0], format=Format.FP32)
    ends = [one for one in plan.decisions if one.node != "make_d"]
    mixed = replace(plan, decisions=(replace(first, node="make_d"), *ends))
    assert broken_by(mixed, before, after) == ()


def test_kernels_that_fall_apart_alike_are_told_once() -> None:
    """OpenVINO runs one Einsum of attention once for each head and batch."""
    assert len(fallen_apart(kernels("ab", "ab", "ab"), kernels("a", "b"))) == 1
