"""Intel Neural Compressor's post-training quantization of Keras models and SavedModels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.engines import installed, probe
from finecast.engines.base import Capability
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast_neural_compressor import (
    AccuracyCriterion,
    Metric,
    MixedPrecisionConfig,
    PostTrainingQuantConfig,
    TuningCriterion,
    load,
    mix_precision,
    quantization,
)
from plugins.tensorflow.tests.models import Model, tf

pytestmark = pytest.mark.skipif(not installed("openvino"), reason="needs OpenVINO")

FP32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}
NO_BF16: dict[str, Any] = {"excluded_precisions": ["bf16"]}
X = np.random.default_rng(3).normal(size=(96, 8, 8, 1)).astype(np.float32)


@pytest.fixture(autouse=True)
def _integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO has products on integers, whatever this CPU has."""
    monkeypatch.setenv("FORCE_INT8", "1")
    monkeypatch.setenv("FORCE_BF16", "1")
    known = {Format.INT8: Capability(runs=True, speed=2.0)}
    monkeypatch.setitem(probe._cache, ("openvino", "CPU"), known)


@pytest.fixture(scope="module")
def net() -> Any:
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu", padding="same"),
            layers.Conv2D(16, 3, activation="relu", padding="same"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def batches(size: int = 32) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], np.zeros(size)) for i in range(0, len(X), size)]


def closeness(net: Any) -> Callable[[Any], float]:
    want = np.asarray(net(X))

    def close(model: Any) -> float:
        got = np.asarray(model(X))
        return 1 - float(np.linalg.norm(got - want) / np.linalg.norm(want))

    return close


def products(result: Any) -> dict[str, bool]:
    """Whether each product's weights are codes, by its name."""
    found: dict[str, bool] = {}
    for op in result.native.get_ordered_ops():
        if op.get_type_name() in ("Convolution", "MatMul"):
            source = op.input_value(1).get_node()
            while source.get_input_size():
                source = source.input_value(0).get_node()
            found[op.get_friendly_name()] = source.get_element_type().get_type_name() == "i8"
    return found


def test_a_keras_model_is_quantized(net: Any, tmp_path: Path) -> None:
    found = quantization.fit(net, PostTrainingQuantConfig(**NO_BF16), batches())
    assert [*products(found).values()] == [True] * 3
    assert found.products == found.lowered == 3
    close = closeness(net)
    assert 0.8 < close(found.model) < 1
    for path in (tmp_path / "saved", tmp_path / "low.xml"):
        found.save(path)
        found.save(path)  # what is there is replaced
        again = load(path)
        assert products(again) == products(found)
        np.testing.assert_allclose(again.model(X), found.model(X), rtol=1e-5)


def test_a_saved_model_is_called_by_name(mlp: Model) -> None:
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    found = quantization.fit(str(mlp.path), PostTrainingQuantConfig(**NO_BF16), [x, x])
    want = np.asarray(mlp.serve({"x": x})["scores"])
    assert found.products == 2
    for got in (found.model(x), found.model({"x": x}), found.model(x=x)):
        np.testing.assert_allclose(got, want, atol=0.2)


def test_op_dicts_are_of_the_layers(net: Any) -> None:
    names = [*products(quantization.fit(net, PostTrainingQuantConfig(**NO_BF16), batches()))]
    conf = PostTrainingQuantConfig(op_name_dict={names[1]: FP32}, **NO_BF16)
    found = products(quantization.fit(net, conf, batches()))
    assert [found[name] for name in names] == [True, False, True]
    conf = PostTrainingQuantConfig(op_type_dict={"Conv2D": FP32}, **NO_BF16)
    assert [*products(quantization.fit(net, conf, batches())).values()] == [False, False, True]
    with pytest.raises(UsageError, match=r"unknown op 'Matmul'.*MatMul"):
        quantization.fit(
            net, PostTrainingQuantConfig(op_type_dict={"Matmul": FP32}), batches()
        )


def test_the_accuracy_is_kept(net: Any) -> None:
    """By the size, which is counted and not timed."""
    conf = PostTrainingQuantConfig(
        tuning_criterion=TuningCriterion(objective="modelsize"),
        accuracy_criterion=AccuracyCriterion(tolerable_loss=0.3),
        **NO_BF16,
    )
    close = closeness(net)
    found = quantization.fit(net, conf, batches(), eval_func=close)
    assert found is not None
    assert close(found.model) >= 0.7
    assert any(products(found).values())
    labels = np.asarray(net(X)).argmax(1)
    loader = [(X[i : i + 32], labels[i : i + 32]) for i in range(0, len(X), 32)]
    found = quantization.fit(net, conf, eval_dataloader=loader, eval_metric=Metric("topk"))
    assert found is not None


def test_precisions_of_mixed_precision(net: Any) -> None:
    conf = MixedPrecisionConfig(precisions="int8")
    found = mix_precision.fit(net, conf, eval_dataloader=batches())
    assert [*products(found).values()] == [True] * 3


def test_what_cannot_be_followed_raises(net: Any) -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"device": "gpu"}, "run on the CPU here"),
        ({"inputs": "z"}, "unknown input or output 'z'"),
        ({"accuracy_criterion": AccuracyCriterion(tolerable_loss=2)}, "0.02 for 2%"),
    )
    for settings, says in refused:
        with pytest.raises(UsageError, match=says):
            quantization.fit(net, PostTrainingQuantConfig(**settings), batches())
