"""An op keeps fp32 where the engine is known to have no low kernel for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx
import pytest

from finecast.devices.emulation import explicit_casts
from finecast.engines import get_engine, installed
from finecast.engines.base import Engine
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.faults import faults
from finecast.errors import EngineError
from finecast.graph import Node
from finecast.numbers.formats import Format
from finecast.rules import Ruling
from finecast.rules.support import KERNEL
from tests.graph.text import from_text

Judged = Callable[..., dict[str, Ruling | None]]
GRAPH = "input %0 x fp32[4]\nnode n erf onnx::Erf fp32 (%0) -> (%1 y fp32[4])\n"


def query(engine: Engine) -> Callable[..., bool | None]:
    """The engine's kernel query, by an op's native name."""
    (node,) = from_text(GRAPH).nodes
    return lambda native, fmt: engine.has_kernel(replace(node, native=native), fmt)


@pytest.mark.parametrize(("known", "kept"), [(True, False), (None, False), (False, True)])
def test_only_a_known_lack_counts(judged: Judged, known: bool | None, kept: bool) -> None:
    asked: list[tuple[str, Format]] = []

    def kernels(node: Node, fmt: Format) -> bool | None:
        asked.append((node.native, fmt))
        return known

    verdict = judged(KERNEL, GRAPH, kernels=kernels, engine="toy")["n"]
    assert asked == [("onnx::Erf", Format.BF16)]
    assert (verdict is not None) == kept
    if verdict is not None:
        assert verdict.permits == {Format.FP32}
        assert verdict.text == "toy has no working bf16 kernel for onnx::Erf"


@pytest.mark.parametrize("why", ["toy loses the sum", ""])
def test_a_known_fault_needs_no_kernel_query(judged: Judged, why: str) -> None:
    verdict = judged(KERNEL, GRAPH, engine="toy", faults={Format.BF16: {0: why}})["n"]
    assert verdict is not None
    assert verdict.permits == {Format.FP32}
    assert verdict.text == (why or "toy has no working bf16 kernel for onnx::Erf")


@pytest.mark.parametrize("target", ["trn1", "sm80", "amx", "sm75"])
def test_tf32_is_for_products_of_devices_that_have_it(target: str) -> None:
    asked = query(EmulatorEngine(emulation=explicit_casts(target)))
    assert asked("onnx::MatMul", Format.TF32) is (target in ("trn1", "sm80"))
    assert asked("onnx::Conv", Format.TF32) is (target in ("trn1", "sm80"))
    assert asked("onnx::Add", Format.TF32) is False
    assert asked("onnx::Add", Format.BF16) is (False if target == "sm75" else None)


def test_a_device_computes_in_what_that_part_of_it_has() -> None:
    asked = query(EmulatorEngine(emulation=explicit_casts("sm89")))
    assert asked("onnx::MatMul", Format.FP8_E4M3) is None
    assert asked("onnx::Softmax", Format.FP8_E4M3) is False, "fp8 is for tensor cores"
    assert query(get_engine("onnxruntime"))("onnx::MatMul", Format.TF32) is False


@pytest.mark.parametrize("op", ["ScatterND", "ScatterElements"])
@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("fmt", [Format.FP16, Format.BF16])
def test_onnx_runtimes_scatter_is_known_by_its_reduction(
    op: str, reduction: str, fmt: Format
) -> None:
    graph = from_text(GRAPH)
    node = replace(graph.nodes[0], native=f"onnx::{op}", attributes={"reduction": reduction})
    engine = get_engine("onnxruntime")
    found = faults(engine.name, engine.device, replace(graph, nodes=(node,)), (fmt,))
    assert (not found[fmt]) == _runs(op, reduction, fmt)


def _runs(op: str, reduction: str, fmt: Format) -> bool:
    indices = [[0], [0], [1]] if op == "ScatterND" else [0, 0, 1]
    shape = [len(indices), 1] if op == "ScatterND" else [len(indices)]
    make = onnx.helper.make_tensor_value_info
    low = onnx.TensorProto.FLOAT16 if fmt is Format.FP16 else onnx.TensorProto.BFLOAT16
    numbers = np.float16 if fmt is Format.FP16 else ml_dtypes.bfloat16
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, ["x", "i", "u"], ["y"], reduction=reduction)],
        "scatter",
        [make("x", low, [4]), make("i", onnx.TensorProto.INT64, shape), make("u", low, [3])],
        [make("y", low, [4])],
    )
    opsets = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    feeds = {"x": np.ones(4, numbers), "i": np.array(indices), "u": np.ones(3, numbers)}
    try:
        get_engine("onnxruntime").load(model.SerializeToString()).run(feeds)
    except EngineError:
        return False
    return True


@pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")
@pytest.mark.parametrize(
    ("op", "reads"), [("QuickGelu", "x"), ("BiasAdd", "xbx"), ("Gelu", "x")]
)
@pytest.mark.parametrize("fmt", [Format.FP16, Format.BF16])
def test_what_openvino_does_not_load_of_onnx_runtimes_ops_keeps_fp32(
    op: str, reads: str, fmt: Format
) -> None:
    graph, native = from_text(GRAPH), f"com.microsoft::{op}"
    node = replace(graph.nodes[0], native=native)
    engine = get_engine("openvino")
    found = faults(engine.name, engine.device, replace(graph, nodes=(node,)), (fmt,))
    low = onnx.TensorProto.FLOAT16 if fmt is Format.FP16 else onnx.TensorProto.BFLOAT16
    made = onnx.helper.make_graph(
        [onnx.helper.make_node(op, list(reads), ["y"], domain="com.microsoft")],
        "contributed",
        [
            onnx.helper.make_tensor_value_info("x", low, [1, 2, 4]),
            onnx.helper.make_tensor_value_info("b", low, [4]),
        ],
        [onnx.helper.make_tensor_value_info("y", low, [1, 2, 4])],
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(made, opset_imports=opsets, ir_version=10)
    try:
        engine.load(model.SerializeToString())
    except EngineError:
        assert found[fmt]
    else:
        assert not found[fmt]


def test_it_cannot_be_waived() -> None:
    assert KERNEL.hard
