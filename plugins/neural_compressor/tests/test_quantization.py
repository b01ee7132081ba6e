"""Intel Neural Compressor's post-training quantization of ONNX models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from finecast.engines import get_engine, installed
from finecast.engines.base import Capability
from finecast.errors import EngineError, UsageError
from finecast.frontends.onnx.opset import NEWEST_IR
from finecast.numbers.formats import Format
from finecast.rules.policy import Adjust
from finecast.tuning.goal import Goal
from finecast_neural_compressor import (
    AccuracyCriterion,
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
    TuningCriterion,
    config,
    load,
    mix_precision,
    quantization,
)
from tests.kernels import skip_without_int8
from tests.native.drawn import write_drawn
from tests.native.test_int8_attention import SHARED, SHIFTED

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")

# Products that take long enough to gain, and ops around them that are not for integers.
NET = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 64] x) => (float[n, 16] y)
{
  [scale] s = Mul (x, c)
  [one] a = MatMul (s, w0)
  [act] r = Relu (a)
  [two] b = MatMul (r, w1)
  [act1] q = Relu (b)
  [three] d = MatMul (q, w2)
  [soft] y = Softmax (d)
}"""
SHAPES = {"w0": (64, 512), "w1": (512, 512), "w2": (512, 16)}
X = np.random.default_rng(0).standard_normal((256, 64)).astype(np.float32)
NAMES = ["one", "two", "three"]


@pytest.fixture(scope="module", autouse=True)
def _integers() -> None:
    skip_without_int8()


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_INT8", "1")
    monkeypatch.setenv("FORCE_BF16", "1")


