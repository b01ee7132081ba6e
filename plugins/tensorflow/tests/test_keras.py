from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.errors import ModelError, UsageError
from finecast.numbers.formats import Format
from finecast_tensorflow import functions as converting
from finecast_tensorflow import keras as policies
from plugins.tensorflow.tests.models import served, tf, types_of

X = np.random.default_rng(4).normal(size=(8, 12, 32)).astype(np.float32)
layers: Any = tf.keras.layers
# numpy 2 says so of TensorFlow 2.21's own tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def attention() -> Any:
    """Attention, a norm and two dense layers; names that repeat."""
    tf.keras.utils.set_random_seed(0)
    tf.keras.backend.clear_session()
    tokens = tf.keras.Input((12, 32), name="tokens")
    x = layers.MultiHeadAttention(2, 16)(tokens, tokens)
    x = layers.LayerNormalization()(x + tokens)
    x = layers.Dense(32, activation="gelu")(x)
    x = layers.Dense(16)(x)
    return tf.keras.Model(tokens, layers.Dense(3)(x[:, 0]))


def test_a_keras_model_becomes_a_function_in_bf16(attention: Any, tmp_path: Path) -> None:
    low = converting.convert(attention, policy="all:bf16")
    assert low.plan is not None
    assert low.input_names == ["tokens"]
    wanted = np.asarray(attention(X))
    for found in (low(X), low(tokens=X), low({"tokens": X})):
        assert found.dtype == tf.float32
        np.testing.assert_allclose(np.asarray(found), wanted, atol=np.abs(wanted).max() / 32)
    with pytest.raises(UsageError, match="give tokens"):
        low(image=X)
    with pytest.raises(
        UsageError, match=r"'tokens' has shape \(8, 5, 32\), .*\(None, 12, 32\)"
    ):
        low(X[:, :5])
    low.save(tmp_path / "low")
    (stored,) = served(tmp_path / "low", {"tokens": X}).values()
    np.testing.assert_array_equal(stored, np.asarray(low(X)))
    with pytest.raises(UsageError, match="output exists"):
        low.save(tmp_path / "low")


def test_where_no_plan_helps_there_is_none_to_apply(attention: Any) -> None:
    nothing: Any = None  # ``tune(...).model.plan`` then
    with pytest.raises(UsageError, match=r"NoneType is no plan: .*outcome\.improved"):
        policies.apply_plan(attention, nothing)


def test_an_activation_with_a_gradient_of_its_own_is_converted(tmp_path: Path) -> None:
    inputs = tf.keras.Input((4,), name="x")
    hidden = layers.Dense(3, activation="swish")(layers.Dense(8)(inputs))
    model = tf.keras.Model(inputs, layers.Dense(2)(hidden))
    model.export(tmp_path / "sm", verbose=False)
    finecast.convert(tmp_path / "sm", tmp_path / "low", "all:bf16")
    assert set(types_of(tmp_path / "low").values()) == {"bfloat16"}
    x = np.ones((2, 4), np.float32)
    (before,), (after,) = (served(tmp_path / n, {"x": x}).values() for n in ("sm", "low"))
    np.testing.assert_allclose(after, before, atol=np.abs(before).max() / 32)


def test_a_keras_file_is_read_and_its_code_is_not_run(attention: Any, tmp_path: Path) -> None:
    attention.save(tmp_path / "m.keras")
    finecast.convert(tmp_path / "m.keras", tmp_path / "low", "all:bf16")
    assert "bfloat16" in types_of(tmp_path / "low").values()
    inputs = tf.keras.Input((4,))
    code = tf.keras.Model(inputs, layers.Lambda(lambda x: x * 2)(inputs))
    code.save(tmp_path / "code.keras")
    with pytest.raises(ModelError, match=r"brings code of its own.*trust"):
        finecast.load(tmp_path / "code.keras")
    assert finecast.load(tmp_path / "code.keras", trust=True)


