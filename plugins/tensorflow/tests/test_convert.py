from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.engines.usage import how_to_run
from finecast.errors import ModelError, UsageError, WrongNumbersError
from finecast.frontends.native_model import with_switches
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.planning.points import SWITCH, Switch
from finecast.rules import override
from finecast_tensorflow import frontend, functions
from finecast_tensorflow.engine import TensorFlowEngine
from finecast_tensorflow.frontend.loading import load, of_graph_def, save
from plugins.tensorflow.tests.models import Model, nodes_of, of_function, served, tf, types_of

X = np.random.default_rng(1).normal(size=(4, 16)).astype(np.float32)
ROWS = tf.TensorSpec([None, 16], tf.float32, name="x")


def test_a_saved_model_is_served_in_bf16_under_the_names_of_before(
    mlp: Model, tmp_path: Path
) -> None:
    done = finecast.convert(mlp.path, tmp_path / "low", "like-grappler:bf16")
    formats = {d.op: d.format for d in done.plan.decisions}
    assert formats.pop("softmax") is Format.FP32  # its result is given out in fp32
    assert set(formats.values()) == {Format.BF16}
    before, after = mlp.serve({"x": X}), served(tmp_path / "low", {"x": X})
    assert list(after) == ["scores"]
    assert after["scores"].dtype == np.float32
    np.testing.assert_allclose(after["scores"], before["scores"], atol=0.02)
    assert np.abs(after["scores"] - before["scores"]).max() > 0
    types = types_of(tmp_path / "low")
    assert {types.pop(n) for n in list(types) if n.endswith("Softmax")} == {"float32"}
    assert set(types.values()) == {"bfloat16"}


def test_the_code_that_is_printed_runs_a_saved_model(mlp: Model, tmp_path: Path) -> None:
    path, inputs = tmp_path / "low", {"x": ((3, 16), "float32")}
    done = finecast.convert(mlp.path, path, "all:bf16")
    names: dict[str, Any] = {}
    exec("\n".join(how_to_run(path, "tensorflow", done.counts, inputs=inputs)), names)
    assert names["outputs"]["scores"].shape == (3, 8)


def test_what_no_library_writes_is_advised_nowhere(mlp: Model, tmp_path: Path) -> None:
    low = functions.convert(mlp.path, policy="all:bf16")
    with pytest.raises(UsageError) as refused:
        low.save(tmp_path / "low.keras")
    assert refused.value.fix == f"name it {tmp_path / 'low'}"
    with pytest.raises(UsageError, match=r"or give finecast\.convert"):
        low.save(tmp_path / "low.xml")  # convert writes that


def test_scope_all_is_every_op_the_last_softmax_too(mlp: Model, tmp_path: Path) -> None:
    done = finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    assert set(done.plan.formats.values()) == {Format.BF16}


def test_weights_rest_in_bf16(mlp: Model, tmp_path: Path) -> None:
    finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    nodes = nodes_of(tmp_path / "low").values()
    stored = {tf.as_dtype(n.attr["dtype"].type).name for n in nodes if n.op == "Const"}
    assert stored == {"bfloat16"}


def test_free_sizes_stay_free(mlp: Model, tmp_path: Path) -> None:
    finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    for rows in (1, 7):
        x = np.ones((rows, 16), np.float32)
        assert served(tmp_path / "low", {"x": x})["scores"].shape == (rows, 8)


def test_scope_none_gives_the_same_numbers(mlp: Model, tmp_path: Path) -> None:
    done = finecast.convert(mlp.path, tmp_path / "same", "none")
    assert not done.plan.lowers
    np.testing.assert_array_equal(
        served(tmp_path / "same", {"x": X})["scores"], mlp.serve({"x": X})["scores"]
    )


def test_single_ops_keep_fp32(mlp: Model, tmp_path: Path) -> None:
    kept = replace(finecast.Policy.parse("all:bf16"), op_formats={"softmax": Format.FP32})
    plan = finecast.convert(mlp.path, tmp_path / "low", kept).plan
    (softmax,) = (d.node for d in plan.decisions if d.op == "softmax")
    types = types_of(tmp_path / "low")
    assert types[softmax] == "float32"
    assert "bfloat16" in types.values()


def test_raf_s_bias_add_is_each_addition_of_a_bias(tmp_path: Path) -> None:
    weight = tf.Variable(np.ones((16, 16), np.float32))
    kernel = tf.Variable(np.ones((1, 1, 4, 4), np.float32))
    bias, four = (tf.Variable(np.linspace(-1, 1, n, dtype=np.float32)) for n in (16, 4))

    def call(x: Any) -> dict[str, Any]:
        x = tf.add(tf.nn.bias_add(tf.matmul(x, weight), bias, name="own"), x, name="residual")
        x = tf.add(tf.matmul(x, weight), bias, name="sum")
        x = tf.nn.conv2d(tf.reshape(x, [-1, 2, 2, 4]), kernel, 1, "SAME")
        return {"y": tf.add(x, four, name="channels")}

    held = [weight, kernel, bias, four]
    model = of_function(tmp_path / "biases", call, [ROWS], held)
    with override({"raf.op.bias_add": lambda args, ret, amp: ["fp32"] * len(args)}):
        plan = finecast.convert(model.path, tmp_path / "low", "all:bf16").plan
    kept = {d.node for d in plan.decisions if d.format is Format.FP32}
    assert kept == {"own", "sum", "channels"}


