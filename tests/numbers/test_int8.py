"""int8 is what ONNX defines: the same codes and the same numbers, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from finecast.engines.openvino import OpenVinoEngine
from finecast.numbers.encodings import Scaled
from finecast.numbers.formats import Format

INT8 = Format.INT8
X = hnp.arrays(np.float32, (3, 5), elements=st.floats(-(2.0**13), 2.0**13, width=32))
# The reference keeps quotients in 32 bits.
SCALES = st.floats(2.0**-10, 2.0**10, width=32)


def of_values(scale: float, zero: int) -> Scaled:
    return Scaled(format=INT8, grid=INT8.grid(constant=False), scale=(scale,), zero_point=zero)


def model(encoding: Scaled, shape: tuple[int, ...]) -> bytes:
    """``q`` are the codes of ``x``, ``y`` the numbers that they stand for."""
    scale = np.array(encoding.scale if encoding.axis is not None else encoding.scale[0])
    zero = np.full_like(scale, encoding.zero_point, encoding.dtype)
    axis: dict[str, Any] = {} if encoding.axis is None else {"axis": encoding.axis}
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(encoding.dtype))
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **axis),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **axis),
    ]
    fp32 = onnx.TensorProto.FLOAT
    ports = [("x", fp32), ("q", kind), ("y", fp32)]
    x, q, y = (helper.make_tensor_value_info(n, t, shape) for n, t in ports)
    constants = [
        numpy_helper.from_array(scale.astype(np.float32), "s"),
        numpy_helper.from_array(zero, "z"),
    ]
    graph = helper.make_graph(nodes, "quantize", [x], [q, y], constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    made.ir_version = 9
    return made.SerializeToString()


def reference(encoding: Scaled, x: NDArray[np.float32]) -> list[NDArray[np.generic]]:
    evaluator = ReferenceEvaluator(onnx.load_from_string(model(encoding, x.shape)))
    found = evaluator.run(None, {"x": x})
    assert isinstance(found, list)
    return found


@given(X, SCALES, st.integers(0, 255))
def test_values_are_coded_as_onnx_defines(
    x: NDArray[np.float32], scale: float, zero: int
) -> None:
    encoding = of_values(scale, zero)
    codes, numbers = reference(encoding, x)
    assert encoding.encode(x).dtype == codes.dtype == np.uint8
    assert np.array_equal(encoding.encode(x), codes)
    assert np.array_equal(encoding.round(x), numbers)


@given(X, st.lists(SCALES, min_size=3, max_size=3))
def test_constants_are_coded_by_channel_as_onnx_defines(
    x: NDArray[np.float32], scales: list[float]
) -> None:
    grid = INT8.grid(constant=True)
    encoding = Scaled(format=INT8, grid=grid, scale=(*scales,), axis=0)
    codes, _ = reference(encoding, x)
    # ONNX's ends at -128, which the codes of a symmetric range leave out.
    assert np.array_equal(encoding.encode(x), np.maximum(codes, -127))


@pytest.mark.parametrize("zero", [0, 3, 255])
def test_halves_go_to_even_and_what_is_beyond_to_the_ends(zero: int) -> None:
    encoding = of_values(0.5, zero)
    x = np.array([-0.75, -0.25, 0.25, 0.75, 1.25, -1e6, 1e6], np.float32)
    wanted = np.clip(np.array([-2, 0, 0, 2, 2, -9999, 9999]) + zero, 0, 255)
    assert encoding.encode(x).tolist() == wanted.tolist()
    assert np.array_equal(reference(encoding, x)[0], wanted)


@pytest.mark.parametrize("zero", [0, 100])
def test_openvino_gives_the_same_numbers(zero: int) -> None:
    # It divides otherwise, which shows beside halves alone: here quotients are exact.
    encoding = of_values(2.0**-4, zero)
    x = np.arange(-600, 600).reshape(-1, 4).astype(np.float32) / np.float32(16)
    session = OpenVinoEngine().load(model(encoding, x.shape))
    found = session.run({"x": x})
    assert np.array_equal(found["y"], encoding.round(x))


def test_a_format_with_a_scale_rounds_nothing_by_itself() -> None:
    for method in (INT8.round, INT8.encode, INT8.decode):
        with pytest.raises(ValueError, match="int8 does not round without the parameters"):
            method(np.ones(1, np.float32))
