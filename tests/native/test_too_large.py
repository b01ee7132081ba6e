"""A model that the memory is too small for is converted, and run without its fp32 one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast import api
from finecast.engines import get_engine
from finecast.engines.probe import speed_of
from finecast.errors import EngineError
from finecast.frontends import dry_run
from finecast.numbers.formats import Format
from finecast.processes import memory

WIDTH = 1024


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 8 MB, for which 12 MB are short; for the 2 MB of its codes they are not."""
    draw = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(draw.standard_normal((WIDTH, WIDTH), np.float32), f"w{n}")
        for n in range(2)
    ]
    nodes = [
        helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"x{n + 1}"], name=f"product{n}")
        for n in range(2)
    ]
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])
        for name in ("x0", "x2")
    ]
    graph = helper.make_graph(nodes, "chain", ports[:1], ports[1:], weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    speed_of(get_engine("openvino"), Format.INT8_WEIGHTS)  # its probes are larger, and kept
    for module in (dry_run, memory):
        monkeypatch.setattr(module, "memory_bytes", lambda: 12_000_000)
    return path


@pytest.mark.parametrize("to", ["low.onnx", "low.xml"])
def test_the_converted_model_is_run_alone(path: Path, to: str) -> None:
    out = path.with_name(to)
    done = api.convert(path, out, "all:int8_weights", engine="openvino")
    assert done.counts == {"int8_weights": 2}
    assert done.verified.engine == "openvino"
    assert done.verified.relative_error is None
    assert "fp32 was not run: the model has 0.0 GB, too much" in done.verified.note
    assert out.exists()


def test_it_is_not_tuned(path: Path) -> None:
    with pytest.raises(EngineError, match=r"too much to be loaded in the 0\.0 GB"):
        api.tune(path, path.with_name("low.onnx"), engine="openvino")


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_weights_in_a_file_of_any_name_count(path: Path, engine: str) -> None:
    """As bytes of the model, and as what tells it from another one."""
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="some weights")
    assert path.stat().st_size < 10_000
    with pytest.raises(EngineError, match=r"too much to be loaded in the 0\.0 GB"):
        get_engine(engine).load(path)


@pytest.mark.parametrize("op", ["ConstantOfShape", "Tile", "Expand"])
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_small_file_that_states_large_constants_takes_no_more_memory_than_is_free(
    op: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines compute them as they load a model: of 14 GB they took all that there was."""
    side, free = 8_000, 192 << 20
    read = ["sizes"] if op == "ConstantOfShape" else ["number", "sizes"]
    nodes = [
        helper.make_node(op, read, ["filled"], name="fill"),
        helper.make_node("Neg", ["filled"], ["negative"]),
        helper.make_node("Slice", ["negative", "start", "end"], ["part"]),
        helper.make_node("MatMul", ["x", "part"], ["y"], name="product"),
    ]
    arrays = {
        "sizes": np.array([side, side]),
        "number": np.ones((1, 1), np.float32),
        "start": np.array([0, 0]),
        "end": np.array([64, 64]),
    }
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy"
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "fill", ports[:1], ports[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    monkeypatch.setattr(dry_run, "most_tried_bytes", lambda _: free)
    with pytest.raises(EngineError, match="out of memory"):
        get_engine(engine).load(model.SerializeToString()).run(
            {"x": np.ones((1, 64), np.float32)}
        )
    assert dry_run.most_tried_bytes(0) == free
