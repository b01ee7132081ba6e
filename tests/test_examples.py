"""The committed digits example is what its README says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from tests import decoder

DIGITS = Path(__file__).parent.parent / "examples" / "digits"
MODEL = DIGITS / "digits.onnx"
RECORDED_TOP1 = 0.9883  # examples/digits/README.md; written by make_digits.py
# FP32 kernels differ by their order of additions: allow one image of 600 to tip over.
TOP1_SLACK = 1.5 / 600
PIXEL_MAX, PIXEL_MEAN, PIXEL_STD = 16.0, 0.3053, 0.3760  # of make_digits.py

Arrays = dict[str, NDArray[np.generic]]


def read(name: str) -> Arrays:
    with np.load(DIGITS / name) as data:
        return {key: data[key] for key in data.files}


def pixels(image: NDArray[np.generic]) -> NDArray[np.float64]:
    """Undo the normalisation."""
    return (image.astype(np.float64) * PIXEL_STD + PIXEL_MEAN) * PIXEL_MAX


def test_model_is_valid_fp32_with_a_dynamic_batch() -> None:
    model = onnx.load(MODEL)
    onnx.checker.check_model(model, full_check=True)
    (image,), (logits,) = model.graph.input, model.graph.output
    assert (image.name, logits.name) == ("image", "logits")
    shape = image.type.tensor_type.shape.dim
    assert shape[0].dim_param == "batch"
    assert [dim.dim_value for dim in shape[1:]] == [1, 8, 8]
    assert {t.data_type for t in model.graph.initializer if t.dims} <= {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT64,
    }


def test_model_stays_small_enough_to_commit() -> None:
    assert MODEL.stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("name", "count", "keys"),
    [("digits_eval.npz", 600, {"image", "label"}), ("digits_calib.npz", 64, {"image"})],
)
def test_data_has_the_declared_shapes(name: str, count: int, keys: set[str]) -> None:
    data = read(name)
    assert set(data) == keys
    assert data["image"].shape == (count, 1, 8, 8)
    assert data["image"].dtype == np.float32
    if "label" in data:
        assert data["label"].shape == (count,)
        assert data["label"].dtype == np.int64


def test_model_reaches_its_recorded_accuracy() -> None:
    data = read("digits_eval.npz")
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"image": data["image"]})
    top1 = float(np.mean(np.argmax(np.asarray(logits), axis=1) == data["label"]))
    assert top1 == pytest.approx(RECORDED_TOP1, abs=TOP1_SLACK)


def test_images_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    source = {
        (image.astype(np.uint8).tobytes(), int(label))
        for image, label in zip(images, labels, strict=True)
    }
    data = read("digits_eval.npz")
    restored = np.rint(pixels(data["image"])).astype(np.uint8)
    assert all(
        (image.tobytes(), int(label)) in source
        for image, label in zip(restored, data["label"], strict=True)
    )


def test_calibration_images_are_not_evaluated_on() -> None:
    evaluated = {image.tobytes() for image in read("digits_eval.npz")["image"]}
    assert not any(image.tobytes() in evaluated for image in read("digits_calib.npz")["image"])


def decoded(model: str, feeds: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(
        decoder.folder() / model, providers=["CPUExecutionProvider"]
    )
    names = [one.name for one in session.get_outputs()]
    given = {
        one.name: np.zeros(
            (len(feeds["input_ids"]), one.shape[1], 0, one.shape[3]), np.float32
        )
        for one in session.get_inputs()[1:]
    }
    return dict(zip(names, session.run(None, given | feeds), strict=True))


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    with np.load(decoder.folder() / "texts.npz") as data:
        return {name: data[name][:3] for name in data.files}


def test_the_exported_decoder_is_the_trained_one(texts: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    made = decoder.example()
    options = made.parse([*decoder.TINY.split(), "--steps", "2"])
    data = made.corpus(None)[: int(len(made.corpus(None)) * 0.9)].astype(np.int64)
    torch.manual_seed(options.seed)
    net = made.Decoder(options)
    made.train(net, torch.from_numpy(data), options)  # deterministic on one machine
    with torch.no_grad():
        wanted = net(torch.from_numpy(texts["input_ids"])).numpy()
    got = decoded("decoder.onnx", {"input_ids": texts["input_ids"]})["logits"]
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.array_equal(texts["input_ids"][:, 1:], texts["label"][:, :-1])


def test_a_decoder_goes_on_from_its_cache(texts: dict[str, Any]) -> None:
    ids = texts["input_ids"]
    whole = decoded("decoder.onnx", {"input_ids": ids})
    first = decoded("decoder.onnx", {"input_ids": ids[:, :-1]})
    cache = {n.replace("present", "past"): a for n, a in first.items() if n != "logits"}
    last = decoded("decoder.onnx", {"input_ids": ids[:, -1:], **cache})
    np.testing.assert_allclose(last["logits"], whole["logits"][:, -1:], atol=1e-5)
    np.testing.assert_allclose(last["present_1_key"], whole["present_1_key"], atol=1e-5)


def test_planted_outliers_change_no_bit_of_the_function(texts: dict[str, Any]) -> None:
    feeds = {"input_ids": texts["input_ids"]}
    plain, planted = (decoded(name, feeds) for name in ("decoder.onnx", "planted.onnx"))
    assert all(np.array_equal(planted[name], array) for name, array in plain.items())
    weights = onnx.load(decoder.folder() / "planted.onnx").graph.initializer
    (scales,) = (numpy_helper.to_array(w) for w in weights if w.name == "layer0_norm1")
    assert np.sort(scales)[-3:].min() > 50 * np.median(scales)
