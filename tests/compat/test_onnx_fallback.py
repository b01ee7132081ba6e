from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast.compat.neural_compressor import (
    AccuracyCriterion,
    MixedPrecisionConfig,
    TuningCriterion,
    mix_precision,
)
from finecast.engines import get_engine
from finecast.errors import EngineError, UsageError
from finecast.formats import Format

_FP32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_BF16", "1")


def model() -> onnx.ModelProto:
    """A sum of a harmless product and one whose weights cancel: bf16 loses the second."""
    rng = np.random.default_rng(0)
    harmless = rng.normal(size=(8, 4)).astype(np.float32) / 8
    large = 1000 * rng.normal(size=(4, 4)).astype(np.float32)
    # What x @ large gives and x @ -large takes away, but for a small part.
    small = 0.1 * rng.normal(size=(4, 4)).astype(np.float32)
    cancelling = np.concatenate((large, small - large)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "harmless"], ["a"], name="harmless"),
            helper.make_node("Concat", ["a", "a"], ["aa"], name="twice", axis=1),
            helper.make_node("MatMul", ["aa", "cancelling"], ["b"], name="cancelling"),
            helper.make_node("Relu", ["b"], ["y"], name="relu"),
        ],
        "cancelling",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [
            numpy_helper.from_array(harmless, "harmless"),
            numpy_helper.from_array(cancelling, "cancelling"),
        ],
    )
    opset = helper.make_opsetid("", 17)
    return helper.make_model(graph, opset_imports=[opset], ir_version=8)


def data() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)


def closeness(candidate: onnx.ModelProto) -> float:
    """1 minus the relative error against fp32, which numpy computes."""
    weights = {t.name: numpy_helper.to_array(t) for t in model().graph.initializer}
    a = data() @ weights["harmless"]
    want = np.maximum(np.concatenate((a, a), 1) @ weights["cancelling"], 0)
    session = get_engine("openvino").load(candidate.SerializeToString())
    (got,) = session.run({"x": data()}).values()
    return 1 - float(np.linalg.norm(got - want) / np.linalg.norm(want))


def formats(candidate: onnx.ModelProto) -> dict[str, int]:
    """Element type of the second input of each product, by node."""
    inferred = onnx.shape_inference.infer_shapes(candidate, strict_mode=True)
    types = {t.name: t.data_type for t in inferred.graph.initializer}
    types |= {v.name: v.type.tensor_type.elem_type for v in inferred.graph.value_info}
    return {n.name: types[n.input[1]] for n in candidate.graph.node if n.op_type == "MatMul"}


def test_fallback_by_instance_keeps_the_op_that_cancels() -> None:
    # With both products in bf16 the accuracy is lost, and there is but one type of them.
    kept = {"Concat": _FP32, "Relu": _FP32}
    conf = MixedPrecisionConfig(
        op_type_dict=kept, accuracy_criterion=AccuracyCriterion(tolerable_loss=0.2)
    )
    everything = mix_precision.fit(model(), MixedPrecisionConfig(op_type_dict=kept))
    assert everything is not None
    assert closeness(everything.model) < 0.8
    found = mix_precision.fit(model(), conf, eval_func=closeness)
    assert found is not None
    assert closeness(found.model) >= 0.8
    assert formats(found.model)["harmless"] == TensorProto.BFLOAT16
    assert formats(found.model)["cancelling"] == TensorProto.FLOAT


