"""Plans stated by OpenVINO's own hint: what is planned in fp32 keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino
import pytest
from openvino import opset13 as op

import finecast
from finecast.engines import get_engine
from finecast.errors import EngineError, ModelError
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino.changes import hint_of, marked
from finecast.frontends.replaying import check_made_for
from finecast.native.hint import check_marks
from finecast.native.openvino import OvModel
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy, patterns
from tests.frontends.openvino_graphs import chain, model_of
from tests.kernels import skip_without_bf16

SHAPE = [1, 8, 12, 12]
FEEDS = {"x": np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)}


def convolutions(count: int = 4) -> openvino.Model:
    """``c0``, ``c1`` ...: convolutions with a relu behind each."""
    rng = np.random.default_rng(0)
    value = x = op.parameter(SHAPE, np.float32, name="x")
    for number in range(count):
        weights = op.constant((rng.normal(size=(8, 8, 3, 3)) / 8).astype(np.float32))
        ones, name = [1, 1], f"c{number}"
        value = op.relu(op.convolution(value, weights, ones, ones, ones, ones, name=name))
        value.set_friendly_name(f"r{number}")
    value.output(0).set_names({"y"})
    return model_of([value], [x])


def hint_runs() -> bool:
    """Whether OpenVINO runs models under its hint: not where oneDNN is held to AVX2."""
    engine = get_engine("openvino")
    try:
        engine.load_hinted(convolutions(), Format.BF16).run(FEEDS)
    except EngineError:
        return False
    return True


needs_hint = pytest.mark.skipif(not hint_runs(), reason="OpenVINO's hint does not run here")


def planned(model: openvino.Model, *kept: str) -> tuple[frontend.OvFile, Planner]:
    policy = Policy.parse("all:bf16")
    policy = replace(policy, by_hint=True, exclude=patterns(kept, option=""))
    file = frontend.from_model(model)
    return file, make_planner(frontend.prepare(file, policy), policy, get_engine("openvino"))


def computed(model: openvino.Model | Path) -> dict[str, str]:
    """The format of the kernel of each op, as the engine loads the model."""
    engine = get_engine("openvino")
    kernels = engine.load_hinted(model, Format.FP32).kernel_formats()
    return {name: kernel.computed for kernel in kernels for name in kernel.ops}


@needs_hint
def test_ops_planned_in_fp32_keep_it_and_the_others_are_lowered(tmp_path: Path) -> None:
    skip_without_bf16()
    file, planner = planned(convolutions(), "^[cr]1$")
    low = frontend.apply(file, planner.lowest()).model
    frontend.save(low, tmp_path / "low.xml")
    for given in (
        low,
        low.clone(),
        tmp_path / "low.xml",
        frontend.load(tmp_path / "low.xml").model,
    ):
        formats = computed(given)
        assert {formats[f"c{n}"] for n in (0, 2, 3)} == {"bf16"}
        assert formats["c1"] == "fp32"
    kinds = {
        o.get_element_type().get_type_name() for op_ in low.get_ops() for o in op_.outputs()
    }
    assert kinds == {"f32"}, "the model itself has no type but fp32"


@needs_hint
def test_outputs_are_those_of_the_hint_where_nothing_is_kept() -> None:
    skip_without_bf16()
    model = convolutions()
    file, planner = planned(model)
    low = frontend.apply(file, planner.lowest()).model
    engine = get_engine("openvino")
    ours = engine.load(low).run(FEEDS)["y"]
    assert np.array_equal(ours, engine.load_hinted(model, Format.BF16).run(FEEDS)["y"])
    assert not np.array_equal(ours, engine.load(model).run(FEEDS)["y"])


def test_marks_that_the_user_made_stay(tmp_path: Path) -> None:
    file, planner = planned(convolutions(), "c1")
    frontend.save(frontend.apply(file, planner.lowest()).model, tmp_path / "theirs.xml")
    text = (tmp_path / "theirs.xml").read_text()
    assert text.count('"precise"') == len(marked(frontend.load(tmp_path / "theirs.xml").model))
    theirs = openvino.Core().read_model(tmp_path / "theirs.xml")
    for key in list(theirs.get_rt_info()):  # no notes: another tool made the marks
        del theirs.get_rt_info()[key]
    again, planner = planned(theirs, "c2")
    low = frontend.apply(again, planner.lowest()).model
    assert {"c1", "c2"} <= marked(low)
    frontend.save(low, tmp_path / "low.xml")
    read = frontend.load(tmp_path / "low.xml")
    assert "c1" in marked(read.model)


def test_names_that_xml_does_not_permit_are_marked(tmp_path: Path) -> None:
    """OpenVINO writes and reads control characters in names."""
    model = convolutions()
    names = {"c1": "a\nb\tc\r", "r1": "\x01<&>\"'\x1f", "c2": "ünïcödé/日本"}
    for one in model.get_ops():
        one.set_friendly_name(names.get(one.get_friendly_name(), one.get_friendly_name()))
    file, planner = planned(model, *(re.escape(name) for name in names.values()))
    low = frontend.apply(file, planner.lowest()).model
    assert marked(low) >= set(names.values())
    frontend.save(low, tmp_path / "low.xml")
    assert marked(frontend.load(tmp_path / "low.xml").model) == marked(low)
    assert "c0" not in marked(low)


@needs_hint
def test_a_lost_mark_is_an_error() -> None:
    """OpenVINO replaces a product and its bias by one op without marks."""
    file, planner = planned(chain(), "^first$")
    low = frontend.apply(file, planner.lowest()).model
    engine = get_engine("openvino")
    session = engine.load_hinted(low, Format.FP32)
    if computed(low)["first"] == "fp32":
        check_marks(planner.lowest(), planner.graph, session)
        return
    with pytest.raises(EngineError, match=r"'first' is planned in fp32 and runs in bf16"):
        check_marks(planner.lowest(), planner.graph, session)


@needs_hint
def test_marks_in_bodies_are_not_taken_for_kept() -> None:
    """OpenVINO loses the mark of a product with a bias in a body, too, and shows no kernel."""
    inner = op.parameter([4, 16], np.float32, name="inner")
    weights = op.constant(np.eye(16, dtype=np.float32) / 3)
    product = op.matmul(inner, weights, False, False, name="product")
    biased = op.add(product, op.constant(np.ones((1, 16), np.float32)), name="biased")
    other = op.parameter([4, 16], np.float32, name="other")
    x = op.parameter([4, 16], np.float32, name="x")
    decides = op.parameter([], np.bool_, name="decides")
    branch = op.if_op(decides.output(0))
    branch.set_then_body(model_of([biased], [inner]))
    branch.set_else_body(model_of([op.relu(other)], [other]))
    branch.set_input(x.output(0), inner, other)
    result = branch.set_output(
        branch.get_then_body().get_results()[0], branch.get_else_body().get_results()[0]
    )
    after = op.matmul(result, op.constant(np.eye(16, dtype=np.float32)), False, False)
    file, planner = planned(model_of([after], [decides, x]), "^product$")
    plan = planner.lowest()
    assert plan.formats["product"] is Format.FP32
    engine = get_engine("openvino")
    session = engine.load_hinted(frontend.apply(file, plan).model, Format.FP32)
    with pytest.raises(EngineError, match=r"'product' is planned in fp32 in a body") as raised:
        check_marks(plan, planner.graph, session)
    assert "leave --by-hint out" in raised.value.fix


@needs_hint
def test_a_product_whose_bias_ends_the_model_is_checked() -> None:
    """Kernels of outputs have the names of the ops that compute them."""
    x = op.parameter([4, 16], np.float32, name="x")
    weights = op.constant(np.eye(16, dtype=np.float32) / 3)
    product = op.matmul(x, weights, False, False, name="product")
    ends = op.add(product, op.constant(np.ones((1, 16), np.float32)), name="ends")
    engine = get_engine("openvino")
    for kept, is_lost in (("^product$", True), ("^ends$", False)):
        model = model_of([ends], [x])
        model.get_results()[0].set_friendly_name("ends/sink_port_0")  # as of ONNX models
        file, planner = planned(model, kept)
        plan = planner.lowest()
        low = frontend.apply(file, plan).model
        session = engine.load_hinted(low, Format.FP32)
        formats = computed(low)
        assert formats["product"] == formats["ends"]
        if is_lost and formats["product"] != "fp32":
            with pytest.raises(EngineError, match=r"'product' is planned in fp32 and runs in"):
                check_marks(plan, planner.graph, session)
        else:
            check_marks(plan, planner.graph, session)


def test_a_plan_by_hint_that_lowers_nothing_leaves_the_model_alone() -> None:
    file, planner = planned(convolutions(), ".")
    plan = planner.lowest()
    assert plan.by_hint
    assert not plan.lowers
    model = frontend.apply(file, plan).model
    assert not marked(model)
    assert not hint_of(model)
    engine = get_engine("openvino")
    check_marks(plan, planner.graph, engine.load_hinted(model, Format.FP32))


@pytest.mark.parametrize(
    "change",
    [
        lambda p: replace(p, io={"x": Format.BF16}),
        lambda p: replace(
            p,
            decisions=(replace(p.decisions[0], format=Format.FP16), *p.decisions[1:]),
        ),
    ],
)
def test_a_plan_that_no_hint_states_is_refused(change: Callable[[Plan], Plan]) -> None:
    file, planner = planned(convolutions())
    with pytest.raises(ModelError, match="no precision hint can express the plan"):
        frontend.apply(file, change(planner.lowest()))


def test_a_plan_by_hint_gives_no_model_of_another_library() -> None:
    file, planner = planned(convolutions())
    plan: Plan = planner.lowest()
    assert plan.by_hint
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ModelError, match=r"whose name ends in \.xml"):
        check_made_for(plan, file.digest, "m.onnx")


@needs_hint
def test_casts_are_not_computed_under_a_hint_that_was_noted_alone() -> None:
    theirs = convolutions()
    theirs.set_rt_info("bf16", ["finecast", "precision_hint"])  # and no policy
    low = finecast.convert(theirs, policy="all:bf16").model
    assert not hint_of(low)


@needs_hint
def test_devices_are_emulated_beside_fp32() -> None:
    """The reference of a model that was converted by hint is the model without the hint."""
    skip_without_bf16()
    model = convolutions()
    policy = replace(Policy.parse("all:bf16"), by_hint=True)
    low = finecast.convert(model, policy=policy).model
    given, before = finecast.load(low), finecast.load(model)
    assert isinstance(given, OvModel)
    assert isinstance(before, OvModel)
    wanted = before.reference().run(FEEDS)["y"]
    assert np.array_equal(given.reference().run(FEEDS)["y"], wanted)
    assert not np.array_equal(get_engine("openvino").load(low).run(FEEDS)["y"], wanted)
