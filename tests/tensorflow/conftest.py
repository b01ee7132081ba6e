"""TensorFlow's tests: they run where it is installed (make test-tensorflow)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf: Any = pytest.importorskip("tensorflow")

from tests.tensorflow.models import Model, of_function  # noqa: E402


@pytest.fixture
def mlp(tmp_path: Path) -> Model:
    """Two dense layers under a softmax, saved."""
    rng = np.random.default_rng(0)
    first, second = (
        tf.Variable(rng.normal(size=size).astype(np.float32) / 4)
        for size in ((16, 32), (32, 8))
    )
    bias = tf.Variable(np.linspace(-1, 1, 32, dtype=np.float32))

    def call(x: Any) -> dict[str, Any]:
        hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(x, first), bias))
        return {"scores": tf.nn.softmax(tf.matmul(hidden, second))}

    spec = tf.TensorSpec([None, 16], tf.float32, name="x")
    return of_function(tmp_path / "mlp", call, [spec], [first, second, bias])
