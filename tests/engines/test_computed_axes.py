"""OpenVINO has no bf16 kernel of a reduction whose axes are no constant."""

from __future__ import annotations

import numpy as np
import openvino
import pytest
from openvino import opset13 as ov

from finecast import api
from tests.frontends.openvino_graphs import model_of
from tests.frontends.tools import parse
from tests.kernels import skip_without_bf16

HEAD = "net (float[2,3,4] x, int64[1] a) => (float[u,v,w] y) {"
SQUARE = "[m] s = Mul(x, x)"


def formats_of(net: str) -> dict[str, str]:
    done = api.convert(parse(net, opset=18), policy="all:bf16", engine="openvino")
    return {d.node: d.format.label for d in done.plan.decisions}


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL1"])
def test_reductions_over_computed_axes_keep_fp32(op: str) -> None:
    """It was an error: the converted model did not load."""
    net = f"{HEAD} {SQUARE}\n [r] y = {op}(s, a) }}"
    assert formats_of(net) == {"m": "bf16", "r": "fp32"}
    axes = "axes = Constant<value = int64[1] {1}>()"
    net = f"{HEAD} {SQUARE}\n {axes}\n [r] y = {op}(s, axes) }}"
    assert formats_of(net) == {"m": "bf16", "r": "bf16"}


def test_openvino_does_not_load_it() -> None:
    """When a release does, the row in ``engines.faults`` can go."""
    skip_without_bf16()
    x = ov.parameter([2, 3, 4], np.float32)
    axes = ov.parameter([1], np.int64)
    made = ov.reduce_sum(ov.convert(x, openvino.Type.bf16), axes, True)
    model = model_of([ov.result(ov.convert(made, openvino.Type.f32))], [x, axes])
    with pytest.raises(RuntimeError, match="ReduceSum"):
        openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
