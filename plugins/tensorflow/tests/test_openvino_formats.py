"""What TensorFlow and Keras save, read by OpenVINO's frontend and written as IR."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.cli import main
from finecast.errors import ModelError, UsageError
from finecast.numbers.formats import Format
from tests.full_disk import files_of_at_most
from tests.kernels import skip_without_int8

tf: Any = pytest.importorskip("tensorflow")
keras: Any = pytest.importorskip("keras")
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def net() -> Any:
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1), name="image")
    x = keras.layers.Conv2D(8, 3, activation="relu")(image)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Flatten()(x)
    return keras.Model(image, keras.layers.Dense(10)(x))


X = np.random.default_rng(0).normal(size=(4, 8, 8, 1)).astype(np.float32)


def saved(net: Any, kind: str, folder: Path) -> Path:
    """The net in one of the forms that TensorFlow's world keeps models in."""
    if kind == "SavedModel":
        net.export(folder / "saved", verbose=False)
        return folder / "saved"
    if kind == ".keras":
        net.save(folder / "net.keras")
        return folder / "net.keras"
    net.export(folder / "saved", verbose=False)
    content = tf.lite.TFLiteConverter.from_saved_model(str(folder / "saved")).convert()
    (folder / "net.tflite").write_bytes(content)
    return folder / "net.tflite"


@pytest.mark.parametrize("kind", ["SavedModel", ".keras", ".tflite"])
def test_models_are_converted_from_what_they_are_saved_as(
    net: Any, kind: str, tmp_path: Path
) -> None:
    path, low = saved(net, kind, tmp_path), tmp_path / "low.xml"
    done = finecast.convert(path, low, "all:bf16")
    assert set(done.plan.formats.values()) == {Format.BF16}
    opened = finecast.load(low).reference()
    (port,) = opened.inputs
    (got,) = opened.run({port.name: X}).values()
    wanted = np.asarray(net(X))
    assert np.linalg.norm(got - wanted) < 0.02 * np.linalg.norm(wanted)


