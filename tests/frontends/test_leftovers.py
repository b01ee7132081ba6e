"""Conversions leave no stale type and nothing dead."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import finecast
from finecast.engines import installed
from finecast.errors import FinecastError
from tests.conformance.cases import node_cases
from tests.frontends.leftovers import stale_types, unread, with_stated_types
from tests.frontends.tools import parse

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="OpenVINO is not installed")

RNG = np.random.default_rng(2)
POLICIES = ("all:bf16", "all:fp16")
EVERY = 23
"""Of ONNX's own cases each so many: all of them take minutes."""


def converted(model: onnx.ModelProto, policy: str) -> onnx.ModelProto:
    done = finecast.convert(
        model, policy=policy, engine="openvino", verify=False, progress=False
    )
    assert isinstance(done.model, onnx.ModelProto)
    return done.model


def check(model: onnx.ModelProto, low: onnx.ModelProto) -> None:
    """A conversion leaves nothing that is not read, and no type that is not right."""
    assert set(stale_types(low)) <= set(stale_types(model))
    assert not unread(low)


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_onnx_own_cases(policy: str) -> None:
    tried = 0
    for case in node_cases()[::EVERY]:
        try:
            model = with_stated_types(case.model)
            low = converted(model, policy)
        except (FinecastError, onnx.shape_inference.InferenceError):
            continue  # refused, which another test is about
        if unread(model):
            continue  # what came dead stays and is converted with the rest
        check(model, low)
        tried += 1
    assert tried > len(node_cases()) // EVERY // 2


@pytest.mark.parametrize("label", ["fp16", "fp64", "int8"])
def test_models_that_are_taken_to_fp32(label: str) -> None:
    """Stated types of initializers among them, as some exporters write them."""
    name = {"fp16": "float16", "fp64": "double", "int8": "float"}[label]
    coded = (
        "q = QuantizeLinear(x, s, z)\n d = DequantizeLinear(q, s, z)\n"
        " v = DequantizeLinear(w, s, z)\n y = MatMul(d, v)"
    )
    text = coded if label == "int8" else "y = MatMul(x, w)"
    model = parse(f"net ({name}[n,8] x) => ({name}[n,8] y) {{ {text} }}", opset=17)
    kinds = {"fp16": np.float16, "fp64": np.float64, "int8": np.int8}
    arrays = {"w": RNG.integers(-9, 9, (8, 8)).astype(kinds[label])}
    if label == "int8":
        arrays |= {"s": np.float32(0.1), "z": np.int8(0)}
    for key, array in arrays.items():
        tensor = numpy_helper.from_array(np.asarray(array), key)
        model.graph.initializer.append(tensor)
    model = with_stated_types(model)
    for tensor in model.graph.initializer:
        stated = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        model.graph.value_info.append(stated)
    done = finecast.convert(
        model, policy="all:bf16", engine="openvino", verify=False, from_type=label
    )
    assert isinstance(done.model, onnx.ModelProto)
    assert not stale_types(done.model)
    assert not unread(done.model)
