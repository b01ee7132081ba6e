"""Bounds on size in a shell: the file that is written keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.api import tuning
from finecast.cli import main


@pytest.fixture
def net(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights, nodes, name = [], [], "x"
    for i in range(3):
        array = rng.standard_normal((128, 128)).astype(np.float32) / np.float32(11)
        weights.append(numpy_helper.from_array(array, f"w{i}"))
        weights.append(numpy_helper.from_array(array[0], f"b{i}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{i}"], [f"y{i}"], f"mm{i}"))
        nodes.append(helper.make_node("Add", [f"y{i}", f"b{i}"], [f"z{i}"], f"add{i}"))
        name = f"z{i}"
    given, result = (
        helper.make_tensor_value_info(port, TensorProto.FLOAT, ["n", 128])
        for port in ("x", name)
    )
    graph = helper.make_graph(nodes, "net", [given], [result], weights)
    path = tmp_path / "net.onnx"
    opset = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((16, 128)).astype(np.float32))
    return path


def words(net: Path, *bound: str) -> list[str]:
    return [
        *("tune", str(net), "-o", str(net.with_name("out.onnx"))),
        *("--data", str(net.with_name("data.npz")), "--metric", "cosine", "--max-drop", "0.1"),
        *("--target", "sm100", "--auto-cast-type", "nvfp4,mxfp8_e4m3,bf16", *bound),
    ]


def test_the_written_file_keeps_the_bound(net: Path) -> None:
    assert main(words(net, "--max-size", "40kB")) == 0
    assert net.with_name("out.onnx").stat().st_size <= 40_000


def test_a_bound_that_nothing_keeps(net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(net, "--max-bits", "2")) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "no plan takes at most 2 bits a weight: the smallest takes" in told
    assert "4.72 bits a weight" in told
    assert not net.with_name("out.onnx").exists()


def test_a_size_without_a_unit_that_is_known(
    net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(net, "--max-size", "12 parsecs")) == 2
    assert "--max-size" in capsys.readouterr().err


def test_a_file_that_is_written_larger_is_told(
    net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = tuning.search

    def written_larger(*args: object, **options: object) -> finecast.Result:
        result = search(*args, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(
            finecast.Result,
            "of_size",
            lambda self, _: replace(self, tuned=replace(self.tuned, size_bytes=99_000)),
        )
        return result

    monkeypatch.setattr(tuning, "search", written_larger)
    result = finecast.tune(
        net,
        net.with_name("out.onnx"),
        data=net.with_name("data.npz"),
        metric="cosine",
        max_drop=0.1,
        policy="auto:nvfp4,mxfp8_e4m3,bf16",
        target="sm100",
        max_size=40_000,
        jobs=0,
    )
    assert any("takes 0.099 MB, more than the 0.04 MB" in text for text in result.warnings)