def test_a_plan_is_replayed(mlp: Model, tmp_path: Path) -> None:
    done = finecast.convert(mlp.path, tmp_path / "one", "all:bf16")
    finecast.apply(done.plan, mlp.path, tmp_path / "two")
    one, two = (served(tmp_path / n, {"x": X})["scores"] for n in ("one", "two"))
    np.testing.assert_array_equal(one, two)


def test_a_plan_of_another_model_is_refused(mlp: Model, tmp_path: Path) -> None:
    plan = finecast.convert(mlp.path, None, "all:bf16").plan
    other = of_function(
        tmp_path / "other", lambda x: tf.matmul(x, tf.ones([16, 4])),
        [tf.TensorSpec([None, 16], tf.float32, name="x")],
    )  # fmt: skip
    with pytest.raises(ModelError, match="made for another model"):
        finecast.apply(plan, other.path, tmp_path / "low")


def test_what_was_converted_says_so(mlp: Model, tmp_path: Path) -> None:
    done = finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    notes = json.loads((tmp_path / "low/assets.extra/finecast.json").read_text())
    assert notes == {
        "plan": done.plan.digest,
        "policy": "all:bf16",
        "original": mlp.path.name,
        "original_digest": done.plan.model,
    }
    advice = rf"give the original: {mlp.path.name}, digest {done.plan.model}"
    in_memory = finecast.convert(mlp.path, None, "all:bf16").model
    for low in (tmp_path / "low", in_memory):
        for policy in ("all:bf16", "none", "matmult:bf16"):
            with pytest.raises(ModelError, match=advice):
                finecast.convert(low, tmp_path / "again", policy)
        with pytest.raises(ModelError, match=advice):
            finecast.tune(low, data={"x": X})
        with pytest.raises(ModelError, match=advice):
            finecast.apply(done.plan, low)
    with pytest.raises(ModelError, match=advice):  # as OpenVINO reads it
        finecast.convert(tmp_path / "low", tmp_path / "again.xml", "all:bf16")


