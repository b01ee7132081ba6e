"""Random ops draw the same numbers in every model that an engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
from onnx.external_data_helper import set_external_data
from openvino import opset13

import finecast
from finecast.engines import get_engine
from finecast.engines.base import Array
from finecast.engines.source import to_run
from finecast.errors import ModelError
from finecast.frontends.onnx import load
from finecast.frontends.onnx.opset import stated_for_engines
from tests.frontends.tools import parse

X = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
X64 = np.random.default_rng(2).standard_normal((48, 64)).astype(np.float32)
EVERY = """
net (float[n,8] x) => (float[n,8] normal, float[n,8] uniform, float[3,5] spread,
 float[n,8] drop, bool[n,8] kept, int32[n,6] classes)
<float ratio = {0.25}, bool training = {1}> {
  normal = RandomNormalLike <mean = 2.0, scale = 0.5> (x)
  uniform = RandomUniformLike <low = -1.0, high = 3.0> (x)
  spread = RandomUniform <shape = [3, 5], seed = 4.0> ()
  drop, kept = Dropout(x, ratio, training)
  classes = Multinomial <sample_size = 6> (x)
}
"""
NOISE = """
net (float[n,64] x) => (float[n,64] y) <float small = {0.5}> {
  a = MatMul(x, w)
  noise = RandomNormalLike(a)
  scaled = Mul(noise, small)
  y = Add(a, scaled)
}
"""


def every(opset: int, nodes: str = EVERY) -> bytes:
    return parse(nodes, opset=opset, ir_version=9).SerializeToString()


def outputs(engine: str, model: bytes) -> dict[str, Array]:
    session = get_engine(engine).load(model)
    first, second = session.run({"x": X}), session.run({"x": X})
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    return first


@pytest.mark.parametrize("opset", [13, 15, 18])
def test_engines_draw_the_same_and_as_the_ops_say(opset: int) -> None:
    found: dict[str, Any] = outputs("onnxruntime", every(opset))
    for name, array in outputs("openvino", every(opset)).items():
        np.testing.assert_array_equal(array, found[name])
    assert found["normal"].mean() == pytest.approx(2, abs=0.03)
    assert found["normal"].std() == pytest.approx(0.5, abs=0.02)
    assert found["uniform"].mean() == pytest.approx(1, abs=0.07)
    assert (found["uniform"].min(), found["uniform"].max()) == pytest.approx((-1, 3), abs=0.01)
    assert found["kept"].mean() == pytest.approx(0.75, abs=0.03)
    np.testing.assert_allclose(found["drop"], np.where(found["kept"], X / 0.75, 0), rtol=1e-6)
    chances = np.exp(X) / np.exp(X).sum(axis=1, keepdims=True)
    shares = np.bincount(found["classes"].reshape(-1), minlength=8) / found["classes"].size
    np.testing.assert_allclose(shares, chances.mean(axis=0), atol=0.04)


@pytest.mark.parametrize(
    "node",
    ["d = Dropout(h, ratio, training)", "r = RandomNormalLike(h)  d = Add(h, r)"],
    ids=["dropout", "like"],
)
def test_draws_have_the_type_of_what_they_are_mixed_with(node: str, tmp_path: Path) -> None:
    """In operation sets before 15, too, which have no CastLike."""
    model = parse(
        "net (float[n,64] x) => (float[n,64] y) <float ratio = {0.25}, bool training = {1}>"
        f" {{ h = MatMul(x, w)  {node}  y = MatMul(d, w) }}",
        opset=13,
        ir_version=8,
    )
    weights = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32) / 8
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(model, tmp_path / "net.onnx")
    done = finecast.convert(
        tmp_path / "net.onnx", tmp_path / "low.onnx", "all:bf16", data={"x": X64}
    )
    assert done.verified.relative_error is not None
    assert done.verified.relative_error < 0.05
    written = onnx.load(tmp_path / "low.onnx")
    assert not {"CastLike", "Range"} & {n.op_type for n in written.graph.node}


def test_bernoulli_follows_its_chances() -> None:
    model = every(
        15, "net (float[n,8] x) => (float[n,8] y) { p = Sigmoid(x) y = Bernoulli(p) }"
    )
    found = outputs("onnxruntime", model)["y"]
    assert set(np.unique(found)) == {0.0, 1.0}
    assert found.mean() == pytest.approx((1 / (1 + np.exp(-X))).mean(), abs=0.03)


def test_random_ops_in_bodies_and_functions() -> None:
    body = """
    net (float[n,8] x, bool flag) => (float[n,8] y) {
      y = If (flag) <
        then_branch = t () => (float[n,8] a) { a = RandomNormalLike(x) },
        else_branch = e () => (float[n,8] b) { b = Identity(x) }>
    }
    """
    session = get_engine("onnxruntime").load(every(17, body))
    feeds = {"x": X, "flag": np.array(True)}
    np.testing.assert_array_equal(session.run(feeds)["y"], session.run(feeds)["y"])


def test_a_model_that_draws_nothing_is_loaded_as_it_is() -> None:
    quiet = EVERY.replace("training = {1}", "training = {0}").partition("  normal =")[0]
    quiet += "drop, kept = Dropout(x, ratio, training) }"
    ports = quiet.index("float[n,8] normal"), quiet.index("float[n,8] drop")
    quiet = quiet[: ports[0]] + quiet[ports[1] :]
    model = every(17, quiet.replace(", bool[n,8] kept, int32[n,6] classes", ""))
    assert to_run(model)[0] is model


def noisy(folder: Path, suffix: str) -> Path:
    proto = parse(NOISE, ir_version=8)
    w = np.random.default_rng(1).standard_normal((64, 64)) / 8
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w.astype(np.float32), "w"))
    path = folder / "noisy.onnx"
    onnx.save(proto, path)
    if suffix == ".onnx":
        return path
    read = openvino.Core().read_model(path)
    openvino.save_model(read, path.with_suffix(suffix), compress_to_fp16=False)
    return path.with_suffix(suffix)


@pytest.mark.parametrize("suffix", [".onnx", ".xml"])
def test_noise_is_no_error_in_any_verb(suffix: str, tmp_path: Path) -> None:
    """OpenVINO was said to compute the model wrongly, verify drifted, and blame was spread."""
    model, low = noisy(tmp_path, suffix), tmp_path / f"low{suffix}"
    x = np.random.default_rng(2).standard_normal((48, 64)).astype(np.float32)
    done = finecast.convert(model, low, "all:bf16", data={"x": x}, lock=True, progress=False)
    assert 0 < done.to_dict()["verified"]["relative_error"] < 0.01
    assert any("draws of" in text for text in done.warnings)
    verified = finecast.verify(low)
    assert verified.deviations == {next(iter(verified.deviations)): 0.0}
    assert {"kernels", "numbers"}.isdisjoint(verified.drifted)
    blamed = finecast.blame(model, low, data={"x": x}, max_error=0.003, progress=False)
    assert blamed.value < 0.01
    assert blamed.restored < 0.003


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("external", [False, True])
def test_draws_of_a_model_larger_than_a_message_are_fixed(
    external: bool, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note said so, and it drew other numbers in each run."""
    model = noisy(tmp_path, ".onnx")
    whole = get_engine(engine).load(model).run({"x": X64})["y"]
    monkeypatch.setattr("finecast.engines.source.EXTERNAL_ABOVE_BYTES", 1000)
    if external:
        proto = onnx.load(model)
        onnx.save(
            proto, model, save_as_external_data=True, location="w.data", size_threshold=0
        )
    session = get_engine(engine).load(model)
    for _ in range(2):
        np.testing.assert_array_equal(session.run({"x": X64})["y"], whole)
    done = finecast.convert(model, tmp_path / "low.onnx", "all:bf16", data={"x": X64})
    assert any("replaced by the same fixed numbers" in text for text in done.warnings)
    assert 0 < done.to_dict()["verified"]["relative_error"] < 0.01