def test_text_is_told_from_numbers(tmp_path: Path) -> None:
    class Words(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
        def __call__(self, text: Any) -> Any:
            return tf.strings.length(text)

    tf.saved_model.save(Words(), str(tmp_path / "words"))
    with pytest.raises(ModelError, match=r"SavedModel|text"):
        finecast.inspect(tmp_path / "words")


def test_profile_runs_a_saved_model_beside_what_it_gave(net: Any, tmp_path: Path) -> None:
    saved, low = tmp_path / "saved", tmp_path / "low.xml"
    net.export(str(saved), verbose=False)
    finecast.convert(saved, low, "all:bf16")
    given = ["--runs", "2", "--seconds", "0.01", "--no-memory", "--json"]
    assert main(["profile", str(saved), str(low), *given]) == 0
    assert main(["profile", str(saved), *given]) == 0


@pytest.mark.parametrize("out", ["low", "low.xml"])
def test_a_file_that_cannot_be_written(net: Any, out: str, tmp_path: Path) -> None:
    path, folder = saved(net, ".keras", tmp_path), tmp_path / "out"
    folder.mkdir()
    model = finecast.load(path, output=folder / out)
    with (
        files_of_at_most(1000),
        pytest.raises(UsageError, match=r"cannot write the (model|output): \w+"),
    ):
        finecast.convert(model, folder / out, "all:bf16", force=True)
    assert not list(folder.iterdir())


def test_profile_runs_a_keras_file_in_tensorflow(
    net: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, low = saved(net, ".keras", tmp_path), tmp_path / "low"
    finecast.convert(path, low, "all:bf16")
    given = ["--runs", "2", "--seconds", "0.01", "--no-memory", "--json"]
    assert main(["profile", str(path), str(low), *given]) == 0
    assert json.loads(capsys.readouterr().out)["engine"] == "tensorflow:CPU"


@pytest.mark.parametrize("engine", ["tensorflow", "openvino"])
def test_profile_runs_code_in_a_keras_file_when_it_is_trusted(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "code.keras"
    x = tf.keras.Input((4,), name="x")
    tf.keras.Model(x, tf.keras.layers.Lambda(lambda v: 2 * v)(x)).save(path)
    given = ["profile", str(path), "--runs", "2", "--seconds", "0", "--json"]
    assert main([*given, "--engine", engine]) != 0
    assert "pass --trust" in capsys.readouterr().err
    assert main([*given, "--engine", engine, "--trust"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["models"]
    assert row["model"] == str(path)
    assert row["memory_bytes"]["peak"] > 0


@pytest.mark.parametrize("kind", ["SavedModel", ".keras", ".tflite"])
def test_they_run_on_integers(net: Any, kind: str, tmp_path: Path) -> None:
    skip_without_int8()
    path, low = saved(net, kind, tmp_path), tmp_path / "low.xml"
    (port,) = finecast.load(path, output=low).reference().inputs
    done = finecast.convert(path, low, "all:int8", data={port.name: X}, engine="openvino")
    kinds = {d.op for d in done.plan.decisions if d.format is Format.INT8}
    assert kinds == {"conv", "matmul"}
    (got,) = finecast.load(low).reference().run({port.name: X}).values()
    wanted = np.asarray(net(X))
    assert 0 < np.linalg.norm(got - wanted) < 0.05 * np.linalg.norm(wanted)
    out, asked = tmp_path / "adjusted.xml", "all:int8+bias"
    adjusted = finecast.convert(path, out, asked, data={port.name: X}, engine="openvino")
    (gain,) = adjusted.gains
    assert gain.operands >= 1
    assert bool(adjusted.plan.adjustments) == gain.gains  # of so few samples, by chance


def test_a_plan_fits_a_model_that_is_read_again(net: Any, tmp_path: Path) -> None:
    """OpenVINO numbers the ops that it makes by a counter of the process."""
    path = saved(net, "SavedModel", tmp_path)
    done = finecast.convert(path, tmp_path / "low.xml", "all:bf16")
    finecast.apply(done.plan, path, tmp_path / "again.xml")
    low, again = ((tmp_path / f"{n}.bin").read_bytes() for n in ("low", "again"))
    assert low == again


def test_what_tensorflow_lite_quantized_is_kept(net: Any, tmp_path: Path) -> None:
    net.export(tmp_path / "saved", verbose=False)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "saved"))
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([x[None]] for x in X)
    path = tmp_path / "net.tflite"
    path.write_bytes(converter.convert())
    done = finecast.convert(path, tmp_path / "low.xml", "all:bf16")
    assert [w for w in done.warnings if "ops came quantized by another tool" in w]
    products = [d for d in done.plan.decisions if d.op in ("conv", "matmul")]
    assert len(products) == 2
    assert {d.format for d in products} == {Format.FP32}


@pytest.mark.parametrize("kind", ["SavedModel", ".keras", ".tflite"])
def test_its_size_is_that_of_the_same_model_as_it_would_be_written(
    net: Any, kind: str, tmp_path: Path
) -> None:
    """Keras's files have their variables twice, which no lower precision is."""
    path, same = saved(net, kind, tmp_path), tmp_path / "same.xml"
    done = finecast.convert(path, same, "none")
    before, after = done.size_bytes
    written = sum(same.with_suffix(s).stat().st_size for s in (".xml", ".bin"))
    assert after == written
    assert before == after


@pytest.mark.parametrize("kind", [".keras", ".tflite"])
def test_letters_of_a_suffix_are_of_any_case(net: Any, kind: str, tmp_path: Path) -> None:
    path = saved(net, kind, tmp_path)
    upper = path.rename(path.with_suffix(kind.upper()))
    outputs = [tmp_path / "low.xml"] + ([tmp_path / "low"] if kind == ".keras" else [])
    for output in outputs:
        done = finecast.convert(upper, output, "all:bf16")
        assert set(done.plan.formats.values()) == {Format.BF16}


def test_a_saved_model_that_finecast_converted_is_not_converted_to_ir(
    net: Any, tmp_path: Path
) -> None:
    low = tmp_path / "low"
    finecast.convert(saved(net, "SavedModel", tmp_path), low, "all:bf16")
    with pytest.raises(ModelError, match="converted by finecast before, to all:bf16"):
        finecast.convert(low, tmp_path / "low.xml", "all:bf16")
    done = finecast.convert(tmp_path / "saved", tmp_path / "own.xml", "all:bf16")
    assert not any("before" in w for w in done.warnings)
