"""OpenVINO's frontend: what it reads, that it writes what plans say, and what it refuses."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import openvino
import pytest
from openvino import opset13 as op

import finecast
from finecast.data.deviation import expected
from finecast.engines import get_engine
from finecast.errors import EngineError, ModelError, UsageError
from finecast.frontends import openvino as frontend
from finecast.frontends.native_model import rounded, with_roundings, with_switches
from finecast.frontends.openvino.native import OvNative
from finecast.frontends.openvino.reader import read
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.numbers.rounding import round_to
from finecast.planning.edits import cast_count, edits
from finecast.planning.plan import Plan
from finecast.planning.points import SWITCH, Switch
from finecast.rules.policy import Policy
from tests.frontends.openvino_graphs import WIDTH, chain, feeds_of, model_of, random_model, run


def only_types(policy: str) -> Policy:
    """Types alone change: no cast is stated with ops around it."""
    return replace(Policy.parse(policy), keep_ops=True)


def plan_of(model: openvino.Model, policy: str) -> tuple[frontend.OvFile, Plan]:
    file = frontend.from_model(model)
    asked = only_types(policy)
    planner = make_planner(frontend.prepare(file, asked), asked, get_engine("openvino"))
    return file, planner.lowest()


def error(got: Any, wanted: Any) -> float:
    norm = np.linalg.norm(np.asarray(wanted, dtype=np.float64))
    return float(np.linalg.norm(np.asarray(got, dtype=np.float64) - wanted) / (norm or 1.0))


def test_ops_ports_and_constants_are_read() -> None:
    model = chain()
    graph, _ = read(model)
    kinds = {n.name: n.op for n in graph.nodes}
    assert kinds == {
        "first": "matmul", "bias": "add", "relu": "relu", "second": "matmul",
        "softmax": "softmax",
    }  # fmt: skip
    assert [v.name for v in graph.inputs] == ["x"]
    assert [v.name for v in graph.outputs] == ["probabilities"]
    assert graph.inputs[0].shape == ("x.0", WIDTH)
    assert sum(v.constant.size for v in graph.values if v.constant) == 2 * WIDTH**2 + WIDTH
    assert all(n.admits == {Format.FP32, Format.BF16, Format.FP16} for n in graph.nodes)
    assert graph.find("first").attributes["transA"] == 0


def test_reading_leaves_the_model_as_it_was() -> None:
    model = chain()
    feeds = feeds_of(model)
    before = run(model, feeds)
    read(model)
    assert all(op.get_element_type() == openvino.Type.f32 for op in model.outputs)
    for name, array in run(model, feeds).items():
        np.testing.assert_array_equal(array, before[name])


def test_sizes_and_thresholds_do_not_follow_their_op() -> None:
    x = op.parameter([1, 3, 8, 8], np.float32, name="x")
    scales, axes = op.constant(np.array([2, 2], np.float32)), op.constant([2, 3])
    made = op.interpolate(x, scales, "nearest", "scales", axes=axes)
    graph, _ = read(model_of([made], [x]))
    (node,) = graph.nodes
    assert node.follows_in == (True, False, False)
    assert Format.BF16 in node.admits


def test_a_plan_of_everything_states_its_types() -> None:
    model = chain()
    file, plan = plan_of(model, "all:bf16")
    applied = frontend.apply(file, plan)
    assert cast_count(applied.graph, applied.edits) == 0
    graph, _ = read(applied.model)
    assert {n.format for n in graph.nodes if n.op != "cast"} == {Format.BF16}
    assert [p.get_element_type() for p in applied.model.outputs] == [openvino.Type.f32]
    assert applied.model.outputs[0].get_names() == {"y", "probabilities"}
    assert [p.get_any_name() for p in applied.model.inputs] == ["x"]
    stored = [n for n in applied.model.get_ops() if n.get_type_name() == "Constant"]
    assert {n.get_element_type().get_type_name() for n in stored} == {"bf16"}


def test_constants_are_rounded_to_nearest() -> None:
    model = chain()
    file, plan = plan_of(model, "all:bf16")
    graph, binding = read(frontend.apply(file, plan).model)
    given = {v.constant.size: v.constant.read() for v in read(model)[0].values if v.constant}
    found = {v.constant.size: v.constant.read() for v in graph.values if v.constant}
    assert binding.constants
    for size, array in found.items():
        wanted = given[size].astype(ml_dtypes.bfloat16)
        if size == WIDTH:  # of the two matrices each has as many
            np.testing.assert_array_equal(array.reshape(-1), wanted.reshape(-1))


@pytest.mark.parametrize("seed", range(20))
def test_random_models_by_random_plans(seed: int, tmp_path: Path) -> None:
    """What is written loads, keeps names and ports, and has the numbers of its roundings."""
    model = random_model(seed)
    file = frontend.from_model(model)
    graph, _ = read(file.model, digest=file.digest)
    rng = np.random.default_rng(seed)
    policy = Policy.parse("all:bf16")
    engine = get_engine("openvino")
    planner = make_planner(frontend.prepare(file, policy), policy, engine)
    formats = {
        number: Format.BF16
        if Format.BF16 in permission.formats and rng.random() < 0.6
        else Format.FP32
        for number, permission in planner.permissions.items()
    }
    plan = planner.plan(formats, "drawn")
    applied = frontend.apply(file, plan)
    frontend.save(applied.model, tmp_path / "low.xml")
    low = openvino.Core().read_model(tmp_path / "low.xml")

    again = {n.name: n.format for n in read(low)[0].nodes}
    for node in graph.float_nodes:
        if Format.BF16 in planner.permissions[node.id].formats:
            assert again[node.name] is formats[node.id], node.name
    for before, after in zip(
        [*model.inputs, *model.outputs], [*low.inputs, *low.outputs], strict=True
    ):
        assert before.get_names() == after.get_names()
        assert before.get_element_type() == after.get_element_type()
        assert before.get_partial_shape() == after.get_partial_shape()
    decided = expected(graph, formats).decided
    ids = {v.name: v.id for v in graph.outputs}
    feeds = feeds_of(model, seed)
    wanted, got = run(model, feeds), run(low, feeds)
    emulated = run(with_roundings(frontend.roundable(file), applied.edits), feeds)
    for name, exact in wanted.items():
        if ids[name] not in decided:  # else one rounding may decide for another branch
            # Sums in another order may round one step apart, as may what follows them.
            limit = 2 * error(emulated[name], exact) + 2 * Format.BF16.epsilon
            assert error(got[name], exact) <= limit


def test_a_plan_that_changes_nothing_gives_the_same_model() -> None:
    model = chain()
    file, plan = plan_of(model, "none:bf16")
    applied = frontend.apply(file, plan)
    assert applied.edits == ()
    feeds = feeds_of(model)
    for name, array in run(applied.model, feeds).items():
        np.testing.assert_array_equal(array, run(model, feeds)[name])


@pytest.mark.parametrize(
    "fmt", [Format.BF16, Format.FP16, Format.FP8_E4M3, Format.FP8_E5M2, Format.TF32]
)
def test_rounding_by_arithmetic_is_that_of_a_cast(fmt: Format) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    ties = round_to(rng.normal(size=2000).astype(np.float32), fmt) * (1 + fmt.epsilon / 2)
    small = rng.normal(size=2000) * fmt.smallest_normal
    ends = np.array([1, 1.01, 0.99, 1.03, 1.04]) * min(fmt.max, 1e38)
    with np.errstate(all="ignore"):
        numbers = np.concatenate([drawn, ties, small, ends]).astype(np.float32)
    kept = ~(np.abs(numbers) < np.finfo(np.float32).smallest_normal) | (numbers == 0)
    numbers = numbers[kept]
    make = OvNative.copy_of(chain()).op
    x = op.parameter([-1], np.float32, name="x")
    (got,) = run(model_of([rounded(make, x.output(0), fmt)], [x]), {"x": numbers}).values()
    np.testing.assert_array_equal(got, round_to(numbers, fmt))


def test_switches_round_what_they_say() -> None:
    model = chain()
    file = frontend.from_model(model)
    prepared = frontend.prepare(file, Policy.parse("all:bf16"))
    first_op = prepared.graph.find("first").id
    switched = with_switches(
        prepared.roundable(),
        [
            Switch(ports={(first_op, 0): Format.BF16}),
            Switch(ports={(first_op, 1): Format.BF16}),
        ],
    )
    feeds = feeds_of(model)
    (exact,) = run(model, feeds).values()
    off, first, second, both = (
        next(iter(run(switched, {**feeds, SWITCH: np.array(bits)}).values()))
        for bits in ([False, False], [True, False], [False, True], [True, True])
    )
    np.testing.assert_allclose(off, exact, rtol=1e-6)
    low = {"x": round_to(feeds["x"], Format.BF16)}
    np.testing.assert_allclose(first, next(iter(run(model, low).values())), rtol=1e-5)
    assert error(second, exact) > 1e-5
    assert error(both, first) > 1e-5


def test_the_output_that_a_switch_names_is_rounded() -> None:
    """Values are numbered as they are computed, results as they are declared."""
    x = op.parameter([2, WIDTH], np.float32, name="x")
    first = op.tanh(x, name="first")
    second = op.sin(first, name="second")
    for end in (first, second):
        end.output(0).set_names({end.get_friendly_name()})
    model = model_of([second, first], [x])
    prepared = frontend.prepare(frontend.from_model(model), Policy.parse("all:bf16"))
    number = next(k for k, v in enumerate(prepared.graph.outputs) if v.name == "first")
    switched = with_switches(prepared.roundable(), [Switch(outputs={number: Format.BF16})])
    feeds = feeds_of(model)
    exact, got = run(model, feeds), run(switched, {**feeds, SWITCH: np.array([True])})
    np.testing.assert_array_equal(got["first"], round_to(exact["first"], Format.BF16))
    np.testing.assert_array_equal(got["second"], exact["second"])


def test_values_are_shown_by_the_names_of_their_ops() -> None:
    model = chain()
    file = frontend.from_model(model)
    prepared = frontend.prepare(file, Policy.parse("none:bf16"))
    names = prepared.observable()
    assert set(names) == {f"{n.name}:0" for n in prepared.graph.nodes}
    feeds = feeds_of(model)
    shown = run(prepared.with_outputs(["relu:0", "softmax:0"]), feeds)
    (exact,) = run(model, feeds).values()
    np.testing.assert_allclose(shown["softmax:0"], exact, rtol=1e-6)
    assert (shown["relu:0"] >= 0).all()
    assert prepared.static_shapes({"x": (3, WIDTH)})["relu:0"] == (3, WIDTH)


def test_compressed_constants_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "small.xml"
    model = chain()
    openvino.save_model(model, path, compress_to_fp16=True)
    file = frontend.load(path)
    graph, binding = read(file.model)
    assert "cast" not in {n.op for n in graph.nodes}  # it only widens a constant
    assert {c.get_element_type().get_type_name() for c in binding.constants.values()} == {
        "f16"
    }
    policy = only_types("all:bf16")
    planner = make_planner(frontend.prepare(file, policy), policy, get_engine("openvino"))
    second = graph.find("second").id
    formats = {n.id: Format.FP32 if n.id == second else Format.BF16 for n in graph.float_nodes}
    applied = frontend.apply(file, planner.plan(formats, "but one"))
    kinds = [
        n.get_element_type().get_type_name()
        for n in applied.model.get_ordered_ops()
        if n.get_type_name() == "Constant" and n.get_output_shape(0)
    ]
    assert sorted(kinds) == ["bf16", "bf16", "f16"]
    frontend.save(applied.model, tmp_path / "low.xml")
    low, given = tmp_path / "low.bin", file.path.with_suffix(".bin")
    assert low.stat().st_size <= given.stat().st_size


def test_both_files_are_written_or_none(tmp_path: Path) -> None:
    model = tmp_path / "model.xml"
    openvino.save_model(chain(), model, compress_to_fp16=False)
    (tmp_path / "low.bin").write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="output exists"):
        finecast.convert(model, tmp_path / "low.xml", "all:bf16")
    assert not (tmp_path / "low.xml").exists()
    assert (tmp_path / "low.bin").read_text(encoding="utf-8") == "mine"


def test_the_weights_of_the_model_are_not_written_over(tmp_path: Path) -> None:
    model = tmp_path / "model.xml"
    openvino.save_model(chain(), model, compress_to_fp16=False)
    weights = model.with_suffix(".bin").read_bytes()
    renamed = tmp_path / "model.XML"
    with pytest.raises(UsageError):
        finecast.convert(model, renamed, "all:bf16", force=True)
    assert model.with_suffix(".bin").read_bytes() == weights


def test_inputs_can_be_declared_low(tmp_path: Path) -> None:
    model, low = tmp_path / "model.xml", tmp_path / "low.xml"
    openvino.save_model(chain(), model, compress_to_fp16=False)
    policy = Policy.parse("all:bf16")
    finecast.convert(
        model, low, Policy(scope=policy.scope, formats=policy.formats, io_low=True)
    )
    found = openvino.Core().read_model(low)
    assert [p.get_element_type() for p in found.inputs] == [openvino.Type.bf16]
    assert [p.get_element_type() for p in found.outputs] == [openvino.Type.bf16]


def test_the_size_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    model = chain()
    openvino.save_model(model, tmp_path / "model.xml", compress_to_fp16=False)
    written = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert frontend.size_bytes(model) == written


def test_an_ov_model_in_memory(tmp_path: Path) -> None:
    model = chain()
    written = finecast.convert(model, tmp_path / "low.xml", "all:bf16")
    assert written.size_bytes[1] == sum(p.stat().st_size for p in tmp_path.iterdir())
    done = finecast.convert(model, None, "all:bf16")
    assert isinstance(done.model, openvino.Model)
    assert done.verified.relative_error is not None
    assert 0 < done.verified.relative_error < 8 * Format.BF16.unit_roundoff
    assert model.outputs[0].get_names() == {"y", "probabilities"}
    assert {n.get_element_type() for n in model.get_ops()} == {openvino.Type.f32}


def test_every_call_of_a_model_with_memory_is_a_first_one() -> None:
    x = op.parameter([1, WIDTH], np.float32, name="x")
    before = op.read_value(op.constant(np.zeros((1, WIDTH), np.float32)), "memory")
    total = op.add(x, before)
    kept = op.assign(total, "memory")
    product = op.matmul(total, op.constant(np.eye(WIDTH, dtype=np.float32)), False, False)
    make: Any = openvino.Model
    model = make([op.result(product)], [kept], [x], "net")
    done = finecast.convert(model, None, "all:bf16")
    assert done.plan.counts == {"bf16": 2}
    session = finecast.load(done.model).reference()
    feeds = {"x": np.ones((1, WIDTH), np.float32)}
    (first,), (second,) = (session.run(feeds).values() for _ in range(2))
    np.testing.assert_array_equal(first, second)
    (written,) = done.model.get_sinks()
    assert written.get_input_element_type(0) == openvino.Type.f32


def test_another_engine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    openvino.save_model(chain(), path, compress_to_fp16=False)
    with pytest.raises(UsageError, match="onnxruntime") as caught:
        finecast.convert(path, tmp_path / "low.xml", "all:bf16", engine="onnxruntime")
    assert "use engine openvino" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.xml", "an OpenVINO IR"),
        ("a.pb", "a frozen GraphDef"),
        ("a.tflite", "TensorFlow Lite"),
    ],
)
def test_what_cannot_be_read_says_what_it_was_taken_for(
    name: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=kind) as caught:
        finecast.inspect(path)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


def test_ir_without_its_weights_says_where_they_belong(tmp_path: Path) -> None:
    path = tmp_path / "model.xml"
    openvino.save_model(chain(), path, compress_to_fp16=False)
    (tmp_path / "model.bin").unlink()
    with pytest.raises(ModelError) as caught:
        finecast.inspect(path)
    assert "put model.bin beside it" in caught.value.fix


def test_a_folder_that_is_no_saved_model(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    with pytest.raises(UsageError, match=r"saved_model\.pb"):
        finecast.inspect(tmp_path / "saved")
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"\x00\x01")
    with pytest.raises(ModelError, match="SavedModel"):
        finecast.inspect(tmp_path / "saved")


def test_keras_files_without_keras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "keras", None)
    path = tmp_path / "a.keras"
    path.write_bytes(b"PK")
    with pytest.raises(EngineError, match="Keras") as caught:
        finecast.inspect(path)
    assert "export" in str(caught.value)


def test_where_the_result_goes_is_named_for_its_kind(tmp_path: Path) -> None:
    model = tmp_path / "model.xml"
    openvino.save_model(chain(), model, compress_to_fp16=False)
    for name in ("low.onnx", "low.pb", "low", "low.bin"):
        with pytest.raises(UsageError, match=r"low\.xml"):
            finecast.convert(model, tmp_path / name, "all:bf16")


def test_no_edits_are_made_twice() -> None:
    graph, _ = read(chain())
    formats = {n.id: Format.BF16 for n in graph.float_nodes}
    casts = [e for e in edits(graph, formats) if type(e).__name__ == "InsertCast"]
    assert len(casts) == 2  # the input's, and the output's


def test_what_is_written_has_openvino_s_own_suffix(tmp_path: Path) -> None:
    """It reads files of any case, and writes those in small letters alone."""
    finecast.convert(chain(), tmp_path / "low.xml", "all:bf16")
    for part in (*tmp_path.iterdir(),):
        part.rename(part.with_suffix(part.suffix.upper() if part.suffix == ".xml" else ".bin"))
    assert finecast.inspect(tmp_path / "low.XML").parameters
    with pytest.raises(UsageError, match=r"name it .*other\.xml"):
        finecast.convert(chain(), tmp_path / "other.XML", "all:bf16")


def test_a_paddle_paddle_model(tmp_path: Path) -> None:
    """softmax(relu(x @ w + b) @ v + c) by PaddlePaddle 3.3.1, as ``paddle.jit.save`` wrote it.

    With ``FLAGS_enable_pir_api=0``: newer files are JSON, which OpenVINO does not read.
    """
    path = Path(__file__).parent / "data" / "paddle" / "mlp.pdmodel"
    done = finecast.convert(path, tmp_path / "mlp.xml", "all:bf16")
    assert done.verified.relative_error is not None
    assert 0 < done.verified.relative_error < 8 * Format.BF16.unit_roundoff
    kinds = [n.op for n in read(frontend.load(path).model)[0].nodes]
    assert kinds.count("matmul") == 2
    (low,) = run(tmp_path / "mlp.xml", {"x": np.ones((3, 8), np.float32)}).values()
    assert low.shape == (3, 4)
    shutil.copy(path, tmp_path)  # without the weights that belong to it
    with pytest.raises(ModelError, match=r"cannot be read as a PaddlePaddle model"):
        finecast.convert(tmp_path / path.name, tmp_path / "low.xml", "all:bf16")


def test_a_model_that_openvino_itself_does_not_run_is_not_the_conversion_s_fault(
    tmp_path: Path,
) -> None:
    """As torch.jit.script gives it: not even the number of dimensions is known."""
    x = op.parameter(openvino.PartialShape.dynamic(), np.float32, name="x")
    path = tmp_path / "net.xml"
    openvino.save_model(model_of([op.matmul(x, x, False, True)], [x]), path)
    with pytest.raises(EngineError, match="as it was given, before any conversion") as caught:
        finecast.convert(path, tmp_path / "low.xml", "all:bf16")
    assert "dynamic rank" in str(caught.value)
    assert "model.reshape" in str(caught.value)
    assert "verify=False" in str(caught.value)
    assert not (tmp_path / "low.xml").exists()


def hard_sigmoid_or_selu(kind: str, scaled: Any) -> Any:
    first, second = (op.constant(np.float32(n)) for n in (0.3, 0.77))
    return getattr(op, kind)(scaled, first, second, name="made")


def swish(shape: tuple[int, ...], scaled: Any) -> Any:
    """OpenVINO fuses these ops to a Swish."""
    beta = op.constant(np.full(shape, 0.77, np.float32))
    return op.multiply(scaled, op.sigmoid(op.multiply(scaled, beta, name="made")))


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (partial(hard_sigmoid_or_selu, "hard_sigmoid"), 0),
        (partial(hard_sigmoid_or_selu, "selu"), 0),
        (partial(swish, ()), 1),
        (partial(swish, (1, 1)), 1),
        (partial(swish, (1, WIDTH)), 1),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_parameters_that_have_to_be_constants_are_probed(
    make: Callable[[Any], Any], first: int, inside: bool
) -> None:
    """OpenVINO loads no HardSigmoid, Selu or Swish whose parameters an input could change."""
    x = op.parameter([-1, WIDTH], np.float32, name="x")
    made = make(op.multiply(x, op.constant(np.float32(1.7)), name="scaled"))
    ends = [op.relu(made, name="end")] if inside else [made]
    model = model_of(ends, [x])
    copy = frontend.roundable(frontend.from_model(model))
    graph = copy.graph
    number = next(n.id for n in graph.nodes if n.name == "made")
    read = range(first, len(graph.nodes[number].inputs))
    ports = {(number, index): Format.BF16 for index in read}
    low = with_switches(copy, [Switch(ports=ports)])
    given = np.linspace(-4, 4, 5 * WIDTH, dtype=np.float32).reshape(5, WIDTH)
    engine = get_engine("openvino")
    session, name = engine.load(low), graph.outputs[0].name
    feeds = {graph.inputs[0].name: given}
    off = session.run({**feeds, SWITCH: np.array([False])})[name]
    on = session.run({**feeds, SWITCH: np.array([True])})[name]
    assert np.allclose(off, engine.load(model).run(feeds)[name], rtol=1e-6, atol=1e-6)
    assert 0 < error(on, off) < 0.01