def test_fallback_by_type_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(), path)
    seen: list[dict[str, int]] = []

    def evaluate(candidate: onnx.ModelProto) -> float:
        seen.append(formats(candidate))
        products = set(formats(candidate).values())
        return 1.0 if products == {TensorProto.FLOAT} else 0.0

    found = mix_precision.fit(str(path), eval_func=evaluate)
    assert found is not None
    # fp32, everything low, Concat reverted, MatMul reverted: types in alphabetical order.
    assert len(seen) == 4
    assert set(formats(found.model).values()) == {TensorProto.FLOAT}
    assert found.lowered > 0
    found.save(tmp_path / "low.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "low.onnx"), full_check=True)
    found.save(f"{tmp_path}/path/to/save/")  # as the seed document writes it
    assert [p.name for p in (tmp_path / "path/to/save").iterdir()] == ["best_model.onnx"]
    with pytest.raises(UsageError, match="cannot write"):
        found.save(path / "no folder")


def test_no_trial_passes_gives_none_and_the_trials_are_capped() -> None:
    count = 0

    def evaluate(candidate: onnx.ModelProto) -> float:
        nonlocal count
        count += 1
        return 1.0 if count == 1 else 0.0

    tuning = TuningCriterion(max_trials=3)
    assert mix_precision.fit(model(), MixedPrecisionConfig(tuning_criterion=tuning),
                             eval_func=evaluate) is None  # fmt: skip
    assert count == 1 + 3


def test_a_dataloader_and_a_metric() -> None:
    class Error:
        def reset(self) -> None:
            self.total = 0.0

        def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
            self.total += float(np.abs(predictions - labels).sum())

        def result(self) -> float:
            return self.total

    session = get_engine("openvino").load(model().SerializeToString())
    batches = [(x, session.run({"x": x})["y"]) for x in np.split(data(), 4)]
    lower = AccuracyCriterion(False, "absolute", 1e9)
    conf = MixedPrecisionConfig(accuracy_criterion=lower)
    assert mix_precision.fit(model(), conf, None, batches, Error()) is not None
    with pytest.raises(UsageError, match="needs both"):
        mix_precision.fit(model(), conf, eval_dataloader=batches)


def test_op_dicts_and_ports() -> None:
    by_name = MixedPrecisionConfig(op_name_dict={"cancel.*": _FP32}, inputs=["x"])
    result = mix_precision.fit(model(), by_name)
    assert result is not None
    assert formats(result.model) == {
        "harmless": TensorProto.BFLOAT16,
        "cancelling": TensorProto.FLOAT,
    }
    # A list that has bf16 in it leaves the choice.
    either = {"activation": {"dtype": ["bf16", "fp32"]}}
    result = mix_precision.fit(model(), MixedPrecisionConfig(op_type_dict={"MatMul": either}))
    assert result is not None
    assert set(formats(result.model).values()) == {TensorProto.BFLOAT16}
    with pytest.raises(UsageError, match="no input or output"):
        mix_precision.fit(model(), MixedPrecisionConfig(outputs=["z"]))
    with pytest.raises(UsageError, match="nothing is left"):
        mix_precision.fit(model(), MixedPrecisionConfig(op_name_dict={".*": _FP32}))


def test_the_gate_measures_and_force_bf16_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from finecast.compat.neural_compressor.onnx_subject import OnnxSubject

    def slow(subject: OnnxSubject, low: Format) -> str:
        del subject, low
        return "0.50 of fp32's speed (measured)"

    monkeypatch.setattr(OnnxSubject, "slow", slow)
    assert mix_precision.fit(model()) is not None
    monkeypatch.delenv("FORCE_BF16")
    with pytest.raises(EngineError, match=r"0\.50 of fp32's speed.*FORCE_BF16=1"):
        mix_precision.fit(model())
    with pytest.raises(EngineError, match="use precisions='bf16'"):
        mix_precision.fit(model(), MixedPrecisionConfig(precisions="fp16"))


def test_the_seed_s_second_example_says_what_is_missing_for_onnx() -> None:
    conf = MixedPrecisionConfig(
        backend="onnxrt_cuda_ep",
        device="gpu",
        precisions="fp16",
    )
    if "CUDAExecutionProvider" in pytest.importorskip("onnxruntime").get_available_providers():
        pytest.skip("there is a GPU: the example runs")
    with pytest.raises(EngineError, match="CUDA"):
        mix_precision.fit(model(), conf=conf)


def test_excluded_precisions() -> None:
    both = MixedPrecisionConfig(precisions=["fp16", "bf16"], excluded_precisions=["fp16"])
    assert both.low() is Format.BF16
    with pytest.raises(UsageError, match="leave nothing"):
        mix_precision.fit(model(), MixedPrecisionConfig(excluded_precisions=["bf16"]))
