"""A Pad by a number that the model computes: OpenVINO pads by another one in every type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import finecast
from finecast.devices.faults import known_faults
from finecast.engines import get_engine, installed
from finecast.errors import EngineError
from finecast.frontends.openvino.refused import PADDING as FAULT
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

X = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
LARGEST = "m = ReduceMax<keepdims = 0>(r)"
CONSTANT = "m = Neg(number)"


def net(number: str = LARGEST, attributes: str = "") -> onnx.ModelProto:
    return parse(
        f"""net (float[2,6] x) => (float[2,8] y)
          <int64[4] pads = {{0, 0, 0, 2}}, float number = {{-3.0}}> {{
          r = Relu(x)
          {number}
          [pad] y = Pad{attributes}(r, pads, m)
        }}"""
    )


def padded(model: Any, engine: str) -> float:
    (y,) = get_engine(engine).load(model.SerializeToString()).run({"x": X}).values()
    return float(y[0, -1])


def test_openvino_still_pads_by_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, the release is right: it is the row's ``mended``."""
    assert padded(net(), "onnxruntime") == X.max()
    monkeypatch.setitem(known_faults(), FAULT, replace(known_faults()[FAULT], mended="0"))
    assert padded(net(), "openvino") != X.max()


def test_an_onnx_model_goes_to_another_engine(tmp_path: Path) -> None:
    """Plans kept the op in fp32, in which OpenVINO computed it wrongly without a word."""
    onnx.save(net(), tmp_path / "net.onnx")
    done = finecast.convert(tmp_path / "net.onnx", tmp_path / "low.onnx", "all:fp16")
    assert done.verified.engine == "onnxruntime"
    low = onnx.load(tmp_path / "low.onnx")
    assert padded(low, "onnxruntime") == pytest.approx(X.max(), rel=1e-3)


@pytest.mark.parametrize("given", ["net.onnx", "net.xml"])
@pytest.mark.parametrize("policy", ["none", "all:bf16", "all:fp16"])
def test_openvinos_own_format_is_refused_by_the_ops_name(
    given: str, policy: str, tmp_path: Path
) -> None:
    import openvino

    onnx.save(net(), tmp_path / "net.onnx")
    read = openvino.Core().read_model(tmp_path / "net.onnx")
    openvino.save_model(read, tmp_path / "net.xml", compress_to_fp16=False)
    with pytest.raises(EngineError, match="'y' pads by a number") as e:
        finecast.convert(tmp_path / given, tmp_path / "out.xml", policy)
    assert FAULT in str(e.value)
    assert "pad by a constant number" in str(e.value)
    assert not (tmp_path / "out.xml").exists()


@pytest.mark.parametrize(
    ("number", "attributes"), [(CONSTANT, ""), (LARGEST, '<mode = "edge">')]
)
def test_other_pads_are_given_to_openvino(number: str, attributes: str) -> None:
    model = net(number, attributes)
    assert padded(model, "openvino") == pytest.approx(padded(model, "onnxruntime"))


def test_the_ops_of_a_model_are_walked_over_once_a_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import openvino

    from finecast.engines import openvino as engine

    walks: list[Any] = []
    every_op = engine.every_op
    monkeypatch.setattr(
        engine, "every_op", lambda model: [walks.append(model), *every_op(model)][1:]
    )
    onnx.save(net(CONSTANT), tmp_path / "net.onnx")
    openvino.save_model(openvino.convert_model(tmp_path / "net.onnx"), tmp_path / "net.xml")
    get_engine("openvino").load(tmp_path / "net.xml")
    assert len(walks) == 1