def test_nothing_half_written_stays(
    mlp: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finecast_tensorflow import native as opened

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(opened, "verify", full)
    with pytest.raises(UsageError, match="No space left"):
        finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp"]


def test_only_a_saved_model_is_replaced_and_only_with_force(
    mlp: Model, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is no model"):
        finecast.convert(mlp.path, mine, "all:bf16", force=True)
    finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    with pytest.raises(UsageError, match="output exists"):
        finecast.convert(mlp.path, tmp_path / "low", "all:bf16")
    finecast.convert(mlp.path, tmp_path / "low", "none", force=True)
    assert set(types_of(tmp_path / "low").values()) == {"float32"}
    with pytest.raises(UsageError, match="same file"):
        finecast.convert(mlp.path, mlp.path, "all:bf16", force=True)


def test_a_file_is_no_place_for_a_saved_model(mlp: Model, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gives SavedModels or \.xml files"):
        finecast.convert(mlp.path, tmp_path / "low.onnx", "all:bf16")


def test_ports_are_declared_low_where_that_is_asked_for(mlp: Model, tmp_path: Path) -> None:
    io = {"x": Format.BF16, "scores": Format.FP16}
    policy = replace(finecast.Policy.parse("all:bf16"), io=io)
    finecast.convert(mlp.path, tmp_path / "low", policy)
    x = X.astype(Format.BF16.dtype)
    after = served(tmp_path / "low", {"x": x})["scores"]
    assert after.dtype == np.float16
    wanted = mlp.serve({"x": x.astype(np.float32)})["scores"]
    np.testing.assert_allclose(after.astype(np.float32), wanted, atol=0.02)
    with pytest.raises(UsageError, match=r"'y' does not match any float input.*x, scores"):
        finecast.convert(mlp.path, None, replace(policy, io={"y": Format.BF16}))


def test_formats_without_arithmetic_are_refused(mlp: Model) -> None:
    with pytest.raises(UsageError, match="do not compute in fp8_e4m3"):
        finecast.convert(mlp.path, None, "all:fp8_e4m3")


def test_the_models_own_casts_read_what_they_are_given(tmp_path: Path) -> None:
    def call(x: Any) -> dict[str, Any]:
        scores = tf.matmul(x, tf.eye(16) * 3)
        return {"rounded": tf.cast(scores, tf.int32), "scores": scores}

    model = of_function(
        tmp_path / "m", call, [tf.TensorSpec([None, 16], tf.float32, name="x")]
    )
    finecast.convert(model.path, tmp_path / "low", "all:bf16")
    found = served(tmp_path / "low", {"x": np.full((2, 16), 2.0, np.float32)})
    assert (found["rounded"] == 6).all()
    assert found["rounded"].dtype == np.int32
    nodes = nodes_of(tmp_path / "low").values()
    sources = {tf.as_dtype(n.attr["SrcT"].type).name for n in nodes if n.op == "Cast"}
    assert sources == {"float32", "bfloat16"}
    to_int = next(n for n in nodes if n.op == "Cast" and n.attr["DstT"].type == 3)
    assert tf.as_dtype(to_int.attr["SrcT"].type) == tf.bfloat16


def test_an_assertion_is_still_made(tmp_path: Path) -> None:
    def call(x: Any) -> dict[str, Any]:
        with tf.control_dependencies([tf.debugging.assert_less(x, 100.0)]):
            return {"y": tf.matmul(x, tf.eye(16))}

    model = of_function(
        tmp_path / "m", call, [tf.TensorSpec([None, 16], tf.float32, name="x")]
    )
    finecast.convert(model.path, tmp_path / "low", "all:bf16")
    with pytest.raises(tf.errors.InvalidArgumentError):
        served(tmp_path / "low", {"x": np.full((1, 16), 1000, np.float32)})


def test_outputs_of_one_node_of_a_frozen_graph_have_different_names(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 16], name="x")
        tf.split(x @ tf.eye(16), 2, axis=1, name="parts")
    model = of_graph_def(graph.as_graph_def(), ["x"], ["parts:1", "parts:0"])
    assert [port.name for port in model.outputs] == ["parts:1", "parts"]
    save(model, tmp_path / "m")
    given = served(tmp_path / "m", {"x": X})
    np.testing.assert_allclose(given["parts"], X[:, :8])
    np.testing.assert_allclose(given["parts:1"], X[:, 8:])


def test_a_switch_rounds_to_bf16_and_back(mlp: Model) -> None:
    captured = frontend.capture(load(mlp.path), "")
    product = next(n for n in captured.graph.nodes if n.op == "matmul")
    switches = [
        Switch(outputs={0: Format.BF16}),
        Switch(ports={(product.id, 1): Format.BF16}),
    ]
    model = with_switches(frontend.roundable(captured), switches)
    session = TensorFlowEngine().load(model)

    def run(*on: bool) -> Any:
        return session.run({"x": X, SWITCH: np.array(on)})["scores"]

    exact = run(False, False)
    np.testing.assert_array_equal(run(True, False), round_to(exact, Format.BF16))
    assert 0 < np.abs(run(False, True) - exact).max() < 0.02


# numpy 2 says so of TensorFlow 2.21's own tensors.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("kind", ["SavedModel", ".keras"])
def test_its_size_is_that_of_its_weights_and_ops(kind: str, tmp_path: Path) -> None:
    """A SavedModel has every function of its layers, Keras's files their variables twice."""
    x = tf.keras.Input((16,), name="x")
    model = tf.keras.Model(x, tf.keras.layers.Dense(512)(tf.keras.layers.Dense(64)(x)))
    if kind == "SavedModel":
        model.export(path := tmp_path / "m", verbose=False)
    else:
        model.save(path := tmp_path / "m.keras")
    before, after = finecast.convert(path, tmp_path / "same", "none").size_bytes
    assert before == after
    weights = 4 * model.count_params()
    assert weights < before < 1.1 * weights
    before, after = finecast.convert(path, tmp_path / "low", "all:bf16").size_bytes
    assert 0.5 * before <= after < 0.6 * before


def test_errors_that_low_products_explain_are_written_with_a_warning(tmp_path: Path) -> None:
    weight = tf.constant(np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32))
    lost = 300 * tf.reduce_sum(weight, axis=0)
    of_function(tmp_path / "offset", lambda x: {"y": (x + 300.0) @ weight - lost}, [ROWS])
    done = finecast.convert(tmp_path / "offset", tmp_path / "low", "all:bf16")
    error = done.verified.relative_error or 0.0
    assert error > 0.5
    (said,) = (w for w in done.warnings if f"{error:.3g} on random inputs" in w)
    assert "The formats explain it" in said


def test_a_logit_of_a_probability_near_1_is_refused(tmp_path: Path) -> None:
    def logit(x: Any) -> dict[str, Any]:
        odds = tf.sigmoid(x @ tf.eye(16) * 8.0)
        return {"y": tf.math.log(odds / (1.0 - odds))}

    of_function(tmp_path / "logit", logit, [ROWS])
    with pytest.raises(WrongNumbersError, match="NaN or Inf"):
        finecast.convert(tmp_path / "logit", tmp_path / "low", "all:bf16")
    assert not (tmp_path / "low").exists()


def test_inputs_that_show_no_error_are_said_to_be_so(tmp_path: Path) -> None:
    weight = tf.constant(np.random.default_rng(3).normal(size=(16, 4)).astype(np.float32))
    of_function(tmp_path / "m", lambda x: {"y": tf.nn.softmax(x @ weight * 1e4) + 0.0}, [ROWS])
    done = finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    assert any("cannot tell a right model" in said for said in done.warnings)
