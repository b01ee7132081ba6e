from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from finecast.engines import get_engine
from finecast.engines.probe import Speed
from finecast.errors import EngineError, ModelError, UsageError, UserCodeError
from finecast.frontends.onnx import model as onnx_model
from finecast.frontends.onnx import native, stream
from finecast.numbers.formats import Format
from finecast_neural_compressor import (
    AccuracyCriterion,
    MixedPrecisionConfig,
    TuningCriterion,
    load,
    mix_precision,
)

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

    # fp32, everything low, Concat reverted; without any product low nothing would be gained.
    with pytest.warns(UserWarning, match="none of .* trials kept it"):
        assert mix_precision.fit(str(path), eval_func=evaluate) is None
    assert seen[:3] == [formats(model()), *[dict.fromkeys(formats(model()), 16)] * 2]
    assert all(TensorProto.BFLOAT16 in one.values() for one in seen[1:])
    found = mix_precision.fit(str(path))
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
    conf = MixedPrecisionConfig(tuning_criterion=tuning)
    with pytest.warns(UserWarning, match="fp32 has 1, and none of 3 trials kept it, .* 0;"):
        assert mix_precision.fit(model(), conf, eval_func=evaluate) is None
    assert count == 1 + 3


def test_an_evaluation_in_an_engine_without_bf16_is_told_why_it_fails() -> None:
    session = pytest.importorskip("onnxruntime").InferenceSession

    def evaluate(candidate: onnx.ModelProto) -> float:
        session(candidate.SerializeToString(), providers=["CPUExecutionProvider"])
        return 1.0

    with pytest.raises(UserCodeError, match="ONNX Runtime has no kernel for") as caught:
        mix_precision.fit(model(), eval_func=evaluate)
    assert "few kernels of bf16" in caught.value.what
    assert "NOT_IMPLEMENTED" not in str(caught.value)
    assert "OpenVINO" in caught.value.fix
    assert "eval_dataloader" in caught.value.fix


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
    by_name = MixedPrecisionConfig(op_name_dict={"cancel.*": _FP32}, inputs="x")
    with pytest.warns(UserWarning, match="all of the model is converted"):
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
    with pytest.raises(UsageError, match=r"unknown input or output 'z'.*use one of x, y"):
        mix_precision.fit(model(), MixedPrecisionConfig(outputs="y, z"))
    with pytest.raises(UsageError, match="did you mean MatMul"):
        mix_precision.fit(model(), MixedPrecisionConfig(op_type_dict={"Matmul": _FP32}))
    with pytest.raises(UsageError, match="nothing is left"):
        mix_precision.fit(model(), MixedPrecisionConfig(op_name_dict={".*": _FP32}))


def test_the_gate_measures_and_force_bf16_opens_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from finecast_neural_compressor.engine_models import EngineModelGiven

    def slow(model: EngineModelGiven, low: Format) -> Speed:
        del model, low
        return Speed(gains=False, text="0.50 of fp32's speed (measured)")

    monkeypatch.setattr(EngineModelGiven, "speed", slow)
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


def test_a_backend_runs_on_its_devices() -> None:
    for settings in ({"backend": "onnxrt_cuda_ep"}, {"device": "xpu"}):
        with pytest.raises(UsageError, match="does not run on device"):
            mix_precision.fit(model(), MixedPrecisionConfig(**settings))  # type: ignore[arg-type]


def test_external_data_is_kept_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(model(), path, save_as_external_data=True, location="weights", size_threshold=0)
    seen: list[float] = []

    def evaluate(candidate: onnx.ModelProto) -> float:
        seen.append(closeness(candidate))
        return 1.0

    monkeypatch.chdir(Path("/"))
    result = mix_precision.fit(str(path), eval_func=evaluate)
    assert seen[0] > 0.999 > seen[1]  # fp32 and bf16, from bytes without a folder
    result.save(tmp_path / "low.onnx")
    path.with_name("weights").rename(tmp_path / "away")
    stored = onnx.load(tmp_path / "low.onnx")
    assert closeness(stored) == seen[1]
    again = load(tmp_path / "low.onnx")
    assert (again.lowered, again.products) == (result.lowered, 2)
    assert [n.op_type for n in again.nodes()] == [n.op_type for n in result.nodes()]
    assert (again.input(), again.output()) == (["x"], ["y"])
    (tmp_path / "away").rename(tmp_path / "weights")
    with pytest.raises(UsageError, match="would replace"):
        result.save(path)
    with pytest.raises(ModelError, match="give the model's path"):
        mix_precision.fit(onnx.load(path, load_external_data=False))


def test_models_that_fit_no_message_are_saved_beside_their_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if 100 bytes were the most that one message holds.
    monkeypatch.setattr(onnx_model, "EXTERNAL_ABOVE_BYTES", 100)
    monkeypatch.setattr(native, "KEEP_BELOW_BYTES", 0)
    monkeypatch.setattr(stream, "KEEP_BELOW_BYTES", 0)
    path = tmp_path / "model.onnx"
    onnx.save(model(), path, save_as_external_data=True, location="weights", size_threshold=0)
    seen: list[object] = []

    def evaluate(candidate: object) -> float:
        seen.append(candidate)
        assert isinstance(candidate, str)
        get_engine("openvino").load(Path(candidate))
        return 1.0

    result = mix_precision.fit(str(path), eval_func=evaluate)
    assert seen[0] == str(path)
    result.save(tmp_path / "low.onnx")
    assert (tmp_path / "low.onnx.data").exists()
    assert set(formats(onnx.load(tmp_path / "low.onnx")).values()) == {TensorProto.BFLOAT16}
    del result
    gc.collect()
    assert not Path(str(seen[1])).exists()


def test_ops_that_gain_nothing_are_no_success() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"], name="relu")],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    relu = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for evaluate in (None, lambda candidate: 1.0):
        with pytest.raises(ModelError, match="no matrix product or convolution"):
            mix_precision.fit(relu, eval_func=evaluate)
    products = MixedPrecisionConfig(op_type_dict={"MatMul": _FP32})
    with pytest.raises(ModelError, match="no matrix product or convolution"):
        mix_precision.fit(model(), products)


def test_batches_by_name_or_in_order() -> None:
    class Rows:
        def reset(self) -> None:
            self.rows = 0

        def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
            self.rows += len(predictions)

        def result(self) -> float:
            return float(self.rows)

    rows = Rows()
    for batch in ({"x": data()}, data(), (data(),), torch_like(data())):
        assert mix_precision.fit(model(), eval_dataloader=[(batch, 0)], eval_metric=rows)
        assert rows.rows == 64
    with pytest.raises(UsageError, match="a batch has 2 inputs, and the model 1"):
        mix_precision.fit(model(), eval_dataloader=[((1, 2), 0)], eval_metric=rows)


def torch_like(array: np.ndarray) -> object:
    """What numpy reads as an array, as it reads a tensor."""

    class Tensor:
        def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
            return array

    return Tensor()


def test_excluded_precisions() -> None:
    both = MixedPrecisionConfig(precisions=["fp16", "bf16"], excluded_precisions=["fp16"])
    assert both.low() is Format.BF16
    with pytest.raises(UsageError, match="leave nothing"):
        mix_precision.fit(model(), MixedPrecisionConfig(excluded_precisions=["bf16"]))


def test_a_result_prints_on_one_line() -> None:
    """Its model's own form is longer than Python's stack."""
    found = mix_precision.fit(model())
    assert repr(found) == f"<OnnxResult: {found.lowered} ops in reduced precision>"
