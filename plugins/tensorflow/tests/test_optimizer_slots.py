"""SavedModels of Keras 2, which hold the state of their optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import finecast
from plugins.tensorflow.tests.models import served, tf


def with_momentum(path: Path) -> None:
    """A SavedModel with two slots of Adam for its variable, as compiled models of Keras 2."""
    module = tf.Module()
    module.weight = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
    module.optimizer = tf.compat.v1.train.AdamOptimizer()
    module.optimizer.apply_gradients([(tf.ones([4, 2]), module.weight)])
    rows = tf.TensorSpec([None, 4], tf.float32, name="x")
    module.call = tf.function(
        lambda x: {"y": tf.matmul(x, module.weight)}, input_signature=[rows]
    )
    tf.saved_model.save(module, str(path), signatures=module.call)


def test_slots_are_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with_momentum(tmp_path / "m")
    before = (tmp_path / "m" / "saved_model.pb").read_bytes()
    with pytest.raises(AttributeError, match="add_slot"):
        tf.saved_model.load(str(tmp_path / "m"))  # what Keras 3 left of it

    finecast.convert(tmp_path / "m", tmp_path / "low", "none")

    assert "checkpoint" not in capfd.readouterr().err  # of values that nothing takes
    assert (tmp_path / "m" / "saved_model.pb").read_bytes() == before
    x = np.eye(4, dtype=np.float32)
    weight = np.arange(8).reshape(4, 2) - 1e-3  # Adam's first step is its learning rate
    np.testing.assert_allclose(served(tmp_path / "low", {"x": x})["y"], weight, atol=1e-5)
