"""Values of Keras models scaled into fp16's range, from a model to its SavedModel and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finecast import api
from finecast.numbers.formats import Format
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from finecast_tensorflow import frontend
from finecast_tensorflow.frontend.library import tf
from finecast_tensorflow.native import Function, take
from plugins.tensorflow.tests.overflowing_keras import MODELS, data, keras


@pytest.fixture(scope="module", params=["gemma", pytest.param("t5", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Any:
    keras.utils.set_random_seed(0)
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("net") / "low"


@pytest.fixture(scope="module")
def done(model: Any, path: Path) -> Result:
    return api.convert(model, path, policy="all:fp16", data=data(), force=True)


def off(got: Any, exact: Any) -> float:
    found, wanted = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    if not np.isfinite(found).all():
        return np.inf
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def test_a_model_computes_in_fp16_what_would_overflow(
    model: Any, path: Path, done: Result
) -> None:
    assert done.plan is not None
    products = [d for d in done.plan.decisions if d.op in ("matmul", "einsum")]
    assert {d.format for d in products} == {Format.FP16}
    (gain,) = done.gains
    assert gain.error_without == np.inf
    assert gain.error_with < 0.01
    served = tf.saved_model.load(str(path)).signatures["serving_default"]
    (got,) = served(**{k: tf.constant(a) for k, a in data().items()}).values()
    assert off(got, model(data()["ids"])) < 0.01


def test_in_fp32_no_bit_changes(model: Any, done: Result) -> None:
    assert done.plan is not None
    own = take(model)
    scaled = frontend.prepare(own.file, Policy()).adjusted(done.plan.adjustments)
    got = Function(frozen=scaled.file.model)(data()["ids"])
    np.testing.assert_array_equal(got, Function(frozen=own.file.model)(data()["ids"]))