def test_an_export_is_the_model_under_both_of_its_names(
    attention: Any, tmp_path: Path
) -> None:
    attention.export(tmp_path / "sm", verbose=False)
    finecast.convert(tmp_path / "sm", tmp_path / "low", "all:bf16")
    for name in ("serve", "serving_default"):
        (before,), (after,) = (
            served(tmp_path / at, {"tokens": X}, name).values() for at in ("sm", "low")
        )
        np.testing.assert_allclose(after, before, atol=np.abs(before).max() / 32)
    reloaded = tf.saved_model.load(str(tmp_path / "low"))
    assert reloaded.serve(X)["output_0"].shape == (8, 3)


@pytest.fixture
def two_inputs() -> Any:
    """Two inputs of different types, and an activation that is a layer."""
    a = tf.keras.Input((4,), name="a")
    b = tf.keras.Input((4,), dtype="int32", name="b")
    x = layers.Activation("tanh", name="bend")(layers.Dense(8, name="mix")(a))
    return tf.keras.Model(
        [a, b], layers.Dense(3)(x + layers.Embedding(5, 8, name="look")(b)[:, 0])
    )


def test_inputs_are_given_and_cast_as_keras_does(two_inputs: Any) -> None:
    low = converting.convert(two_inputs, policy="none")
    a, b = np.ones((2, 4)), np.ones((2, 4), np.int64)  # numpy's own types: fp64, int64
    for found in (low(a, b), low([a, b]), low(a=a, b=b), low(a, b=b.tolist())):
        np.testing.assert_allclose(found, two_inputs([a, b]), rtol=1e-5)
    with pytest.raises(UsageError, match=r"3 inputs were given, .* 2: give a, b"):
        low(a, b, a)


def test_a_dict_of_inputs_is_not_taken_in_another_order(tmp_path: Path) -> None:
    """Keras sorts the keys of a dict, whatever the order that it was written in."""
    words, mask = (tf.keras.Input((4,), name=name) for name in ("words", "mask"))
    model = tf.keras.Model({"words": words, "mask": mask}, words - 2 * mask)
    feeds = {"words": np.ones((2, 4), np.float32), "mask": np.full((2, 4), 3, np.float32)}
    low = converting.convert(model, policy="none:bf16")
    np.testing.assert_array_equal(np.asarray(low(feeds)), np.asarray(model(feeds)))
    low.save(tmp_path / "low")
    (found,) = served(tmp_path / "low", feeds).values()
    np.testing.assert_array_equal(found, np.asarray(model(feeds)))


@pytest.fixture
def nested() -> Any:
    """Inputs in a dict of a dict; outputs in a dict of a dict and a list."""
    a, b = (tf.keras.Input((4,), name=name) for name in "ab")
    head = layers.Dense(3)
    outputs = {"first": a - 2 * b, "more": {"sum": a + b, "heads": [head(a), head(b)]}}
    return tf.keras.Model({"given": {"b": b, "a": a}}, outputs)


def test_nested_outputs_have_their_paths_for_names(nested: Any, tmp_path: Path) -> None:
    a, b = (np.full((2, 4), n, np.float32) for n in (1, 3))
    wanted = nested({"given": {"a": a, "b": b}})
    low = converting.convert(nested, policy="none:bf16")
    low.save(tmp_path / "low")
    for found in (low(a=a, b=b), served(tmp_path / "low", {"a": a, "b": b})):
        assert set(found) == {"first", "more/sum", "more/heads/0", "more/heads/1"}
        np.testing.assert_array_equal(np.asarray(found["first"]), np.asarray(wanted["first"]))
        head = np.asarray(wanted["more"]["heads"][1])
        np.testing.assert_allclose(np.asarray(found["more/heads/1"]), head, rtol=1e-6)


def test_nested_outputs_are_written_as_ir(nested: Any, tmp_path: Path) -> None:
    nested.save(tmp_path / "nested.keras")
    finecast.convert(tmp_path / "nested.keras", tmp_path / "low.xml", "none:bf16")
    session = finecast.load(tmp_path / "low.xml").reference()
    a, b = (np.full((2, 4), n, np.float32) for n in (1, 3))
    found = session.run({"a": a, "b": b})
    assert {"first", "more/sum", "more/heads/0", "more/heads/1"} == set(found)
    np.testing.assert_array_equal(found["first"], a - 2 * b)


