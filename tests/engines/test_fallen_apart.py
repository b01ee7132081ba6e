"""What one model runs in one kernel and another one in several."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import finecast
from finecast.cli import main
from finecast.engines.base import KernelTime
from finecast.engines.fallen_apart import fallen_apart
from finecast.rules.policy import Policy, Scope
from tests.frontends.test_restating import PATTERNS


def kernels(*groups: str) -> list[KernelTime]:
    return [
        KernelTime(kernel=f"k{n}", kind="", ops=tuple(ops), format="fp32", time_s=1e-6)
        for n, ops in enumerate(groups)
    ]


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
