"""SavedModels on devices that are not here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import finecast
from finecast.cli import main
from finecast.devices.emulation import Emulation, Setting, explicit_casts, setting_of
from finecast.devices.targets import load_target
from finecast.engines.loading import exact_session
from finecast.errors import ExitCode, UsageError
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.numbers.roundmodes import Rounder, Rounding, convert
from finecast.numbers.summation import Order, Summation, orders
from finecast.planning.edits import Use
from finecast.rules.policy import Scope
from finecast_tensorflow import frontend
from finecast_tensorflow.frontend.loading import load
from plugins.tensorflow.tests.models import Model, of_function, served, tf, types_of

X = np.random.default_rng(1).normal(size=(64, 16)).astype(np.float32)
SPEC = tf.TensorSpec([None, 16], tf.float32, name="x")
EVERY = [Format.TF32, Format.BF16, Format.FP16, Format.FP8_E4M3, Format.FP8_E4M3_IEEE,
         Format.FP8_E5M2, Format.FP8_E3M4]  # fmt: skip


def identity(tmp_path: Path) -> frontend.TensorFlowFile:
    model = of_function(
        tmp_path / "m", lambda x: {"y": tf.nn.relu(x) - tf.nn.relu(-x)}, [SPEC]
    )
    return frontend.capture(load(model.path), "")


def numbers(fmt: Format) -> NDArray[np.float32]:
    """Of all magnitudes that the format has, and of those beside."""
    draw = np.random.default_rng(0)
    low, high = (np.log2(n) for n in (fmt.smallest_subnormal, fmt.max))
    powers = draw.uniform(max(low - 2, -120), min(high + 2, 120), size=4096)
    found = draw.choice([-1.0, 1.0], size=4096) * 2**powers
    ends = [0.0, fmt.max, -fmt.max, np.inf, -np.inf, np.nan, 1.0, 1 + fmt.epsilon / 2]
    return np.concatenate([found, np.repeat(ends, 2)]).astype(np.float32).reshape(-1, 16)


@pytest.mark.parametrize("fmt", EVERY, ids=lambda f: f.label)
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("flush", [False, True])
def test_what_is_rounded_is_what_the_core_rounds(
    fmt: Format, saturate: bool, flush: bool, tmp_path: Path
) -> None:
    how = Rounder(format=fmt, saturate=saturate, flush_subnormals=flush)
    model = frontend.roundable(identity(tmp_path))
    (given,) = (v for v in model.graph.values if v.is_input)
    (shown,) = model.graph.outputs
    model.give(shown.id, [Use(node=None)], model.rounded(model.tensor(given.id), how))
    x = numbers(fmt)
    (got,) = exact_session(model.finish()).run({"x": x}).values()
    np.testing.assert_array_equal(got, convert(x, how))


def test_a_conversion_for_a_device_is_run_as_the_device_would(
    mlp: Model, tmp_path: Path
) -> None:
    done = finecast.convert(mlp.path, tmp_path / "low", "all:bf16", target="trn1")
    assert done.verified.engine == "emulator:trn1"
    error = done.verified.relative_error
    assert error is not None
    assert 0 < error < 4 * Format.BF16.epsilon
    assert "bfloat16" in types_of(tmp_path / "low").values()


def test_a_device_rounds_what_its_compiler_casts(mlp: Model) -> None:
    """Operands of products, sums in fp32: computed here by numpy beside the emulator."""
    opened = finecast.load(mlp.path)
    emulation = Emulation(target=load_target("trn1"), scope=Scope.MATMULT)
    program = opened.program(emulation)
    session = program.session(emulation, setting_of(program.graph, emulation))
    first, bias, second = constants(opened)

    def low(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return round_to(x, Format.BF16)

    hidden = np.maximum(low(X) @ low(first) + bias, 0)
    logits = low(hidden) @ low(second)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    wanted = shares / shares.sum(axis=1, keepdims=True)
    got = session.run({"x": X})["scores"].astype(np.float32)
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
    (exact,) = opened.reference().run({"x": X}).values()
    off = session.apply(Setting()).run({"x": X})["scores"]
    np.testing.assert_array_equal(off, exact)


def constants(opened: Any) -> list[NDArray[np.float32]]:
    """The weights: matrices in the order of the products, the bias between."""
    read = {v.name: v.constant.read() for v in opened.file.graph.values if v.constant}
    floats = [a for a in read.values() if a.dtype == np.float32 and a.size > 1]
    by_shape = {a.shape: a for a in floats}
    return [by_shape[16, 32], by_shape[32,], by_shape[32, 8]]


def test_a_model_is_tuned_for_a_device(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    weights = [tf.Variable(draw.normal(size=(512, 512)) / 16, dtype=tf.float32) for _ in "abc"]

    def call(x: Any) -> dict[str, Any]:
        for w in weights:
            x = tf.nn.relu(tf.matmul(x, w))
        return {"scores": x}

    spec = tf.TensorSpec([None, 512], tf.float32, name="x")
    model = of_function(tmp_path / "wide", call, [spec], weights)
    x = draw.normal(size=(64, 512)).astype(np.float32)
    label = model.serve({"x": x})["scores"].argmax(axis=1)
    data, low = tmp_path / "d.npz", tmp_path / "low"
    np.savez(data, x=x, label=label)
    outcome = finecast.tune(
        model.path, low, data=data, metric="top1", target="trn1", criterion="absolute",
        tolerance=0.1,
    )  # fmt: skip
    assert outcome.improved
    assert outcome.tuned.metric >= 0.9
    found = served(low, {"x": x})["scores"].argmax(axis=1)
    assert (found == label).mean() >= 0.9


@pytest.mark.parametrize("verb", ["emulate", "ladder"])
def test_the_verbs_of_devices_read_saved_models(
    verb: str, mlp: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.npz"
    np.savez(data, x=X, label=mlp.serve({"x": X})["scores"].argmax(axis=1))
    given = [verb, str(mlp.path), "--target", "trn1", "--data", str(data)]
    assert main([*given, "--metric", "top1", "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)


def test_what_is_not_emulated_is_said(mlp: Model) -> None:
    stochastic = Emulation(target=load_target("trn1"), rounding=Rounding.STOCHASTIC)
    with pytest.raises(UsageError, match=r"stochastic rounding.*TensorFlow models.*ONNX"):
        finecast.load(mlp.path).program(stochastic)


@pytest.mark.parametrize("order", orders(5, blocked=True), ids=lambda order: order.label)
def test_a_saved_model_adds_up_in_order(order: Order, tmp_path: Path) -> None:
    """A convolution padded to the size of what it reads, a mean, a product by a transpose."""
    draw = np.random.default_rng(0)
    w, v = (draw.normal(size=s).astype(np.float32) for s in ((3, 2, 2, 6), (5, 6)))

    def call(x: Any) -> dict[str, Any]:
        y = tf.nn.conv2d(x, w, strides=[2, 1], padding="SAME")
        return {"y": tf.matmul(tf.reduce_mean(y, [1, 2]), v, transpose_b=True)}

    spec = tf.TensorSpec([None, 6, 4, 2], tf.float32, name="x")
    model = of_function(tmp_path / "net", call, [spec])
    how = replace(explicit_casts("sm80"), scope=Scope.MATMULT, order=order)
    program = finecast.load(model.path).program(how)
    session = program.session(how, setting_of(program.graph, how))
    assert session.summed == 3
    x = draw.normal(size=(3, 6, 4, 2)).astype(np.float32)
    (got,) = session.run({"x": x}).values()
    # One row is missing at the end, and one column; channels are the first of a sum's terms.
    padded = np.pad(round_to(x, Format.BF16), [(0, 0), (0, 1), (0, 1), (0, 0)])
    windows = [padded[:, 2 * i : 2 * i + 3, j : j + 2] for i in range(3) for j in range(4)]
    rows = np.stack([p.transpose(0, 3, 1, 2).reshape(3, 12) for p in windows], 1)
    filters = round_to(w, Format.BF16).transpose(2, 0, 1, 3).reshape(12, 6)
    by = Summation(order=order, block=16)
    y = by.products(rows.reshape(1, 36, 12), filters[None])[0].reshape(3, 12, 6)
    mean = replace(by, block=0).sums(y.transpose(1, 0, 2)) / np.float32(12)
    right = round_to(v, Format.BF16).T
    wanted = by.products(round_to(mean, Format.BF16)[None], right[None])[0]
    np.testing.assert_array_equal(got, wanted)


def test_depthwise_convolutions_are_added_up_channel_by_channel(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    w = draw.normal(size=(3, 2, 2, 4)).astype(np.float32)

    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME")}

    spec = tf.TensorSpec([None, 6, 4, 2], tf.float32, name="x")
    model = of_function(tmp_path / "net", call, [spec])
    how = replace(
        explicit_casts("sm80"), scope=Scope.MATMULT, order=orders(1, blocked=False)[0]
    )
    program = finecast.load(model.path).program(how)
    session = program.session(how, setting_of(program.graph, how))
    assert session.summed == 1
    x = draw.normal(size=(3, 6, 4, 2)).astype(np.float32)
    got = np.asarray(session.run({"x": x})["y"], np.float32)
    low = (round_to(a, Format.BF16) for a in (x, w))
    wanted = tf.nn.depthwise_conv2d(*low, [1, 1, 1, 1], "SAME").numpy()
    assert np.abs(got - wanted).max() <= 16 * Format.FP32.epsilon