def net() -> onnx.ModelProto:
    made = parser.parse_model(NET)
    draw = np.random.default_rng(1)
    made.graph.initializer.append(numpy_helper.from_array(np.float32(0.5).reshape(1), "c"))
    for name, shape in SHAPES.items():
        array = (draw.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def batches(size: int = 64) -> list[tuple[np.ndarray, int]]:
    return [(X[i : i + size], 0) for i in range(0, len(X), size)]


def types(model: onnx.ModelProto) -> dict[str, str]:
    """The type that each product computes in: of its second operand, read through QDQ."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph
    found = {t.name: t.data_type for t in inferred.initializer}
    found |= {v.name: v.type.tensor_type.elem_type for v in inferred.value_info}
    made = {n.output[0]: n for n in model.graph.node}
    labels: dict[int, str] = {
        onnx.TensorProto.FLOAT: "fp32",
        onnx.TensorProto.BFLOAT16: "bf16",
    }

    def of(name: str) -> str:
        node = made.get(name)
        return "int8" if node and node.op_type == "DequantizeLinear" else labels[found[name]]

    return {n.name: of(n.input[1]) for n in model.graph.node if n.op_type == "MatMul"}


def run(model: onnx.ModelProto) -> np.ndarray:
    session = get_engine("openvino").load(model.SerializeToString())
    return session.run({"x": X})["y"].astype(np.float32)


def closeness(model: onnx.ModelProto) -> float:
    want = run(net())
    return 1 - float(np.linalg.norm(run(model) - want) / np.linalg.norm(want))


def fit(conf: PostTrainingQuantConfig | None = None, **given: Any) -> Any:
    given.setdefault("calib_dataloader", batches())
    return quantization.fit(net(), conf or PostTrainingQuantConfig(), **given)


def test_the_defaults_and_their_order_are_inc_s() -> None:
    conf = config.PostTrainingQuantConfig("cpu", "default", "auto", {}, "QDQ")
    assert (conf.approach, conf.calibration_sampling_size) == ("static", [100])
    assert conf.quant_format == "QDQ"
    assert conf.formats == (Format.INT8, Format.BF16)
    assert conf.tuning_criterion == TuningCriterion("basic", None, 0, 100, "performance")


def test_what_is_no_int8_becomes_bf16(tmp_path: Path) -> None:
    found = fit()
    assert types(found.model) == dict.fromkeys(NAMES, "int8")
    assert found.products == 3
    assert found.lowered > 3  # scale and activations in bf16
    assert 0.5 < closeness(found.model) < 1
    found.save(tmp_path / "saved")
    assert types(load(tmp_path / "saved").model) == dict.fromkeys(NAMES, "int8")


def test_an_op_that_does_not_run_in_int8_beside_bf16_is_named(tmp_path: Path) -> None:
    shared = write_drawn(tmp_path / "net.onnx", SHARED, {"w": (64, 64)})
    with pytest.warns(UserWarning, match="gram. keeps bf16: planned in int8, OpenVINO"):
        found = quantization.fit(
            str(shared), PostTrainingQuantConfig(), calib_dataloader=[(SHIFTED, 0)]
        )
    assert found.plan.formats["gram"] is Format.BF16


def test_excluded_precisions() -> None:
    found = fit(PostTrainingQuantConfig(excluded_precisions=["bf16"]))
    assert found.lowered == found.products == 3
    found = fit(PostTrainingQuantConfig(excluded_precisions=["int8"]))
    assert types(found.model) == dict.fromkeys(NAMES, "bf16")


def test_precisions_of_mixed_precision() -> None:
    conf = MixedPrecisionConfig(precisions=["int8", "bf16"])
    found = mix_precision.fit(net(), conf, eval_dataloader=batches())
    assert types(found.model) == dict.fromkeys(NAMES, "int8")
    with pytest.raises(UsageError, match=r"there is no data.*give eval_dataloader"):
        mix_precision.fit(net(), MixedPrecisionConfig(precisions="int8"), closeness)
    with pytest.raises(UsageError, match="fp16 beside int8 is for GPUs"):
        mix_precision.fit(net(), MixedPrecisionConfig(precisions="int8,fp16"), closeness)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"op_name_dict": {"t.*": {"weight": {"dtype": ["fp32"]}}}}, ["int8", "fp32", "fp32"]),
        (
            {"op_name_dict": {"one": {"activation": {"dtype": ["fp32", "bf16"]}}}},
            ["bf16", "int8", "int8"],
        ),
        (
            {
                "op_type_dict": {
                    "MatMul": {
                        "weight": {
                            "dtype": ["int8"],
                            "scheme": ["sym"],
                            "granularity": ["per_tensor", "per_channel"],
                        },
                        "activation": {"dtype": ["uint8"], "algorithm": ["minmax", "kl"]},
                    }
                }
            },
            ["int8", "int8", "int8"],
        ),
        (
            {"recipes": {"first_conv_or_matmul_quantization": False}},
            ["bf16", "int8", "int8"],
        ),
        ({"recipes": {"last_conv_or_matmul_quantization": False}}, ["int8", "int8", "bf16"]),
    ],
)
def test_op_dicts_and_recipes(settings: dict[str, Any], want: list[str]) -> None:
    found = fit(PostTrainingQuantConfig(**settings))
    assert types(found.model) == dict(zip(NAMES, want, strict=True))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"approach": "dynamic"}, 'use approach="static"'),
        ({"approach": "statik"}, "unknown approach"),
        ({"quant_format": "QOperator"}, "QDQ"),
        ({"reduce_range": True}, "8-bit sums overflow"),
        ({"diagnosis": True}, "finecast explain"),
        ({"excluded_precisions": ["int8", "bf16"]}, "nothing is left"),
        ({"excluded_precisions": "bf61"}, "unknown precision"),
        ({"recipes": {"smooth_quantt": True}}, "did you mean smooth_quant"),
        ({"calibration_sampling_size": []}, "leaves no sample"),
        ({"op_name_dict": {"four": {"weight": {"dtype": ["fp32"]}}}}, "unknown op 'four'"),
        (
            {"op_type_dict": {"MatMul": {"weight": {"scheme": ["asym"]}}}},
            "weight scheme 'asym': ops have 'sym' here",
        ),
        (
            {"op_type_dict": {"MatMul": {"activation": {"algorithm": ["kl"]}}}},
            "ops have 'minmax' here.*minmax, percentile and mse .Policy.calibration.",
        ),
        ({"op_type_dict": {"MatMul": {"weight": {"bit": ["4"]}}}}, "unknown setting"),
        ({"device": "gpu", "backend": "onnxrt_dnnl_ep"}, "does not run on device"),
        ({"backend": "ipex"}, "discontinued"),
        ({"inputs": "z"}, "unknown input or output 'z'"),
    ],
)
def test_what_cannot_be_followed_raises(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fit(PostTrainingQuantConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"recipes": {"layer_wise_quant": True}}, "recipe layer_wise_quant"),
        ({"recipes": {"smooth_quant": True}}, "recipe smooth_quant: accuracy is kept by"),
        ({"recipes": {"smooth_quant_args": {"alpha": 0.5}}}, "recipe smooth_quant_args"),
        ({"recipes": {"gemm_to_matmul": False}}, "Gemm runs in int8"),
        ({"approach": "auto"}, "approach: "),
        ({"domain": "nlp"}, "domain: "),
        ({"calibration_sampling_size": [64, 100]}, "64 samples are used"),
        ({"tuning_criterion": TuningCriterion(max_trials=3)}, "without eval_func"),
        ({"outputs": ["y"]}, "all of the model is converted"),
    ],
)
def test_what_has_no_effect_is_said_once(settings: dict[str, Any], says: str) -> None:
    with pytest.warns(UserWarning, match=says) as told:
        fit(PostTrainingQuantConfig(**settings))
    assert len(told) == 1


def test_recipes_that_adjust_operands() -> None:
    asked = {"fast_bias_correction": True}
    assert PostTrainingQuantConfig(recipes=asked).adjusts == (Adjust.BIAS,)
    assert PostTrainingQuantConfig(recipes={"fast_bias_correction": False}).adjusts == ()


def test_calibration_takes_as_many_samples_as_are_asked_for() -> None:
    seen: list[int] = []

    def loader() -> Iterator[tuple[dict[str, np.ndarray], int]]:
        for x, label in batches(32):
            seen.append(len(x))
            yield {"x": x}, label

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return loader()

    conf = PostTrainingQuantConfig(calibration_sampling_size=[50])
    fit(conf, calib_dataloader=Loader())
    assert seen == [32, 32]
    assert fit(calib_dataloader=[X[:64]]) is not None  # inputs alone


def test_what_needs_data_or_another_model_says_so() -> None:
    with pytest.raises(UsageError, match="give calib_dataloader"):
        fit(calib_dataloader=None)
    with pytest.raises(UsageError, match="calib_func"):
        fit(calib_func=print)
    with pytest.raises(UsageError, match="yields nothing"):
        fit(calib_dataloader=[])
    with pytest.raises(UsageError, match="give a PostTrainingQuantConfig"):
        quantization.fit(net(), MixedPrecisionConfig(), batches())
    for other, says in (("model.h5", "give the Keras model"), ("model.pb", "no such file")):
        with pytest.raises(UsageError, match=says):
            quantization.fit(other, PostTrainingQuantConfig(), batches())


def test_formats_that_do_not_gain_are_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FORCE_BF16")

    def slower(engine: object, fmt: Format) -> Capability:
        return Capability(runs=True, speed=0.5 if fmt is Format.BF16 else 2.0)

    monkeypatch.setattr("finecast.engines.probe.probe_one", slower)
    with pytest.warns(UserWarning, match=r"skipped: bf16 runs at x0\.5"):
        found = fit()
    assert found.lowered == found.products == 3
    with pytest.raises(EngineError, match=r"bf16 runs at x0\.5"):
        fit(PostTrainingQuantConfig(excluded_precisions=["int8"]))


def test_an_evaluation_is_of_models_and_its_accuracy_is_kept() -> None:
    seen: list[dict[str, str]] = []

    def evaluate(model: onnx.ModelProto) -> float:
        seen.append(types(model))
        return closeness(model)

    conf = PostTrainingQuantConfig(accuracy_criterion=AccuracyCriterion(tolerable_loss=0.5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = fit(conf, eval_func=evaluate)
    assert seen[0] == dict.fromkeys(NAMES, "fp32")
    if found is None:  # times decide that
        assert any("faster" in str(w.message) for w in told)
        return
    assert types(found.model) in seen[1:]
    assert closeness(found.model) >= 0.5


def test_no_model_where_none_keeps_the_accuracy() -> None:
    seen: list[dict[str, str]] = []

    def evaluate(model: onnx.ModelProto) -> float:
        seen.append(types(model))
        return 1.0 if set(types(model).values()) == {"fp32"} else 0.0

    conf = PostTrainingQuantConfig(tuning_criterion=TuningCriterion(max_trials=2))
    with pytest.warns(UserWarning, match="no quantized model"):
        assert fit(conf, eval_func=evaluate) is None
    assert len(seen) <= 1 + 2


class Closeness:
    """A metric of the outputs, as INC has them."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.scores: list[float] = []

    def update(self, predictions: np.ndarray, labels: np.ndarray) -> None:
        off = np.linalg.norm(predictions.astype(np.float32) - labels)
        self.scores.append(1 - float(off / np.linalg.norm(labels)))

    def result(self) -> float:
        return float(np.mean(self.scores))


@pytest.mark.parametrize("objective", ["modelsize", ["footprint"]])
def test_a_smaller_model_is_found_whatever_its_speed(objective: Any) -> None:
    conf = PostTrainingQuantConfig(
        tuning_criterion=TuningCriterion(objective=objective, timeout=0),
        accuracy_criterion=AccuracyCriterion(tolerable_loss=0.5),
    )
    found = fit(conf, eval_func=closeness)
    assert closeness(found.model) >= 0.5
    assert found.model.ByteSize() < 0.5 * net().ByteSize()
    assert "int8" in types(found.model).values()


def test_a_dataloader_and_a_metric() -> None:
    labels = run(net())
    loader = [(X[i : i + 64], labels[i : i + 64]) for i in range(0, 256, 64)]
    conf = PostTrainingQuantConfig(accuracy_criterion=AccuracyCriterion(tolerable_loss=0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # times decide whether there is one
        found = quantization.fit(net(), conf, eval_dataloader=loader, eval_metric=Closeness())
    if found is not None:
        assert closeness(found.model) >= 0.5
    with pytest.raises(UsageError, match="both eval_dataloader and eval_metric"):
        fit(eval_metric=Closeness())


def test_the_first_that_passes_ends_the_search_unless_there_is_time() -> None:
    criterion = AccuracyCriterion().to_criterion()
    assert not Goal(criterion=criterion, max_trials=100, first_is_enough=True).goes_on
    assert Goal(criterion=criterion, max_trials=100, timeout_s=5).goes_on


def test_a_model_that_openvino_does_not_load_is_quantized_in_onnx_runtime() -> None:
    """INC's own engine: the advice was to try it, and no setting names it."""
    model = net()
    scaler = onnx.helper.make_node("Scaler", ["x"], ["s"], "scale", domain="ai.onnx.ml")
    scaler.attribute.append(onnx.helper.make_attribute("scale", [0.5]))
    scaler.attribute.append(onnx.helper.make_attribute("offset", [0.5]))
    model.graph.node[0].CopyFrom(scaler)
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    done = quantization.fit(model, PostTrainingQuantConfig(), calib_dataloader=[(X[:32], 0)])
    assert done is not None
    assert "QuantizeLinear" in {n.op_type for n in done.model.graph.node}


def test_a_model_of_versions_newer_than_it_needs_is_quantized(tmp_path: Path) -> None:
    model = net()
    model.ir_version = 14
    onnx.save(model, tmp_path / "net.onnx")
    for given in (model, str(tmp_path / "net.onnx")):
        done = quantization.fit(
            given, PostTrainingQuantConfig(), calib_dataloader=[(X[:32], 0)]
        )
        assert done is not None
        assert done.model.ir_version == NEWEST_IR
