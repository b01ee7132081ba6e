"""Products by each matrix of a stack, which OpenVINO loads and cannot run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines.base import Array
from finecast.errors import EngineError

openvino = pytest.importorskip("openvino")

STACK = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)


def experts(path: Path, sizes: str, stack: Array = STACK) -> Path:
    """The model ``x @ stack``."""
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 18]>'
        f" g (float[{sizes}] x) => (float[e, m, k] y) {{ [experts] y = MatMul(x, w) }}"
    )
    model.graph.initializer.append(numpy_helper.from_array(stack, "w"))
    onnx.save(model, path)
    return path


def test_openvino_still_does_not_run_it(tmp_path: Path) -> None:
    core = openvino.Core()
    compiled = core.compile_model(
        core.read_model(experts(tmp_path / "m.onnx", "1, n, 16")), "CPU"
    )
    with pytest.raises(RuntimeError, match="clone with new dims"):
        compiled([np.ones((1, 5, 16), np.float32)])


@pytest.mark.parametrize(
    ("sizes", "shape", "engine"),
    [
        ("1, n, 16", (1, 5, 16), "onnxruntime"),
        ("n, 16", (5, 16), "onnxruntime"),
        ("1, 5, 16", (1, 5, 16), "openvino"),
        ("4, n, 16", (4, 5, 16), "openvino"),
    ],
)
@pytest.mark.parametrize("fmt", ["int8", "fp16"])
def test_an_onnx_model_takes_another_engine(
    tmp_path: Path, sizes: str, shape: tuple[int, ...], engine: str, fmt: str
) -> None:
    data = {"x": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}
    path = experts(tmp_path / "m.onnx", sizes)
    done = finecast.convert(path, policy=f"all:{fmt}", data=data)
    verified = done.verified
    assert verified is not None
    assert (verified.engine or "").split(":")[0] == engine


def test_openvinos_own_format_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.xml"
    read = openvino.convert_model(experts(tmp_path / "m.onnx", "1, n, 16"))
    openvino.save_model(read, path, compress_to_fp16=False)
    with pytest.raises(EngineError, match="openvino-broadcast-stacks"):
        finecast.convert(path, policy="all:bf16")
