"""A model whose opset is raised computes what it did, op by op, in ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import parser

from finecast.errors import ModelError
from finecast.frontends.onnx.opset import raise_opset

onnxruntime: Any = pytest.importorskip("onnxruntime")

IMAGE = "float[1, 4, 9, 9] x"
SCALES = "float[4] s = {1, 1, 2, 3}"
CROPPED = 'coordinate_transformation_mode = "tf_crop_and_resize"'
BY_CHANNEL = "float[4] s = {1, 2, 3, 4}"


def weights(*shape: int) -> str:
    numbers = ", ".join(f"{(i % 7) / 9 - 0.3:.3f}" for i in range(int(np.prod(shape))))
    return f"float[{', '.join(map(str, shape))}] w = {{{numbers}}}"


# The opset, the input, constants, and the op.
CASES = [
    # Redefined at a later opset, and left as they were by onnx's converter.
    (7, IMAGE, "", 'y = Upsample<mode = "linear", scales = [1.0, 1.0, 2.0, 3.0]>(x)'),
    (7, IMAGE, "", 'y = Upsample<mode = "nearest", scales = [1.0, 1.0, 2.0, 1.7]>(x)'),
    (9, IMAGE, SCALES, 'y = Upsample<mode = "linear">(x, s)'),
    (9, IMAGE, "float[4] s = {1, 1, 1.5, 1.7}", "y = Upsample(x, s)"),
    (10, IMAGE, SCALES, 'y = Resize<mode = "linear">(x, s)'),
    (10, IMAGE, "float[4] s = {1, 1, 1.7, 2}", "y = Resize(x, s)"),
    (10, IMAGE, "float[4] s = {1, 1, 0.6, 0.5}", "y = Resize(x, s)"),
    (10, IMAGE, "float[4] s = {1, 1, 0.6, 1.7}", 'y = Resize<mode = "linear">(x, s)'),
    (11, IMAGE, "", "y = Hardmax(x)"),
    (11, IMAGE, "", "y = Hardmax<axis = 2>(x)"),
    (11, IMAGE, "", "y = Hardmax<axis = 3>(x)"),
    (
        18,
        IMAGE,
        "float[2] s = {1, 2}, float[2] b = {0.5, 0.1}",
        "y = GroupNormalization<num_groups = 2>(x, s, b)",
    ),
    # Redefined, and converted by onnx.
    (
        11,
        IMAGE,
        "float[4] s = {1, 1, 0.6, 1.6}, float[8] r = {0, 0, 0.1, 0.1, 1, 1, 0.8, 0.9}",
        f'y = Resize<mode = "linear", {CROPPED}>(x, r, s)',
    ),
    (
        16,
        IMAGE,
        "float[1, 2, 2, 2] r = {0.1, 0.2, 0.3, -0.5, 0.9, -0.9, 0, 0}",
        'y = GridSample<mode = "bicubic">(x, r)',
    ),
    (10, IMAGE, "", "y = AveragePool<kernel_shape = [3, 3], ceil_mode = 1>(x)"),
    (11, IMAGE, "", 'y = AveragePool<kernel_shape = [3, 3], auto_pad = "SAME_UPPER">(x)'),
    (8, IMAGE, "", "y = MaxPool<kernel_shape = [3, 3], strides = [2, 2]>(x)"),
    (2, IMAGE, "", 'y = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1], mode = "reflect">(x)'),
    (2, IMAGE, "", "y = Pad<pads = [0, 0, 1, 1, 0, 0, 1, 1], value = 2.0>(x)"),
    (11, IMAGE, "", "y = Softmax(x)"),
    (11, IMAGE, "", "y = Softmax<axis = 2>(x)"),
    (11, IMAGE, "", "y = LogSoftmax<axis = 3>(x)"),
    (1, IMAGE, "", "y, i = TopK<k = 3, axis = 2>(x)"),
    (1, IMAGE, "", "y = Slice<starts = [1], ends = [3], axes = [2]>(x)"),
    (6, IMAGE, "", "y = Clip<max = 0.3>(x)"),
    (9, IMAGE, BY_CHANNEL, "y = BatchNormalization<epsilon = 0.1>(x, s, s, s, s)"),
    (7, IMAGE, "", "y = Dropout(x)"),
    (11, IMAGE, "", "y = ReduceMean<axes = [2]>(x)"),
    (11, IMAGE, "", "y = ReduceSum<axes = [2], keepdims = 0>(x)"),
    (11, IMAGE, "", "y = ReduceLogSumExp<axes = [-1]>(x)"),
    (11, IMAGE, "", "y = Squeeze<axes = [0]>(x)"),
    (11, IMAGE, "", "y = Unsqueeze<axes = [0]>(x)"),
    (2, IMAGE, "", "y, z = Split<axis = 1, split = [1, 3]>(x)"),
    (13, IMAGE, "", "y, z = Split<axis = 1>(x)"),
    (11, "float[3, 4] x", weights(4, 5), "y = Gemm<alpha = 0.5>(x, w)"),
    (7, IMAGE, "float[4, 1, 1] s = {1, 2, 3, 4}", "y = PRelu(x, s)"),
    (1, IMAGE, "", "y = Flatten(x)"),
    (1, IMAGE, "", "y = DepthToSpace<blocksize = 2>(x)"),
    (
        9,
        IMAGE,
        "int64[1, 4, 1, 1] i = {0, 1, 2, 3}, float[1, 4, 1, 1] u = {9, 9, 9, 9}",
        "y = Scatter<axis = 2>(x, i, u)",
    ),
    (11, IMAGE, "", "y = ArgMax<axis = 1>(x)"),
    (1, IMAGE, "", "y = Reshape<shape = [0, -1]>(x)"),
    (6, IMAGE, BY_CHANNEL, "y = InstanceNormalization(x, s, s)"),
    (11, IMAGE, "", "y = LpPool<kernel_shape = [3, 3], strides = [2, 2]>(x)"),
    (17, "float[1, 8, 1] x", "", "y = DFT<axis = 1>(x)"),
    (
        7,
        "float[5, 2, 3] x",
        f"{weights(1, 16, 3)}, {weights(1, 16, 4).replace(' w ', ' r ')}",
        "y, h, c = LSTM<hidden_size = 4>(x, w, r)",
    ),
    (1, IMAGE, weights(4, 2, 3, 3), 'y = ConvTranspose<auto_pad = "SAME_UPPER">(x, w)'),
    (
        1,
        IMAGE,
        weights(4, 4, 3, 3),
        'y = Conv<auto_pad = "SAME_LOWER", strides = [2, 2]>(x, w)',
    ),
]


def model(opset: int, given: str, constants: str, op: str) -> onnx.ModelProto:
    names = [name.strip() for name in op.partition("=")[0].split(",")]
    ends = ", ".join(f"float[] {name}" for name in names)
    header = f'<ir_version: 3, opset_import: ["" : {opset}]>'
    made = parser.parse_model(f"{header} g ({given}) => ({ends}) <{constants}> {{ {op} }}")
    for tensor in made.graph.initializer:  # before IR version 4 they are inputs, too
        made.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
    for end in made.graph.output:
        end.ClearField("type")
    found = onnx.shape_inference.infer_shapes(made)
    for end in found.graph.output:
        if not end.HasField("type"):
            end.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    return found


def run(proto: onnx.ModelProto, x: NDArray[np.float32]) -> list[NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {"x": x})


@pytest.mark.parametrize("to", [13, 22])
@pytest.mark.parametrize(("opset", "given", "constants", "op"), CASES)
def test_numbers_stay(opset: int, given: str, constants: str, op: str, to: int) -> None:
    made = model(opset, given, constants, op)
    shape = [d.dim_value for d in made.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    raised = ir.to_proto(raise_opset(ir.from_proto(made), to))
    assert raised.opset_import[0].version == max(opset, to)
    for got, wanted in zip(run(raised, x), run(made, x), strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "given", "constants", "op", "why"),
    [
        (10, IMAGE, "float[4] s = {1, 1, 0.6, 1.7}", "y = Resize(x, s)", "one axis larger"),
        (10, f"{IMAGE}, float[4] s", "", "y = Resize(x, s)", "scales are computed"),
        (
            18,
            f"{IMAGE}, float[2] s",
            "",
            "y = GroupNormalization<num_groups = 2>(x, s, s)",
            "not constant",
        ),
    ],
)
def test_what_a_later_opset_cannot_state_is_refused(
    opset: int, given: str, constants: str, op: str, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        raise_opset(ir.from_proto(model(opset, given, constants, op)), 22)
