"""Keras models of text: integers in, masks of padding, and loops over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.cli import main
from finecast.engines import get_engine
from finecast.errors import ExitCode
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from plugins.tensorflow.tests.models import served, tf, top1

# numpy 2 says so of TensorFlow 2.21's own tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
layers: Any = tf.keras.layers
WORDS, LENGTH, TOPICS = 64, 16, 4


def sentences(count: int) -> tuple[Any, Any]:
    """Words of all topics, most of them of one: the label. Behind the end there is padding."""
    draw = np.random.default_rng(0)
    label = draw.integers(0, TOPICS, count)
    own = 1 + 15 * label[:, None] + draw.integers(0, 15, (count, LENGTH))
    other = 1 + draw.integers(0, WORDS - 4, (count, LENGTH))
    ids = np.where(draw.random((count, LENGTH)) < 0.5, own, other)
    ends = draw.integers(LENGTH // 2, LENGTH + 1, count)
    ids[np.arange(LENGTH) >= ends[:, None]] = 0
    return ids.astype(np.int32), label


def embedded() -> tuple[Any, Any]:
    """The input, and a vector for each word, with the mask of what is none."""
    ids = tf.keras.Input((None,), dtype="int32", name="ids")
    return ids, layers.Embedding(WORDS, 32, mask_zero=True)(ids)


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block of attention and a dense one, trained, exported, with what it was not shown."""
    folder = tmp_path_factory.mktemp("text")
    ids, label = sentences(900)
    tf.keras.utils.set_random_seed(0)
    given, x = embedded()
    x = layers.LayerNormalization()(layers.Add()([x, layers.MultiHeadAttention(2, 16)(x, x)]))
    hidden = layers.Dense(32)(layers.Dense(64, activation="gelu")(x))
    x = layers.LayerNormalization()(layers.Add()([x, hidden]))
    shares = layers.Dense(TOPICS, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    net = tf.keras.Model(given, shares)
    net.compile(tf.keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    net.fit(ids[:700], label[:700], epochs=3, batch_size=50, verbose=0)
    net.export(folder / "model", verbose=False)
    np.savez(folder / "data.npz", ids=ids[700:], label=label[700:])
    return folder


@pytest.mark.usefixtures("bf16_pays")
@pytest.mark.parametrize("output", ["tuned/", "tuned.xml"])
def test_a_tuned_text_model_is_served_and_keeps_its_accuracy(
    output: str, transformer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By TensorFlow, and by OpenVINO."""
    model, data = transformer / "model", transformer / "data.npz"
    given = ["tune", str(model), "-o", f"{tmp_path}/{output}", "--data", str(data)]
    assert main([*given, "--metric", "top1", "--json"]) == ExitCode.DONE
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "improved"
    before = top1(model, data)
    assert before > 0.6  # of four topics
    low = tmp_path / output.removesuffix("/")
    after = top1(low, data) if low.is_dir() else in_openvino(low, data)
    assert after >= before * 0.99
    assert said["baseline"]["metric"] == pytest.approx(before, abs=0.01)
    assert said["tuned"]["metric"] == pytest.approx(after, abs=0.01)
    kind = ".saved_model" if low.is_dir() else ""
    assert Plan.load(low.with_name(f"{low.name}{kind}.plan.json")).lowers


def in_openvino(path: Path, data: Path) -> float:
    session = get_engine("openvino").load(path)
    with np.load(data) as arrays:
        ids, label = arrays["ids"], arrays["label"]
    (scores,) = session.run({session.inputs[0].name: ids}).values()
    return float((scores.astype(np.float32).argmax(axis=1) == label).mean())


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_loops_over_time_compute_low(kind: str, tmp_path: Path) -> None:
    """In TensorFlow and in OpenVINO."""
    tf.keras.utils.set_random_seed(0)
    given, x = embedded()
    scores = layers.Dense(TOPICS)(getattr(layers, kind)(24)(x))
    model = tmp_path / "model"
    tf.keras.Model(given, scores).export(model, verbose=False)
    ids, _ = sentences(8)
    (before,) = served(model, {"ids": ids}).values()
    done = finecast.convert(model, tmp_path / "low", "all:bf16", data={"ids": ids})
    products = [d for d in done.plan.decisions if d.op == "matmul" and "/while/" in d.node]
    assert len(products) == 2
    assert {d.format for d in products} == {Format.BF16}
    done = finecast.convert(model, tmp_path / "low.xml", "all:bf16", data={"ids": ids})
    assert Format.BF16 in done.plan.formats.values()
    session = get_engine("openvino").load(tmp_path / "low.xml")
    (by_openvino,) = session.run({session.inputs[0].name: ids}).values()
    (by_tensorflow,) = served(tmp_path / "low", {"ids": ids}).values()
    for after in (by_tensorflow, by_openvino.astype(np.float32)):
        limit = 16 * Format.BF16.epsilon * np.abs(before).max()
        np.testing.assert_allclose(after, before, atol=limit)