def test_weights_in_files_are_not_read_to_fix_draws(tmp_path: Path) -> None:
    """All of them were read, and were in memory three times."""
    model = noisy(tmp_path, ".onnx")
    proto = onnx.load(model)
    (weight,) = (t for t in proto.graph.initializer if t.name == "w")
    weight.dims[:] = [1 << 26, 64]  # 16 GB
    set_external_data(weight, "weights", 0, 1 << 34)
    weight.ClearField("raw_data")
    onnx.save(proto, model)
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(1 << 34)
    place, source = to_run(model)
    assert isinstance(place, Path)
    assert {step.op for step in source.steps}.isdisjoint({"RandomNormalLike"})
    assert (place.parent / "weights").stat().st_size == 1 << 34
    del source
    assert not place.exists()


@pytest.mark.parametrize("opset", [9, 11])
def test_draws_of_old_opsets_are_no_error(opset: int, tmp_path: Path) -> None:
    """The error was 1.4: Range and Mod, which number the elements drawn, are of later ones."""
    model, low = tmp_path / "old.onnx", tmp_path / "low.onnx"
    proto = onnx.load(noisy(tmp_path, ".onnx"))
    proto.opset_import[0].version = opset
    onnx.save(proto, model)
    x = np.random.default_rng(2).standard_normal((48, 64)).astype(np.float32)
    done = finecast.convert(model, low, "all:bf16", data={"x": x}, progress=False)
    assert 0 < done.to_dict()["verified"]["relative_error"] < 0.01
    assert any(f"at opset {opset}: the model is taken at opset 13" in w for w in done.warnings)


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_draws_by_its_switch(training: bool, tmp_path: Path) -> None:
    """A model of opset 12 was taken at opset 13 for a Dropout that draws nothing."""
    proto = parse(
        f"""
        net (float[n,8] x) => (float[n,8] y)
        <float ratio = {{0.25}}, bool training = {{{int(training)}}}> {{
          y = Dropout(x, ratio, training)
        }}
        """,
        opset=12,
    )
    onnx.save(proto, tmp_path / "net.onnx")
    told = stated_for_engines(load(tmp_path / "net.onnx")).told
    assert any("draws of Dropout" in text for text in told) == training


