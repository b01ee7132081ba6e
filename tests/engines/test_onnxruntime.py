from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper, parser

from finecast.engines.base import KernelTime
from finecast.engines.loading import load_model
from finecast.engines.onnxruntime import OnnxRuntimeEngine, explain, kernel_times
from finecast.engines.source import ModelSource, ModelStep
from finecast.errors import EngineError
from finecast.frontends import onnx as onnx_frontend


def step(name: str, reads: str, writes: str, op: str = "Op") -> ModelStep:
    return ModelStep(
        name=name, op=op, inputs=tuple(reads.split()), outputs=tuple(writes.split())
    )


def source(*steps: ModelStep) -> ModelSource:
    return ModelSource(inputs=(), outputs=(), steps=steps)


def event(name: str, microseconds: int, kind: str = "float") -> dict[str, object]:
    args = {"op_name": "Op", "output_type_shape": [{kind: [1]}]}
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "dur": microseconds,
        "args": args,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            (
                "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : "
                "Could not find an implementation for "
                "MatMul(13) node with name 'op0'"
            ),
            "no kernel for MatMul (opset 13) at 'op0'",
        ),
        (
            (
                "[ONNXRuntimeError] : 1 : FAIL : "
                "Fatal error: my.dom:Foo(-1) is not a registered "
                "function/op"
            ),
            "no kernel for my.dom.Foo",
        ),
        (
            "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions",
            "Got invalid dimensions",
        ),
        ("", "RuntimeError"),
    ],
)
def test_reasons_are_one_line(text: str, expected: str) -> None:
    assert explain(RuntimeError(text)) == expected


def test_traces_lead_back_through_fusion_and_renaming(tmp_path: Path) -> None:
    original = source(step("conv", "x", "c"), step("relu", "c", "r"), step("soft", "r", "y"))
    optimized = source(
        step("in", "x", "t", op="com.microsoft.ReorderInput"),
        step("fused", "t", "r"),
        step("soft", "r", "y"),
    )
    trace = tmp_path / "trace.json"
    runs = [event("in", 1), event("fused", 9), event("soft", 5, "bfloat16")]
    warm_up = [event("in", 100), event("fused", 900), event("soft", 500, "bfloat16")]
    trace.write_text(json.dumps([{"cat": "Session", "name": "load"}, *warm_up, *runs, *runs]))
    found = kernel_times(trace, optimized, original, repeats=2)
    assert [(k.kernel, k.ops, k.format) for k in found] == [
        ("fused", ("conv", "relu"), "fp32"),
        ("soft", ("soft",), "bf16"),
        ("in", (), "fp32"),
    ]
    assert found[0].time_s == pytest.approx(9e-6)


def test_a_kernel_in_a_loop_counts_once_for_each_of_its_turns(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps([event("a", 2) for _ in range(3 * 4)]))
    net = source(step("a", "x", "y"))
    (kernel,) = kernel_times(trace, net, net, repeats=3)
    assert kernel.time_s == pytest.approx(6e-6)


def test_products_by_other_codes_are_other_kernels() -> None:
    # or the times that a timing cache has of one are taken for those of the others
    def kernel_of(bits: int, block: int, level: int) -> KernelTime:
        stated = (
            f"K = 64, N = 8, bits = {bits}, block_size = {block}, accuracy_level = {level}"
        )
        net = parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
            net (float[1, 64] x) => (float[1, 8] y) {{
              [product] y = com.microsoft.MatMulNBits <{stated}> (x, codes, scales)
            }}"""
        )
        codes = np.zeros((8, 64 // block, block * bits // 8), np.uint8)
        scales = np.ones(8 * 64 // block, np.float32)
        for name, array in (("codes", codes), ("scales", scales)):
            net.graph.initializer.append(numpy_helper.from_array(array, name))
        session = OnnxRuntimeEngine().load(net.SerializeToString(), profiling=True)
        (kernel,) = session.profile({"x": np.ones((1, 64), np.float32)}, repeats=1)
        return kernel

    ways = ((4, 32, 4), (4, 32, 1), (4, 64, 4), (8, 32, 4))
    kernels = [kernel_of(*way) for way in ways]
    assert len({one.signature for one in kernels}) == len(ways)
    # It reads and gives floats, which it rounds to 8 bits unless it is asked for exact ones.
    assert [one.format for one in kernels] == ["int8", "fp32", "int8", "int8"]


def test_threads_sleep_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # or a session takes the processors from those that it is timed in turns with
    opened: list[Any] = []
    real = onnxruntime.InferenceSession

    def recorded(model: str | bytes, options: Any, **rest: Any) -> Any:
        opened.append(options)
        return real(model, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", recorded)
    net = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (float[1] x) => (float[1] y) {y = Relu(x)}'
    )
    OnnxRuntimeEngine().load(net.SerializeToString())
    (options,) = opened
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


RECURRENT = """<ir_version: 9, opset_import: ["" : 17]>
g (float[t, n, 2] x) => (float[t, 1, n, 1] y)
<float[1, 4, 2] w = {1, 1, 1, 1, 1, 1, 1, 1}, float[1, 4, 1] r = {1, 1, 1, 1}>
{ y = LSTM<hidden_size = 1>(x, w, r) }"""


@pytest.mark.parametrize("profiled", [False, True])
def test_recurrent_ops_are_given_no_empty_input(profiled: bool) -> None:
    """ONNX Runtime would end the process: "terminate called without an active exception"."""
    model = parser.parse_model(RECURRENT).SerializeToString()
    session = OnnxRuntimeEngine().load(model, profiling=True)
    run = session.profile if profiled else session.run
    with pytest.raises(EngineError, match="ends the process where LSTM reads no rows"):
        run({"x": np.zeros((3, 0, 2), np.float32)})
    assert run({"x": np.zeros((3, 1, 2), np.float32)})


def test_a_model_with_external_data_is_profiled_long_after_it_was_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's exports have their weights in a file beside them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "net.onnx"
    net = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]>'
        "net (float[2, 64] x) => (float[2, 64] y) { y = MatMul(x, w) }"
    )
    weights = np.eye(64, dtype=np.float32)
    net.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(net, path, save_as_external_data=True, location="w.data", size_threshold=0)
    model = onnx_frontend.load(path).model
    session = load_model(OnnxRuntimeEngine("CPU"), model, profiling=True)
    (kernel, *_) = session.profile({"x": np.ones((2, 64), np.float32)}, repeats=1)
    assert kernel.time_s > 0
    assert len(list(tmp_path.glob(".finecast-*"))) == 1
    del session
    gc.collect()
    assert not list(tmp_path.glob(".finecast-*"))


@pytest.mark.parametrize("op", ["Gather", "GatherElements", "GatherND"])
def test_an_index_of_no_row_is_no_reason_to_try_another_engine(op: str) -> None:
    """OpenVINO does not check indices: it would give what lies beyond the table."""
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 17]> g (int64[n, 1] i) => (float y)'
        f" <float[3, 1] table = {{1, 2, 3}}> {{ y = {op}(table, i) }}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    session = OnnxRuntimeEngine().load(model.SerializeToString())
    with pytest.raises(EngineError, match="check the numbers that index rows"):
        session.run({"i": np.array([[3]])})
