"""Keras files with code or classes of their own, in TensorFlow and in OpenVINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import finecast
from finecast.errors import FinecastError, ModelError
from plugins.tensorflow.tests.models import tf

# numpy 2 says so of TensorFlow 2.21's own tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
layers: Any = tf.keras.layers
BOTH = pytest.mark.parametrize("out", ["low", "low.xml"])


class Own(layers.Layer):
    """A layer that is not registered with Keras."""

    def call(self, x: Any) -> Any:
        return 2 * x


class Failing(layers.Layer):
    """A layer whose code fails when it is traced."""

    def call(self, x: Any) -> Any:
        raise LookupError("traced")

    def compute_output_spec(self, x: Any) -> Any:
        return tf.keras.KerasTensor(x.shape, x.dtype)


def through(layer: Any) -> Any:
    x = tf.keras.Input((4,), name="x")
    return tf.keras.Model(x, layers.Dense(2)(layer(x)))


@BOTH
def test_code_in_a_file_runs_when_it_is_trusted(out: str, tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    through(layers.Lambda(lambda x: 2 * x)).save(path)
    with pytest.raises(ModelError, match=r"code of its own, .*m\.keras.*trust"):
        finecast.load(path, output=tmp_path / out)
    model = finecast.load(path, trust=True, output=tmp_path / out)
    finecast.convert(model, tmp_path / out, "all:bf16")
    assert (tmp_path / out).exists()


@BOTH
def test_a_file_that_is_cut_off(out: str, tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    through(layers.Dense(3)).save(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"not a \.keras file, or a truncated one.*save it"):
        finecast.convert(path, tmp_path / out, "all:bf16")


@BOTH
def test_a_class_that_is_not_known_is_named(out: str, tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    through(Own()).save(path)
    told = r"Keras cannot read the model: Could not locate class 'Own'.*give finecast"
    with pytest.raises(ModelError, match=told) as caught:
        finecast.convert(path, tmp_path / out, "all:bf16")
    assert "\n" not in str(caught.value)


@BOTH
def test_a_layer_that_cannot_be_traced(out: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Keras.* model: .*traced.*model\.predict") as caught:
        finecast.convert(through(Failing()), tmp_path / out, "all:bf16")
    assert "\n" not in str(caught.value)


@BOTH
def test_a_name_that_tensorflow_does_not_take(out: str, tmp_path: Path) -> None:
    x = tf.keras.Input((4,), name="an input")
    model = tf.keras.Model(x, layers.Dense(2)(x), name="my model")
    with pytest.raises(FinecastError, match=r"model: 'my model' is not a valid"):
        finecast.convert(model, tmp_path / out, "all:bf16")
    # Keras leaves the name as a scope of all that follows, if it is left to find this out.
    assert layers.Dense(2, name="next").name == "next"
    named = tf.keras.Sequential([tf.keras.Input((4,), name="an input"), layers.Dense(2)])
    named.compile(optimizer=tf.keras.optimizers.SGD(momentum=0.9), loss="mse")
    named.optimizer.build(named.trainable_variables)
