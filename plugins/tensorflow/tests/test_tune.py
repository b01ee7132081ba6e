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
from finecast.native.hint import hinted_models
from finecast.native.planning import Judging, make_planner
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from plugins.tensorflow.tests.models import tf, top1, types_of

# numpy 2 says so of TensorFlow 2.21's own tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
layers: Any = tf.keras.layers


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CNN trained on scikit-learn's digits, exported, with the images it was not shown."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    found: Any = load_digits()
    images, labels = (found.images[..., None] / 16).astype(np.float32), found.target
    tf.keras.utils.set_random_seed(0)
    net = tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.8),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, padding="same", activation="gelu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(tf.keras.optimizers.Adam(0.01), loss)
    net.fit(images[:1200], labels[:1200], epochs=8, batch_size=100, verbose=0)
    net.export(folder / "model", verbose=False)
    np.savez(folder / "data.npz", image=images[1200:], label=labels[1200:])
    return folder


@pytest.mark.usefixtures("bf16_pays")
def test_a_tuned_model_is_served_and_keeps_its_accuracy(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data, low = digits / "model", digits / "data.npz", tmp_path / "tuned"
    given = ["tune", str(model), "-o", f"{low}/", "--data", str(data), "--metric", "top1"]
    assert main([*given, "--json"]) == ExitCode.DONE
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "improved"
    before, after = top1(model, data), top1(low, data)
    assert before > 0.8
    assert after >= before * 0.99
    assert said["baseline"]["metric"] == pytest.approx(before, abs=0.005)
    assert said["tuned"]["metric"] == pytest.approx(after, abs=0.005)
    assert "bfloat16" in types_of(low).values()
    plan = Plan.load(tmp_path / "tuned.saved_model.plan.json")
    assert plan.engine == "tensorflow"
    assert plan.lowers
    assert main([*given, "--force"]) == ExitCode.DONE
    assert "tensorflow.saved_model.load" in capsys.readouterr().out


def test_what_is_measured_here_never_gives_a_worse_model(digits: Path, tmp_path: Path) -> None:
    outcome = finecast.tune(
        digits / "model", tmp_path / "tuned", data=digits / "data.npz", metric="top1"
    )
    assert outcome.improved == (tmp_path / "tuned").exists()
    assert outcome.tuned.metric >= outcome.baseline.metric * 0.99
    assert outcome.tuned.latency_s <= outcome.baseline.latency_s


@pytest.mark.usefixtures("bf16_pays")
def test_grapplers_own_choice_stands_beside_the_result(digits: Path) -> None:
    """Where this CPU has what it asks for, products are what it lowers first."""
    opened: Any = finecast.load(digits / "model")
    engine = get_engine("tensorflow")
    policy = finecast.Policy.parse("auto:bf16")
    planner = make_planner(opened.prepare(policy), policy, engine, Judging(measured=True))
    found = list(hinted_models(opened, engine, planner))
    products = {"conv", "matmul"}
    lowered = {d.format for one in found for d in one.plan.decisions if d.op in products}
    assert lowered == ({Format.BF16} if found else set())
    outcome = finecast.tune(
        digits / "model", data=digits / "data.npz", metric="top1", policy=policy
    )
    assert [a.name for a in outcome.baselines] == ["the engine's bf16 hint"] * len(found)


def test_inspect_and_explain_read_it(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = str(digits / "model"), str(digits / "data.npz")
    assert main(["inspect", model, "--data", data, "--json"]) == ExitCode.DONE
    classes = json.loads(capsys.readouterr().out)["classes"]
    conv = next(c for c in classes if c["class"] == "conv")
    # 32 images; 8x8 and 4x4 positions; windows of 3x3 over 1 and 32 channels; 32 results.
    assert conv["flops"] == 2 * 32 * (64 * 32 * 9 + 16 * 32 * 9 * 32)
    decisions = finecast.convert(model, None, "all:bf16").plan.decisions
    node = next(d.node for d in decisions if d.op == "conv")
    assert main(["explain", model, node, "--auto-cast", "all"]) == ExitCode.DONE
    assert node in capsys.readouterr().out