def test_the_name_of_the_output_decides_of_a_model_in_memory(
    attention: Any, tmp_path: Path
) -> None:
    low = tmp_path / "low.xml"
    done = finecast.convert(attention, low, "all:bf16")
    assert low.with_suffix(".bin").is_file()
    assert "bf16" in {f.label for f in done.plan.formats.values()}
    (found,) = finecast.load(low).reference().run({"tokens": X}).values()
    wanted = np.asarray(attention(X))
    assert np.abs(np.asarray(found) - wanted).max() < np.abs(wanted).max() / 32
    again = finecast.apply(done.plan, attention, tmp_path / "again.xml")
    assert again.plan.digest == done.plan.digest
    finecast.convert(attention, tmp_path / "folder", "all:bf16")
    assert (tmp_path / "folder" / "saved_model.pb").is_file()


def test_a_subclass_that_was_called_is_written_as_ir(tmp_path: Path) -> None:
    class Twice(tf.keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(4)

        def call(self, x: Any) -> Any:
            return self.dense(x) * 2

    model, x = Twice(), np.ones((2, 8), np.float32)
    with pytest.raises(ModelError, match="has not yet been built"):
        finecast.convert(model, tmp_path / "low.xml", "none")
    wanted = np.asarray(model(x))
    finecast.convert(model, tmp_path / "low.xml", "none")
    session = finecast.load(tmp_path / "low.xml").reference()
    (found,) = session.run({session.inputs[0].name: x}).values()
    assert np.abs(np.asarray(found) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_function_of_tensorflow_is_written_under_no_other_kind_of_name(
    attention: Any, tmp_path: Path
) -> None:
    low = converting.convert(attention, policy="all:bf16")
    for name in ("low.xml", "low.onnx"):
        for write in (low.save, lambda at: converting.convert(attention, at)):
            with pytest.raises(UsageError, match=r"are SavedModels.*name it .*low\b"):
                write(tmp_path / name)
        with pytest.raises(UsageError, match="SavedModels"):
            converting.tune(attention, tmp_path / name, data={"tokens": X}, metric="cosine")
    finecast.convert(attention, tmp_path / "other.xml", "none")
    with pytest.raises(UsageError, match=r"not a model that TensorFlow runs.*other.xml"):
        converting.convert(tmp_path / "other.xml")


def test_policies_of_a_loaded_model_name_its_layers(two_inputs: Any, tmp_path: Path) -> None:
    two_inputs.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    plan = converting.convert(loaded, policy="all:bf16").plan
    assert plan is not None
    assert policies.apply_plan(loaded, plan).keys() >= {"mix", "bend", "look"}


def test_a_subclass_is_not_called_unbuilt() -> None:
    class Twice(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.dense(x)

    model = Twice()
    model(np.ones((1, 4), np.float32))
    with pytest.raises(UsageError, match=r"is a subclass, whose inputs.*export"):
        converting.convert(model)


def test_a_plan_becomes_policies_of_layers_and_is_trained_on(attention: Any) -> None:
    plan = converting.convert(attention, policy="all:bf16").plan
    assert plan is not None
    before = np.asarray(attention(X))
    found = policies.apply_plan(attention, plan)
    assert found["dense_2"] == "float32"  # its result is the model's
    assert {v for k, v in found.items() if k != "dense_2"} == {"mixed_bfloat16"}
    assert "multi_head_attention/query" in found
    after = attention(X)
    assert after.dtype == tf.float32
    assert 0 < np.abs(np.asarray(after) - before).max() < np.abs(before).max() / 16
    attention.compile("sgd", "mse")
    attention.fit(X, np.zeros((8, 3), np.float32), verbose=0)
    assert {w.dtype for w in attention.trainable_weights} == {"float32"}


def test_a_plan_may_keep_a_layer_and_be_taken_back(attention: Any) -> None:
    mixed = finecast.Policy.parse("all:bf16")
    kept = replace(mixed, exclude=(re.compile(r".*layer_normalization.*"),))
    low, none = (
        converting.convert(attention, policy=policy).plan for policy in (kept, "none")
    )
    assert low is not None
    assert none is not None
    found = policies.apply_plan(attention, low)
    assert found["layer_normalization"] == "float32"
    assert found["dense"] == "mixed_bfloat16"
    before = np.asarray(attention(X))
    assert set(policies.apply_plan(attention, none).values()) == {"float32"}
    assert np.abs(np.asarray(attention(X)) - before).max() > 0
    assert {layer.compute_dtype for layer in attention.layers} == {"float32"}


def test_plans_of_other_models_are_refused(attention: Any) -> None:
    other = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(2, name="other")])
    plan = converting.convert(other, policy="all:bf16").plan
    assert plan is not None
    with pytest.raises(ModelError, match="names a node the model lacks"):
        policies.apply_plan(attention, plan)
    with pytest.raises(UsageError, match="no Keras model"):
        policies.apply_plan(3, plan)


def test_a_format_without_a_policy_changes_no_layer(attention: Any) -> None:
    plan = converting.convert(attention, policy="all:bf16").plan
    assert plan is not None
    last = max(d.node for d in plan.decisions if "dense_2" in d.node and d.op == "matmul")
    formats = {d.node: Format.TF32 if d.node == last else d.format for d in plan.decisions}
    odd = replace(
        plan, decisions=tuple(replace(d, format=formats[d.node]) for d in plan.decisions)
    )
    with pytest.raises(ModelError, match="Keras has no policy for tf32"):
        policies.apply_plan(attention, odd)
    assert {layer.compute_dtype for layer in attention.layers} == {"float32"}


def test_what_was_never_built_is_refused() -> None:
    with pytest.raises(UsageError, match="is not built"):
        converting.convert(tf.keras.Sequential([layers.Dense(2)]))


def test_tune_returns_the_fp32_model_where_nothing_helps(attention: Any) -> None:
    data = {"tokens": X, "label": np.asarray(attention(X)).argmax(axis=1)}
    tuned = converting.tune(attention, data=data, metric="top1", policy="none")
    assert not tuned.improved
    assert tuned.model.plan is None
    np.testing.assert_allclose(np.asarray(tuned.model(X)), np.asarray(attention(X)), rtol=1e-4)
    assert Format.BF16 not in tuned.plan.formats.values()


def test_what_gives_a_list_of_outputs_still_does(tmp_path: Path) -> None:
    """Called in Python, and as a method of a SavedModel."""
    given = tf.keras.Input((4,), name="x")
    hidden = layers.Dense(16)(given)
    ends = [hidden, *(layers.Dense(size)(hidden) for size in range(1, 12))]
    model = tf.keras.Model(given, ends)
    x = np.ones((2, 4), np.float32)
    sizes = [16, *range(1, 12)]
    assert [y.shape[1] for y in converting.convert(model, policy="all:bf16")(x)] == sizes
    model.export(tmp_path / "m", verbose=False)
    finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    for name in ("m", "low"):
        loaded = tf.saved_model.load(str(tmp_path / name))
        assert [y.shape[1] for y in loaded.serve(x)] == sizes
        by_name = loaded.signatures["serving_default"](x=tf.constant(x))
        assert {n: y.shape[1] for n, y in by_name.items()} == {
            f"output_{i}": size for i, size in enumerate(sizes)
        }


def test_what_gives_a_dict_of_outputs_still_does(tmp_path: Path) -> None:
    given = tf.keras.Input((4,), name="x")
    ends = {"wide": layers.Dense(3)(given), "narrow": layers.Dense(1)(given)}
    model = tf.keras.Model(given, ends)
    x = np.ones((2, 4), np.float32)
    wanted = {"wide": 3, "narrow": 1}
    found = converting.convert(model, policy="all:bf16")(x)
    assert {n: y.shape[1] for n, y in found.items()} == wanted
    model.export(tmp_path / "m", verbose=False)
    finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    found = tf.saved_model.load(str(tmp_path / "low")).serve(x)
    assert {n: y.shape[1] for n, y in found.items()} == wanted
