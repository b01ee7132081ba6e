"""OpenVINO's IR whose weights another tool compressed, as NNCF states them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as ops

import finecast

ROWS, COLUMNS = 16, 24


def compressed(path: Path) -> Path:
    """A product by 8-bit codes with a zero point and a scale, decompressed in fp16."""
    rng = np.random.default_rng(0)
    codes = ops.constant(rng.integers(0, 256, (ROWS, COLUMNS)).astype(np.uint8))
    zeros = ops.constant(rng.integers(100, 150, (1, COLUMNS)).astype(np.uint8))
    scales = ops.constant(rng.uniform(1e-3, 2e-3, (1, COLUMNS)).astype(np.float16))
    centred = ops.subtract(ops.convert(codes, "f16"), ops.convert(zeros, "f16"))
    weights = ops.convert(ops.multiply(centred, scales), "f32")
    x = ops.parameter([-1, ROWS], np.float32, name="x")
    of: Any = openvino.Model  # whose stubs take another class for it
    model = of([ops.matmul(x, weights, False, False)], [x], "net")
    openvino.save_model(model, path, compress_to_fp16=False)
    return path


def test_codes_are_counted_as_parameters(tmp_path: Path) -> None:
    found = finecast.inspect(compressed(tmp_path / "m.xml"))
    assert found.parameters == ROWS * COLUMNS + COLUMNS  # and scales; zero points are none


def test_ops_that_decompress_are_not_said_to_compute(tmp_path: Path) -> None:
    done = finecast.convert(compressed(tmp_path / "m.xml"), tmp_path / "low.xml", "all:bf16")
    assert not [text for text in done.warnings if "compute in fp16" in text]
    assert done.verified.relative_error == pytest.approx(2**-8, abs=2**-8)
