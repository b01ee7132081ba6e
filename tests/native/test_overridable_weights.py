"""Weights that an ONNX model lists as inputs, too: a caller may replace them, or may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

import finecast
from finecast.errors import UsageError
from finecast.planning.plan import Plan
from tests.frontends.openvino_graphs import chain

N = 8
RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, N)).astype(np.float32)
W, OTHER = (RNG.standard_normal((N, N)).astype(np.float32) for _ in range(2))
EPS = float(np.finfo(np.float16).eps)


def _model(ir_version: int) -> onnx.ModelProto:
    """``y = x @ w``, of which ``w`` is an input with a default."""
    kind, sizes = onnx.TensorProto.FLOAT, [4, N]
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "product")],
        "overridable",
        [
            helper.make_tensor_value_info("x", kind, sizes),
            helper.make_tensor_value_info("w", kind, [N, N]),
        ],
        [helper.make_tensor_value_info("y", kind, sizes)],
        [numpy_helper.from_array(W, "w")],
    )
    imports = [helper.make_opsetid("", 8)]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)


def _low(ir_version: int, **options: bool) -> finecast.Result:
    model = finecast.load(_model(ir_version), freeze_inputs=options.get("freeze_inputs"))
    return finecast.convert(model, policy="all:fp16", engine="onnxruntime")


def _inputs(result: finecast.Result) -> list[str]:
    assert result.model is not None
    return [port.name for port in result.model.graph.input]


def _outputs(result: finecast.Result, **given: NDArray[np.float32]) -> NDArray[Any]:
    assert result.model is not None
    session = onnxruntime.InferenceSession(
        result.model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    outputs: Any = session.run(None, given)
    return outputs[0]


@pytest.mark.parametrize(
    ("ir_version", "options"), [(8, {}), (3, {"freeze_inputs": False})], ids=["IR 8", "IR 3"]
)
def test_a_weight_that_a_caller_may_replace_stays_an_input(
    ir_version: int, options: dict[str, bool]
) -> None:
    low = _low(ir_version, **options)
    assert _inputs(low) == ["x", "w"]
    assert any("1 weight is an input, too, which a caller may" in t for t in low.warnings)
    assert low.model is not None
    assert [node.op_type for node in low.model.graph.node].count("Cast") == 3
    # ONNX Runtime leaves the casts to fp16 out on some CPUs: the error may be 0.
    for weights, given in ((W, {}), (OTHER, {"w": OTHER})):
        y = _outputs(low, x=X, **given)
        assert np.abs(y - X @ weights).max() < 40 * EPS


@pytest.mark.parametrize(
    ("ir_version", "options"),
    [(8, {"freeze_inputs": True}), (3, {"freeze_inputs": True}), (3, {})],
    ids=["IR 8", "IR 3", "IR 3 by default"],
)
def test_a_weight_becomes_a_constant(ir_version: int, options: dict[str, bool]) -> None:
    """IR version 3 asks for all weights to be inputs, so that hardly a caller replaces one."""
    low = _low(ir_version, **options)
    told = [text for text in low.warnings if "constants, which a caller cannot feed" in text]
    assert len(told) == (not options)
    assert low.model is not None
    kinds = {t.name: t.data_type for t in low.model.graph.initializer}
    assert list(kinds.values()) == [onnx.TensorProto.FLOAT16]
    assert "w" not in _inputs(low)
    assert 0 < np.abs(_outputs(low, x=X) - X @ W).max() < 40 * EPS


@pytest.mark.parametrize("ir_version", [3, 8])
def test_those_of_a_file_that_becomes_openvinos_are_told(
    ir_version: int, tmp_path: Path
) -> None:
    onnx.save(_model(ir_version), tmp_path / "net.onnx")
    low = finecast.convert(tmp_path / "net.onnx", tmp_path / "low.xml", "all:bf16")
    told = "1 weight is an input, too: OpenVINO reads them as constants, which a caller cannot"
    assert any(told in text for text in low.warnings)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_plan_says_which_it_was_made_for(frozen: bool) -> None:
    made = _low(8, freeze_inputs=frozen)
    plan = Plan.from_json(made.plan.to_json())
    assert plan.frozen is frozen
    again = finecast.apply(plan, _model(8), engine="onnxruntime")
    assert again.model == made.model


def test_models_of_other_libraries_have_no_such_weights() -> None:
    with pytest.raises(UsageError, match="freeze_inputs=True is for ONNX models alone"):
        finecast.load(chain(), freeze_inputs=True)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_without_such_weights_is_not_frozen_in_silence(frozen: bool) -> None:
    model = _model(8)
    del model.graph.input[1]
    option = "--freeze-inputs" if frozen else "--no-freeze-inputs"
    with pytest.raises(UsageError) as raised:
        finecast.load(model, freeze_inputs=frozen)
    assert raised.value.what == f"{option}: the model has no weights that are inputs, too"
