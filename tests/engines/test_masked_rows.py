"""Rows of masks that leave out every key: OpenVINO's bf16 attention attends to all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import finecast
from finecast.data.options import DataOptions
from finecast.devices.faults import known_faults
from finecast.engines import get_engine, installed
from finecast.errors import WrongNumbersError
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

FAULT = "openvino-masked-rows"
PORTS = "float[1,2,4,8] q, float[1,2,4,8] k, float[1,2,4,8] v"
GIVEN = (
    f"net ({PORTS}, bool[4,4] m) => (float[1,2,4,8] y) {{ [att] y = Attention(q, k, v, m) }}"
)
CONSTANT = f"net ({PORTS}) => (float[1,2,4,8] y) {{ [att] y = Attention(q, k, v, m) }}"
SOFTMAX = """net (float[4,32] x, bool[4,32] m) => (float[4,32] y) <float low = {-inf}> {
  s = Where(m, x, low)
  y = Softmax(s)
}"""


def saved(text: str, folder: Path, mask: np.ndarray | None = None) -> Path:
    model = parse(text, opset=23, ir_version=10)
    if mask is not None:
        constant = onnx.numpy_helper.from_array(mask, "m")
        model.graph.initializer.append(constant)
    onnx.save(model, folder / "net.onnx")
    return folder / "net.onnx"


def lowered(net: Path, data: DataOptions | None = None) -> set[str]:
    """The formats of all ops under ``all:bf16``."""
    done = finecast.convert(
        net, net.with_name("low.onnx"), "all:bf16", engine="openvino", data=data, force=True
    )
    return {f.label for f in done.plan.formats.values()}


def attends_to_what_is_masked() -> bool:
    """Whether this CPU shows the fault: kernels for AVX-512 are right.

    ``tests/devices/test_faults.py`` runs those for AVX2 on any CPU.
    """
    text = """net (float[1,1,2,2] x, bool[2,2] m) => (float[1,1,2,2] y) {
      q = Cast<to = 16>(x)
      a = Attention(q, q, q, m)
      y = Cast<to = 1>(a)
    }"""
    session = get_engine("openvino").load(
        parse(text, opset=23, ir_version=10).SerializeToString()
    )
    x = np.array([[[[1, 2], [3, 5]]]], np.float32)
    (y,) = session.run({"x": x, "m": np.array([[True, False], [False, False]])}).values()
    return bool(np.abs(y[0, 0, 1]).max() > 1)


def test_such_an_attention_keeps_fp32(tmp_path: Path) -> None:
    assert lowered(saved(GIVEN, tmp_path)) == {"fp32"}
    causal = np.tril(np.ones((4, 4), bool))
    assert lowered(saved(CONSTANT, tmp_path, causal)) == {"bf16"}
    causal[2] = False
    assert lowered(saved(CONSTANT, tmp_path, causal)) == {"fp32"}


def test_random_inputs_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the kind that nobody knows yet is found when the model is verified."""
    if not attends_to_what_is_masked():
        pytest.skip("this CPU's kernels are right")
    monkeypatch.setitem(known_faults(), FAULT, replace(known_faults()[FAULT], mended="0"))
    policy = finecast.Policy.of("all:bf16")
    net = saved(GIVEN, tmp_path)
    try:
        done = finecast.convert(net, tmp_path / "low.onnx", policy, engine="openvino")
    except WrongNumbersError:
        return
    assert {f.label for f in done.plan.formats.values()} == {"fp32"}


def test_where_fp32_has_no_number_for_it_no_row_is_masked(tmp_path: Path) -> None:
    done = finecast.convert(
        saved(SOFTMAX, tmp_path), tmp_path / "low.onnx", "all:bf16", engine="openvino"
    )
    assert not [said for said in done.warnings if "NaN" in said]
