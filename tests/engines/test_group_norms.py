"""OpenVINO has no bf16 kernel of a GroupNormalization whose shape is fixed and small."""

from __future__ import annotations

import numpy as np
import openvino
import pytest
from openvino import opset13 as ov

from finecast import api
from tests.frontends.openvino_graphs import model_of
from tests.kernels import skip_without_bf16


def net(*sizes: int) -> openvino.Model:
    """A convolution, a GroupNormalization of two groups of four channels, another one."""
    random = np.random.default_rng(0)
    x = ov.parameter([1, 3, *sizes], np.float32, name="x")
    first = random.standard_normal((8, 3, 1, 1)).astype(np.float32)
    last = random.standard_normal((8, 8, 1, 1)).astype(np.float32)
    around: list[list[int]] = [[1, 1], [0, 0], [0, 0], [1, 1]]
    made = ov.convolution(x, ov.constant(first), *around, name="first")
    ones = ov.constant(np.ones(8, np.float32))
    made = ov.group_normalization(made, ones, ones, 2, 1e-5, name="norm")
    made = ov.convolution(made, ov.constant(last), *around, name="last")
    return model_of([ov.result(made)], [x])


@pytest.mark.parametrize(
    ("sizes", "low"),
    [((16, 16), "fp32"), ((256, 256), "bf16"), ((-1, -1), "bf16")],
    ids=["small groups", "large groups", "a free shape"],
)
def test_small_groups_of_fixed_shape_keep_fp32(sizes: tuple[int, int], low: str) -> None:
    """It was an error: the converted model did not load."""
    done = api.convert(net(*sizes), policy="all:bf16", engine="openvino")
    formats = {d.node: d.format.label for d in done.plan.decisions}
    assert formats == {"first": "bf16", "norm": low, "last": "bf16"}


def test_openvino_does_not_load_it() -> None:
    """When a release does, the row in ``engines.faults`` can go."""
    skip_without_bf16()
    x = ov.parameter([1, 8, 16, 16], np.float32)
    low = ov.convert(x, openvino.Type.bf16)
    ones = ov.constant(np.ones(8, np.float32))
    ones_low = ov.convert(ones, openvino.Type.bf16)
    norm = ov.group_normalization(low, ones_low, ones_low, 2, 1e-5)
    made = model_of([ov.result(ov.convert(norm, openvino.Type.f32))], [x])
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    with pytest.raises(RuntimeError, match="GroupNormalization"):
        openvino.Core().compile_model(made, "CPU", hint)
