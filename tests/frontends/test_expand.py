"""Ops written out step by step compute what they did as one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from finecast.frontends import onnx as frontend
from finecast.frontends.onnx.expand import expand_accumulations
from finecast.rules.policy import Policy
from tests.frontends.tools import parse, run

X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)


def expanded(proto: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(proto, folder / "model.onnx")
    prepared = frontend.prepare(frontend.load(folder / "model.onnx"), Policy.parse("none"))
    return ir.to_proto(expand_accumulations(prepared.model))


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 18])
@pytest.mark.parametrize(
    "axis", ["", "<axis = 0>", "<axis = 1>", "<axis = -1>", "<axis = -2>"]
)
def test_softmax_over_the_axes_of_its_opset(tmp_path: Path, opset: int, axis: str) -> None:
    text = f"g (float[2, 3, 4] x) => (float[2, 3, 4] y) {{ y = Softmax {axis} (x) }}"
    before = parse(text, opset=opset)
    after = expanded(before, tmp_path)
    assert "Softmax" not in [n.op_type for n in after.graph.node]
    (want,), (got,) = run(before, x=X), run(after, x=X)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_op_over_an_unknown_number_of_dimensions_stays(tmp_path: Path) -> None:
    proto = parse("""g (float[2, 3, 4] x, int64[n] shape) => (float[k, l, m] y) {
      r = Reshape (x, shape)
      y = Softmax <axis = 1> (r)
    }""", opset=11)  # fmt: skip
    after = expanded(proto, tmp_path)
    assert [n.op_type for n in after.graph.node] == ["Reshape", "Softmax"]
