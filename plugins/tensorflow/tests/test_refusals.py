"""What cannot be converted: one error that says what was found, and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.cli import main
from finecast.errors import ExitCode, FinecastError, ModelError, UsageError
from finecast.native.opening import opened
from plugins.tensorflow.tests.models import Model, of_function, tf

ROWS = tf.TensorSpec([None, 16], tf.float32, name="x")


def refused(path: Path, message: str) -> None:
    with pytest.raises(FinecastError, match=message) as caught:
        finecast.convert(path, None, "all:bf16")
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def test_several_signatures_that_differ(tmp_path: Path) -> None:
    module = tf.Module()
    module.one = tf.function(lambda x: {"y": x @ tf.ones([16, 4])}, input_signature=[ROWS])
    module.two = tf.function(lambda x: {"y": x @ tf.ones([16, 8])}, input_signature=[ROWS])
    signatures = {"scores": module.one, "features": module.two}
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=signatures)
    refused(tmp_path / "m", r"several signatures that differ: .*'scores'.*signatures=")
    with pytest.raises(ModelError, match=r"several signatures.*'features', 'scores'"):
        finecast.convert(tmp_path / "m", tmp_path / "low.xml", "all:bf16")


def test_openvino_takes_the_usual_signature_and_says_so(tmp_path: Path) -> None:
    module = tf.Module()
    module.one = tf.function(lambda x: {"y": x @ tf.ones([16, 4])}, input_signature=[ROWS])
    module.two = tf.function(lambda x: {"y": x @ tf.ones([16, 8])}, input_signature=[ROWS])
    names = {"serving_default": module.one, "again": module.one, "features": module.two}
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=names)
    done = finecast.convert(tmp_path / "m", tmp_path / "low.xml", "all:bf16")
    told = (
        r"'serving_default' was taken, not 'features'; for another save one alone.*signatures="
    )
    (said,) = (warning for warning in done.warnings if "signature" in warning)
    assert not [warning for warning in done.warnings if "variables" in warning]
    assert re.search(told, said)
    subject = opened(tmp_path / "m", output=tmp_path / "low.xml").subject(None, None)
    assert re.search(told, subject.told[0])


@pytest.mark.parametrize("output", ["low", "low.xml"])
def test_a_model_that_changes_its_variables(tmp_path: Path, output: str) -> None:
    """OpenVINO reads variables as constants: ``y`` would be the same for each ``x``."""
    state = tf.Variable(tf.zeros([4, 16]))

    def call(x: Any) -> dict[str, Any]:
        state.assign(tf.tanh(x))
        return {"y": state @ tf.ones([16, 4])}

    of_function(tmp_path / "m", call, [tf.TensorSpec([4, 16], tf.float32, name="x")], [state])
    told = r"changes its variables as it runs \(AssignVariableOp\).*takes state as an input"
    with pytest.raises(ModelError, match=told):
        finecast.convert(tmp_path / "m", tmp_path / output, "all:bf16")


def _flipping() -> Any:
    """A Keras model with random preprocessing, which draws in what Keras exports, too."""
    keras = tf.keras
    image = keras.Input((8, 8, 3))
    return keras.Model(image, keras.layers.Conv2D(4, 3)(keras.layers.RandomFlip()(image)))


@pytest.mark.parametrize("output", ["low", "low.xml"])
def test_random_layers_of_a_saved_model_are_named(tmp_path: Path, output: str) -> None:
    _flipping().export(str(tmp_path / "m"), verbose=False)
    told = r"for the random numbers of \S*random_flip\S*.*training=False"
    with pytest.raises(ModelError, match=told):
        finecast.convert(tmp_path / "m", tmp_path / output, "all:bf16")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("from_file", [False, True])
def test_random_layers_do_nothing_in_inference(tmp_path: Path, from_file: bool) -> None:
    model, x = _flipping(), np.random.default_rng(0).normal(size=(4, 8, 8, 3))
    path = tmp_path / "m.keras"
    model.save(path)
    finecast.convert(path if from_file else model, tmp_path / "low.xml", "all:bf16")
    import openvino

    (found,) = openvino.Core().compile_model(tmp_path / "low.xml", "CPU")([x]).values()
    np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=0, atol=2**-5)


def test_what_openvino_misreads_tensorflow_converts(tmp_path: Path) -> None:
    """A dilated convolution in groups; the error says how to do without OpenVINO."""
    image = tf.keras.Input((8, 8, 4))
    result = tf.keras.layers.Conv2D(4, 3, groups=2, dilation_rate=2)(image)
    tf.keras.Model(image, result).export(str(tmp_path / "m"), verbose=False)
    with pytest.raises(
        ModelError, match="name the output as a folder, which TensorFlow reads"
    ):
        finecast.convert(tmp_path / "m", tmp_path / "low.xml", "all:bf16")
    done = finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    assert done.verified.relative_error == pytest.approx(2**-8, abs=2**-8)


def test_a_model_that_calls_python(tmp_path: Path) -> None:
    def call(x: Any) -> dict[str, Any]:
        return {"y": tf.ensure_shape(tf.py_function(lambda v: v, [x], tf.float32), [None, 16])}

    of_function(tmp_path / "m", call, [ROWS])
    refused(tmp_path / "m", r"calls Python \(EagerPyFunc\)")


def test_two_names_of_one_function_are_no_two_functions(tmp_path: Path) -> None:
    module = tf.Module()
    module.one = tf.function(lambda x: {"y": x @ tf.ones([16, 4])}, input_signature=[ROWS])
    signatures = {"scores": module.one, "serving_default": module.one}
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=signatures)
    finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    assert set(tf.saved_model.load(str(tmp_path / "low")).signatures) == set(signatures)


def test_no_signature(tmp_path: Path) -> None:
    tf.saved_model.save(tf.Module(), str(tmp_path / "m"))
    refused(tmp_path / "m", r"has no signatures.*model.export")
    with pytest.raises(ModelError, match=r"has no signatures.*model.export"):
        finecast.convert(tmp_path / "m", tmp_path / "low.xml", "all:bf16")


def test_text(tmp_path: Path) -> None:
    spec = tf.TensorSpec([None], tf.string, name="sentence")
    model = of_function(tmp_path / "m", lambda s: {"length": tf.strings.length(s)}, [spec])
    refused(model.path, r"input 'sentence' is text.*plain arrays of numbers")


def test_text_in_a_keras_file(tmp_path: Path) -> None:
    words = tf.keras.layers.TextVectorization(10, output_sequence_length=4)
    words.adapt(["some words", "more"])
    sentence = tf.keras.Input((1,), dtype="string", name="sentence")
    tf.keras.Model(sentence, words(sentence)).save(tmp_path / "m.keras")
    refused(tmp_path / "m.keras", r"input 'sentence' is text.*m\.keras")


def test_parts_of_a_ragged_tensor_need_data_to_run_on(tmp_path: Path) -> None:
    """A signature takes their parts as plain arrays, of which random ones do not fit."""
    module = tf.Module()

    def call(rows: Any) -> dict[str, Any]:
        return {"y": tf.matmul(tf.reduce_sum(rows, axis=1)[:, None], tf.ones([1, 4]))}

    ragged = tf.RaggedTensorSpec([None, None], tf.float32)
    module.call = tf.function(call, input_signature=[ragged])
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.call)
    done = finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    assert done.verified.relative_error is None
    assert "give --data" in done.verified.note
    parts = finecast.load(tmp_path / "m").reference().inputs
    values, splits = (s.name for s in parts)
    rows = {values: np.ones(3, np.float32), splits: np.array([0, 1, 3])}
    done = finecast.convert(tmp_path / "m", None, "all:bf16", data=[rows])
    assert done.verified.relative_error is not None


def test_a_look_up_table(tmp_path: Path) -> None:
    keys, values = tf.constant([1, 2], tf.int64), tf.constant([0.5, 0.25])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0.0)
    module = tf.Module()
    module.table = table
    spec = tf.TensorSpec([None], tf.int64, name="ids")
    module.call = tf.function(lambda i: {"y": table.lookup(i)}, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "m"), signatures=module.call)
    refused(tmp_path / "m", "table or another resource")


def test_loops_of_tensorflow_1(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        tf.compat.v1.disable_control_flow_v2()
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        y = tf.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v * 2), (0, x))[1]
        tf.compat.v1.enable_control_flow_v2()
        with tf.compat.v1.Session() as session:
            tf.compat.v1.saved_model.simple_save(
                session, str(tmp_path / "m"), {"x": x}, {"y": y}
            )
    refused(tmp_path / "m", r"loops of TensorFlow 1.*enable_control_flow_v2")


def test_a_saved_model_of_a_tensorflow_1_session_is_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None, 4], name="x")
        w = tf.compat.v1.get_variable("w", initializer=np.eye(4, dtype=np.float32) * 2)
        y = tf.matmul(x, w)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.saved_model.simple_save(
            session, str(tmp_path / "m"), {"features": x}, {"out": y}
        )
        with pytest.raises(UsageError, match=r"a session of TensorFlow 1.*simple_save"):
            finecast.load(session)
    capfd.readouterr()
    caplog.clear()
    finecast.convert(tmp_path / "m", tmp_path / "low", "all:bf16")
    # TensorFlow warns that it cannot serialize the variables of such a graph.
    assert "serializ" not in capfd.readouterr().err + caplog.text
    function = tf.saved_model.load(str(tmp_path / "low")).signatures["serving_default"]
    found = function(features=tf.ones([2, 4]))
    np.testing.assert_array_equal(found["out"].numpy(), np.full((2, 4), 2, np.float32))


def test_more_weights_than_a_graph_holds(
    mlp: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from finecast_tensorflow.frontend import model

    monkeypatch.setattr(model, "_MOST_BYTES", 3000)  # of 3200 bytes of weights
    refused(mlp.path, r"weights of 0.0 GB.*holds 2 GB of constants.*-o NAME.xml")
    finecast.convert(mlp.path, tmp_path / "low.xml", "all:bf16")
    monkeypatch.setattr(model, "_MOST_BYTES", 3300)  # which the graph around them is beyond
    with pytest.raises(ModelError, match="holds 2 GB of constants"):
        finecast.convert(mlp.path, tmp_path / "same", "none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["low.bin", "low.xml", "mlp"]


def test_a_custom_op(tmp_path: Path) -> None:
    from finecast_tensorflow.frontend.loading import of_graph_def

    graph = tf.compat.v1.GraphDef()
    graph.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    graph.node.add(name="y", op="MyOwnOp", input=["x"])
    with pytest.raises(ModelError, match=r"custom op 'MyOwnOp'.*tf.load_op_library"):
        of_graph_def(graph, ["x"], ["y"])


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    refused(tmp_path / "m", r"a directory, and no SavedModel.*saved_model.pb")


def test_what_does_not_apply_is_said(mlp: Model, tmp_path: Path) -> None:
    for given, message in (
        ({"external_data": True}, "does not apply to SavedModels"),
        ({"from_type": "fp64"}, "does not apply to SavedModels.*save the model in fp32"),
        ({"engine": "onnxruntime"}, "does not run models of TensorFlow"),
    ):
        with pytest.raises(FinecastError, match=message):
            finecast.convert(mlp.path, tmp_path / "low", "all:bf16", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "low").exists()


@pytest.mark.parametrize("verb", ["convert", "tune"])
def test_the_command_line_ends_with_one_line(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    given = [verb, str(tmp_path / "m"), "-o", str(tmp_path / "low")]
    assert main(given) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "no SavedModel" in said
    assert "Traceback" not in said
