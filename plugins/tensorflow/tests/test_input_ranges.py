"""What SavedModels of Keras layers say of their inputs' numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf: Any = pytest.importorskip("tensorflow")

from finecast.data.input_ranges import Normal, Range, Whole, input_ranges  # noqa: E402
from finecast_tensorflow.native import read  # noqa: E402

layers: Any = tf.keras.layers
MEAN, DEVIATION = np.array([10.0, 50.0, 90.0]), np.array([20.0, 30.0, 40.0])


def range_of(net: Sequence[Any], shape: Sequence[int], path: Path) -> Range:
    """What is known of the only input of the layers."""
    tf.keras.Sequential([tf.keras.Input(shape), *net]).export(str(path), verbose=False)
    (found,) = input_ranges(read(path).prepare_once(own=True).graph).values()
    return found


def test_norms_and_constants_say_what_the_input_was(tmp_path: Path) -> None:
    norm = layers.BatchNormalization(epsilon=0)
    norm.build((None, 8, 8, 3))
    norm.set_weights([np.ones(3), np.zeros(3), MEAN, DEVIATION**2])
    constants = layers.Normalization(mean=MEAN, variance=DEVIATION**2)
    for name, layer in {"norm": norm, "constants": constants}.items():
        found = range_of([layer, layers.Conv2D(4, 3)], (8, 8, 3), tmp_path / name)
        assert isinstance(found, Normal)
        np.testing.assert_allclose(found.mean.ravel(), MEAN, rtol=1e-4)
        np.testing.assert_allclose(found.deviation.ravel(), DEVIATION, rtol=1e-4)


def test_a_norm_behind_a_convolution_says_so_too(tmp_path: Path) -> None:
    conv, norm = layers.Conv2D(16, 3), layers.BatchNormalization()
    conv.build((None, 8, 8, 3))
    kernel, bias = conv.get_weights()
    norm.build((None, 6, 6, 16))
    mean = np.einsum("hwco,c->o", kernel, MEAN) + bias
    variance = 40.0**2 * np.square(kernel).sum(axis=(0, 1, 2))
    norm.set_weights([np.ones(16), np.zeros(16), mean, variance])
    found = range_of([conv, norm, layers.ReLU()], (8, 8, 3), tmp_path / "net")
    assert isinstance(found, Normal)
    np.testing.assert_allclose(found.mean.ravel(), MEAN, rtol=1e-2)
    np.testing.assert_allclose(found.deviation.ravel(), 40, rtol=1e-2)


@pytest.mark.parametrize(
    ("layer", "shape", "last"),
    [
        (layers.Rescaling(1 / 255), (8, 8, 3), 255),
        (layers.Rescaling(1 / 127.5, offset=-1), (8, 8, 3), 255),
        (layers.Embedding(77, 8), (8,), 76),
    ],
)
def test_bytes_and_tokens_reach_their_ends(
    layer: Any, shape: Sequence[int], last: int, tmp_path: Path
) -> None:
    after = layers.Dense(3) if len(shape) == 1 else layers.Conv2D(4, 3)
    assert range_of([layer, after], shape, tmp_path / "net") == Whole(last=last)
