"""Graphs that draw at random: each run of them here draws the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import finecast
from finecast_tensorflow.engine import TensorFlowEngine
from plugins.tensorflow.tests.models import tf

X = np.random.default_rng(1).normal(size=(48, 16)).astype(np.float32)


class Noisy(tf.Module):  # pyright: ignore[reportUntypedBaseClass]
    def __init__(self) -> None:
        self.w = tf.constant(np.random.default_rng(0).normal(size=(16, 16)).astype("f") / 4)

    @tf.function(input_signature=[tf.TensorSpec([None, 16], tf.float32, name="x")])
    def serve(self, x: Any) -> Any:
        y = tf.matmul(x, self.w)
        shape = tf.shape(y)
        y += tf.random.normal(shape) + tf.random.uniform(shape, -1, 2)
        y += tf.random.truncated_normal(shape)
        y += tf.cast(tf.random.uniform(shape, 0, 5, dtype=tf.int32), tf.float32)
        y = tf.cond(tf.reduce_sum(x) > 0, lambda: y + tf.random.normal(shape), lambda: y)
        return {"y": y, "classes": tf.random.categorical(x, 3)}


def test_draws_are_no_error(tmp_path: Path) -> None:
    module = Noisy()
    tf.saved_model.save(module, tmp_path / "m", signatures=module.serve)
    done = finecast.convert(
        tmp_path / "m",
        tmp_path / "low",
        "all:bf16",
        engine="tensorflow",
        data={"x": X},
        lock=True,
        progress=False,
    )
    assert 0 < done.to_dict()["verified"]["relative_error"] < 0.02
    assert max(finecast.verify(tmp_path / "low").deviations.values()) == 0
    session = TensorFlowEngine().load(tmp_path / "low")
    first, second = session.run({"x": X}), session.run({"x": X})
    np.testing.assert_array_equal(first["y"], second["y"])
    assert first["y"].std() > 1.5
    np.testing.assert_array_equal(first["classes"], second["classes"])
