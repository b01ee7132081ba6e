"""TensorFlow's tests: they run where it is installed (make test-tensorflow)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf: Any = pytest.importorskip("tensorflow")

from finecast.engines.probe import Speed  # noqa: E402
from finecast.measure.racing import Effort, Race  # noqa: E402
from finecast.native import engine_subject  # noqa: E402
from finecast.native.subject import Built  # noqa: E402
from finecast.numbers.formats import Format  # noqa: E402
from finecast.planning.plan import Plan  # noqa: E402
from plugins.tensorflow.tests.models import Model, of_function  # noqa: E402
from tests.times import race_all  # noqa: E402


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


@pytest.fixture
def bf16_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each low op saves a part of the time, on a machine of any kind."""

    def times(self: Any, built: Mapping[str, Built], workload: object, effort: Effort) -> Race:
        del self, workload, effort

        def seconds(plan: Plan) -> float:
            low = sum(f is not Format.FP32 for f in plan.formats.values())
            return 1e-3 * (1 - 0.5 * low / len(plan.formats))

        return Race.stated(1e-3, {name: seconds(one.plan) for name, one in built.items()})

    monkeypatch.setattr(engine_subject.EngineSubject, "times", times)
    # Predicted times are those of this machine's kernels: no plan is left out for them.
    race_all(monkeypatch)
    monkeypatch.setattr(
        engine_subject, "speed_of", lambda *_: Speed(gains=True, text="stated")
    )
