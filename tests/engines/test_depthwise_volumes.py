"""Depthwise convolutions over volumes: int8 ones do not load under OpenVINO's defaults."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from tests.kernels import skip_without_bf16

openvino = pytest.importorskip("openvino")


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
@pytest.mark.parametrize("axes", [2, 3])
def test_they_keep_fp32_and_the_file_loads(tmp_path: Path, suffix: str, axes: int) -> None:
    skip_without_bf16()
    random = np.random.default_rng(0)
    sizes = ", ".join(["8"] * axes)
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        f" g (float[n, 16, {sizes}] x) => (float[n, 16, {sizes}] y) {{"
        f" [deep] c = Conv <group = 16, pads = {[1] * (2 * axes)}> (x, w)"
        " [mix] y = Conv (c, v) }"
    )
    weights = {"w": (16, 1, *[3] * axes), "v": (16, 16, *[1] * axes)}
    model.graph.initializer.extend(
        numpy_helper.from_array(random.standard_normal(size).astype(np.float32), name)
        for name, size in weights.items()
    )
    given, low = tmp_path / f"given{suffix}", tmp_path / f"low{suffix}"
    onnx.save(model, given.with_suffix(".onnx"))
    if suffix == ".xml":
        read = openvino.convert_model(given.with_suffix(".onnx"))
        openvino.save_model(read, given, compress_to_fp16=False)
    x = random.standard_normal((2, 16, *[8] * axes)).astype(np.float32)
    done = finecast.convert(given, low, "all:int8", data={"x": x})
    (deep,) = (d for d in done.plan.decisions if d.node.startswith(("deep", "c")))
    assert deep.format.label == ("int8" if axes == 2 else "fp32")
    openvino.Core().compile_model(low, "CPU")
