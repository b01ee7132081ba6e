"""Settings that change numbers: in each session, in the line that runs it, and recorded."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from finecast.engines import get_engine
from finecast.engines.numerics import ONNXRUNTIME, openvino_settings, recorded
from finecast.engines.usage import USAGES, how_to_run
from finecast.measure.environment import environment
from finecast.numbers.formats import Format
from tests.engines.stateful import decoder, steps

EPSILON = float(np.finfo(np.float32).eps)


def text(value: Any) -> str:
    """A property as text, however OpenVINO gives it."""
    named = value.to_string() if hasattr(value, "to_string") else value
    return str(getattr(named, "name", named))


def compiled_by(session: Any) -> Any:
    """OpenVINO's own compiled model of a session."""
    return session._model.compiled


def outputs_of(compiled: Any) -> np.ndarray[Any, Any]:
    """The outputs of three steps of a model that keeps a state."""
    request = compiled.create_infer_request()
    return np.stack([request.infer(feeds)[0].copy() for feeds in steps(3)])


def test_sessions_of_openvino_state_every_property() -> None:
    pytest.importorskip("openvino")
    from finecast.engines.openvino import OpenVinoEngine

    compiled = compiled_by(OpenVinoEngine().load(decoder()))
    stated = openvino_settings("f32")
    assert {n: text(compiled.get_property(n)) for n in stated} == {
        n: text(v) for n, v in stated.items()
    }
    hinted = compiled_by(OpenVinoEngine().load_hinted(decoder(), Format.BF16))
    for cache in ("KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"):
        assert text(compiled.get_property(cache)) == "f32"
        assert text(hinted.get_property(cache)) in ("f32", "bf16")


def test_a_baseline_with_a_cache_is_fp32() -> None:
    """OpenVINO's default keeps keys and values in 8 bits, whatever the precision hint."""
    openvino = pytest.importorskip("openvino")
    from finecast.engines.openvino import OpenVinoEngine

    core, model = openvino.Core(), decoder()
    caches = {"KEY_CACHE_PRECISION": "f32", "VALUE_CACHE_PRECISION": "f32"}
    wanted = outputs_of(core.compile_model(model, "CPU", openvino_settings("f32") | caches))
    got = outputs_of(compiled_by(OpenVinoEngine().load(model)))
    norm = np.linalg.norm(wanted)
    assert np.linalg.norm(got - wanted) < 16 * EPSILON * norm
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    alone = outputs_of(core.compile_model(model, "CPU", hint))
    assert np.linalg.norm(alone - wanted) > 1e-4 * norm  # else the setting is not needed


@pytest.mark.parametrize("throughput", [False, True])
def test_the_line_that_is_printed_computes_what_was_measured(
    throughput: bool, tmp_path: Path
) -> None:
    openvino = pytest.importorskip("openvino")
    from finecast.engines.openvino import OpenVinoEngine

    path = tmp_path / "decoder.xml"
    openvino.save_model(decoder(), path, compress_to_fp16=False)
    names: dict[str, Any] = {}
    zeros = {"x": ((1, 8), "float32")}
    lines = how_to_run(path, "openvino", ["fp32"], inputs=zeros, throughput=throughput)
    exec("\n".join(lines[: lines.index("outputs = model(inputs)")]), names)
    got = outputs_of(names["model"])
    wanted = outputs_of(compiled_by(OpenVinoEngine().load(path)))
    assert np.linalg.norm(got - wanted) < 16 * EPSILON * np.linalg.norm(wanted)


def int4_product(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], Any]:
    """A product with weights in 4 bits by blocks; its inputs and its exact result."""
    rng = np.random.default_rng(0)
    rows, columns, block = 64, 32, 32
    codes = rng.integers(-8, 8, (rows, columns))
    scales = rng.uniform(0.01, 0.02, (rows // block, columns)).astype(np.float32)
    x = rng.standard_normal((4, rows)).astype(np.float32)
    nodes = [
        helper.make_node(
            "DequantizeLinear", ["codes", "scales"], ["w"], axis=0, block_size=block
        ),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, [4, rows])],
        [helper.make_tensor_value_info("y", kind, [4, columns])],
        [
            helper.make_tensor(
                "codes", onnx.TensorProto.INT4, codes.shape, codes.reshape(-1).tolist()
            ),
            numpy_helper.from_array(scales, "scales"),
        ],
    )
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    weights = codes * np.repeat(scales.astype(np.float64), block, axis=0)
    return {"x": x}, x.astype(np.float64) @ weights


def test_onnxruntime_rounds_no_operand_of_given_codes(tmp_path: Path) -> None:
    """By default it rounds what meets weights in 4 bits to 8 bits: an error of .005."""
    pytest.importorskip("onnxruntime")
    path = tmp_path / "int4.onnx"
    feeds, wanted = int4_product(path)
    norm = np.linalg.norm(wanted)
    session = get_engine("onnxruntime").load(path)
    assert np.linalg.norm(session.run(feeds)["y"] - wanted) < 64 * EPSILON * norm
    types = ["fp32", "int4"]
    lines = how_to_run(path, "onnxruntime", types, inputs={"x": ((4, 64), "float32")})
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    assert names["outputs"][0].shape == wanted.shape
    (got,) = names["model"].run(None, feeds)
    assert np.linalg.norm(got - wanted) < 64 * EPSILON * norm


def test_sessions_of_onnxruntime_state_every_entry(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from finecast.engines.onnxruntime import OnnxRuntimeEngine

    path = tmp_path / "int4.onnx"
    int4_product(path)
    options = OnnxRuntimeEngine().load(path)._session.get_session_options()
    assert {n: options.get_session_config_entry(n) for n in ONNXRUNTIME} == ONNXRUNTIME


def test_settings_and_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "BF16")
    environment.cache_clear()
    try:
        found = json.loads(json.dumps(environment().as_json()))["numerics"]
    finally:
        environment.cache_clear()
    assert found == recorded()
    assert found["openvino"]["KV_CACHE_PRECISION"] == "f32"
    assert found["onnxruntime"]["session.qdq_matmulnbits_accuracy_level"] == "1"
    assert found["variables"]["ONEDNN_DEFAULT_FPMATH_MODE"] == "BF16"


@pytest.mark.parametrize("engine", [*USAGES])
def test_a_script_is_python_whatever_the_file_is_called(engine: str) -> None:
    path = Path('it\'s; a "model" {x}.onnx')
    inputs = {'a "name"; {b}': ((2, 3), "float32")}
    tree = ast.parse("\n".join(how_to_run(path, engine, ["bf16"], inputs=inputs)))
    assert str(path) in {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    (model,) = (n for n in tree.body if isinstance(n, ast.Assign) and _names(n) == ["model"])
    assert isinstance(model.value, ast.Call | ast.Subscript)


def _names(node: ast.Assign) -> list[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]
