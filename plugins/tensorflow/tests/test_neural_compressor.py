from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast.engines.probe import Speed
from finecast.errors import UsageError
from finecast_neural_compressor import MixedPrecisionConfig, load, mix_precision
from finecast_tensorflow.frontend import loading
from plugins.tensorflow.tests.models import Model, served, tf, types_of

X = np.random.default_rng(3).normal(size=(32, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 pays here, whatever this machine is."""
    from finecast.native import engine_subject

    monkeypatch.setattr(
        engine_subject, "speed_of", lambda *_: Speed(gains=True, text="stated")
    )


def test_a_saved_model_is_converted_and_saved(mlp: Model, tmp_path: Path) -> None:
    result = mix_precision.fit(str(mlp.path), MixedPrecisionConfig())
    result.save(tmp_path / "low")
    assert "bfloat16" in types_of(tmp_path / "low").values()
    np.testing.assert_allclose(
        served(tmp_path / "low", {"x": X})["scores"], mlp.serve({"x": X})["scores"], atol=0.02
    )


def test_what_was_saved_is_loaded(mlp: Model, tmp_path: Path) -> None:
    result = mix_precision.fit(str(mlp.path), MixedPrecisionConfig())
    result.save(tmp_path / "low")
    loaded = load(tmp_path / "low", mlp.path)
    assert (loaded.lowered, loaded.products) == (result.lowered, result.products)
    np.testing.assert_array_equal(loaded.model(X), result.model(X))
    loaded.save(tmp_path / "again")
    assert loading.load(tmp_path / "again").notes["policy"]


def test_a_frozen_graph_takes_its_ports_from_the_settings(mlp: Model, tmp_path: Path) -> None:
    from finecast_tensorflow.frontend.loading import load

    frozen = load(mlp.path)
    (tmp_path / "frozen.pb").write_bytes(frozen.graph.SerializeToString())
    end = frozen.outputs[0].tensor.partition(":")[0]
    settings = MixedPrecisionConfig(inputs=["x"], outputs=[end])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = mix_precision.fit(str(tmp_path / "frozen.pb"), settings)
    assert not [w for w in told if "without effect" in str(w.message)]
    result.save(tmp_path / "low")
    np.testing.assert_allclose(
        served(tmp_path / "low", {"x": X})[end], mlp.serve({"x": X})["scores"], atol=0.02
    )
    wrong = MixedPrecisionConfig(outputs=["no_such_node"])
    with pytest.raises(UsageError, match="no tensor 'no_such_node'"):
        mix_precision.fit(str(tmp_path / "frozen.pb"), wrong)


def test_a_keras_model_keeps_its_accuracy(tmp_path: Path) -> None:
    tf.keras.utils.set_random_seed(0)
    net = tf.keras.Sequential([tf.keras.Input((16,)), tf.keras.layers.Dense(8)])
    labels = np.asarray(net(X)).argmax(axis=1)

    def top1(model: Any) -> float:
        return float((np.asarray(model(X)).argmax(axis=1) == labels).mean())

    result = mix_precision.fit(net, eval_func=top1)
    assert result is not None
    assert top1(result.model) >= 0.99
    result.save(str(tmp_path / "low"))
    result.save(str(tmp_path / "low"))  # what is there is replaced
    assert "bfloat16" in types_of(tmp_path / "low").values()


def test_batches_and_a_metric_do_as_well(mlp: Model) -> None:
    class Mean:
        def reset(self) -> None:
            self.seen: list[float] = []

        def update(self, predictions: Any, labels: Any) -> None:
            del labels
            self.seen.append(float(np.mean(predictions)))

        def result(self) -> float:
            return float(np.mean(self.seen))

    batches = [(X[i : i + 8], None) for i in range(0, 32, 8)]
    result = mix_precision.fit(str(mlp.path), eval_dataloader=batches, eval_metric=Mean())
    assert result is not None
    assert result.products == 2


def test_an_op_kept_by_name_or_by_type_stays_fp32(mlp: Model, tmp_path: Path) -> None:
    fp32 = {"weight": {"dtype": ["fp32"]}, "activation": {"dtype": ["fp32"]}}
    result = mix_precision.fit(
        str(mlp.path), MixedPrecisionConfig(op_type_dict={"Softmax": fp32})
    )
    result.save(tmp_path / "low")
    kinds = {n.split("/")[-1]: t for n, t in types_of(tmp_path / "low").items()}
    assert kinds["Softmax"] == "float32"
    assert kinds["MatMul"] == "bfloat16"
    with pytest.raises(UsageError, match="'Sofmax'"):
        mix_precision.fit(str(mlp.path), MixedPrecisionConfig(op_type_dict={"Sofmax": fp32}))


def test_itex_says_what_replaced_it_and_does_the_cpus_part(mlp: Model) -> None:
    with pytest.warns(UserWarning, match=r"itex.*archived.*TensorFlow's own"):
        result = mix_precision.fit(str(mlp.path), MixedPrecisionConfig(backend="itex"))
    assert result.products == 2
    with pytest.raises(UsageError, match=r"run on the CPU here.*'gpu'"):
        mix_precision.fit(str(mlp.path), MixedPrecisionConfig(device="gpu"))


def test_a_checkpoint_is_told_the_way() -> None:
    with pytest.raises(UsageError, match="give the Keras model, or a SavedModel of it"):
        mix_precision.fit("weights.h5")