def test_draws_that_cannot_be_fixed_are_said_to_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Any:
        raise ModelError("no conversion")

    monkeypatch.setattr("finecast.frontends.onnx.opset.raise_opset", refused)
    proto = onnx.load(noisy(tmp_path, ".onnx"))
    proto.opset_import[0].version = 9
    done = finecast.convert(proto, policy="none", progress=False)
    (note,) = (w for w in done.warnings if "random draws" in w)
    assert "RandomNormalLike" in note
    assert note.endswith("other numbers in each run: errors and metrics have that noise")


@pytest.mark.parametrize("log_probs", [False, True])
@pytest.mark.parametrize("with_replacement", [False, True])
def test_classes_of_openvinos_multinomial(log_probs: bool, with_replacement: bool) -> None:
    chances = np.exp(X[:40]) / np.exp(X[:40]).sum(axis=1, keepdims=True)
    rows = np.repeat(chances, 100, axis=0)
    ops: Any = opset13
    given = ops.parameter([-1, 8], np.float32)
    drawn = ops.multinomial(given, np.array([3]), "i32", with_replacement, log_probs)
    session = get_engine("openvino").load(openvino.Model([drawn], [given], "classes"))  # pyright: ignore[reportGeneralTypeIssues]
    (name,) = (spec.name for spec in session.inputs)
    feeds = {name: np.log(rows) if log_probs else rows}
    (found,), (again,) = (session.run(feeds).values() for _ in range(2))
    np.testing.assert_array_equal(found, again)
    shares = np.bincount(found[:, 0], minlength=8) / len(found)
    np.testing.assert_allclose(shares, chances.mean(axis=0), atol=0.03)
    assert all(len(set(row)) == 3 for row in found.tolist()) is not with_replacement


def test_the_written_model_draws(tmp_path: Path) -> None:
    model, low = noisy(tmp_path, ".onnx"), tmp_path / "low.onnx"
    finecast.convert(model, low, "all:bf16", progress=False)
    assert "RandomNormalLike" in {node.op_type for node in onnx.load(low).graph.node}


def test_what_is_deployed_draws_anew_and_is_not_compared(tmp_path: Path) -> None:
    model, low = noisy(tmp_path, ".onnx"), tmp_path / "low.onnx"
    x = np.ones((24, 64), np.float32)
    finecast.convert(model, low, "all:bf16", data={"x": x}, lock=True, progress=False)
    deployed = openvino.Core().compile_model(low, "CPU")
    found = finecast.verify(low, deployed=deployed)
    (numbers,) = (one for one in found.checks if one.name == "numbers")
    assert "draws at random" in numbers.texts[0]
