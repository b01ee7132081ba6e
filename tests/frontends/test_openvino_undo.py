"""OpenVINO models that were converted are taken back before they are converted anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13 as op

import finecast
from finecast.data.deviation import expected
from finecast.engines import get_engine
from finecast.errors import ModelError
from finecast.frontends import openvino as frontend
from finecast.frontends.native_model import with_roundings
from finecast.frontends.openvino.bodies import every_op
from finecast.frontends.openvino.changes import PLAN_KEY, changes_of
from finecast.frontends.openvino.reader import read
from finecast.frontends.openvino.undo import original
from finecast.native.observing import observe
from finecast.native.planning import make_planner
from finecast.numbers.formats import Format
from finecast.planning.edits import ConvertConstant
from finecast.planning.planner import Planner
from finecast.rules import Context, permit
from finecast.rules.policy import Policy
from tests.frontends.openvino_graphs import WIDTH, chain, feeds_of, model_of, random_model, run
from tests.frontends.test_openvino_bodies import MODELS
from tests.kernels import skip_without_int8

LOW = "all:bf16"


def saved(model: openvino.Model, path: Path) -> frontend.OvFile:
    frontend.save(model, path)
    return frontend.load(path)


def planned(model: openvino.Model, policy: Policy) -> tuple[frontend.OvFile, Planner]:
    file = frontend.from_model(model)
    return file, make_planner(frontend.prepare(file, policy), policy, get_engine("openvino"))


def structure(model: openvino.Model) -> list[tuple[str, ...]]:
    """Each op with what it reads, and its type."""
    return sorted(
        (
            made.get_friendly_name(),
            made.get_type_name(),
            *(v.get_node().get_friendly_name() for v in made.input_values()),
            *(p.get_element_type().get_type_name() for p in made.outputs()),
        )
        for made in every_op(model)
    )


@pytest.mark.parametrize("seed", range(10))
def test_what_a_random_plan_changed_is_taken_back(seed: int, tmp_path: Path) -> None:
    policy = Policy.parse(LOW)
    model = random_model(seed)
    file, planner = planned(model, policy)
    rng = np.random.default_rng(seed)
    formats = {
        number: Format.BF16
        if Format.BF16 in permission.formats and rng.random() < 0.6
        else Format.FP32
        for number, permission in planner.permissions.items()
    }
    applied = frontend.apply(file, planner.plan(formats, "drawn"))
    low = saved(applied.model, tmp_path / "low.xml")
    back = original(low.model, "all:fp16")
    assert structure(back) == structure(file.model)
    assert not back.has_rt_info(list(PLAN_KEY))
    for before, after in zip(file.model.outputs, back.outputs, strict=True):
        assert before.get_names() == after.get_names()
    rounded = {e.value for e in applied.edits if isinstance(e, ConvertConstant)}
    if not rounded:
        feeds = feeds_of(model, seed)
        got = run(back, feeds)
        for name, exact in run(file.model, feeds).items():
            np.testing.assert_array_equal(got[name], exact)


@pytest.mark.parametrize("seed", range(10))
def test_codes_are_stated_and_taken_back(seed: int, tmp_path: Path) -> None:
    """int8 wherever the rules permit it, fused or not: its numbers are those of arithmetic."""
    skip_without_int8()
    policy = Policy.parse("all:int8")
    model = random_model(seed)
    file = frontend.from_model(model)
    prepared = frontend.prepare(file, policy)
    feeds = feeds_of(model, seed)
    context = Context(
        graph=prepared.graph,
        policy=policy,
        facts=observe(prepared, lambda: [feeds]),
        engine="openvino",
        casts_around=frozenset({Format.INT8}),
    )
    planner = Planner(
        graph=prepared.graph, policy=policy, permissions=permit(context), engine="openvino"
    )
    applied = frontend.apply(file, replace(planner, opset=lambda _: 0).lowest(Format.INT8))
    low = saved(applied.model, tmp_path / "low.xml")
    assert structure(original(low.model, "all:fp16")) == structure(file.model)
    wanted, got = run(model, feeds), run(low.model, feeds)
    emulated = run(with_roundings(frontend.roundable(file), applied.edits), feeds)
    decided = expected(prepared.graph, dict.fromkeys(planner.permissions, Format.BF16)).decided
    ids = {v.name: v.id for v in prepared.graph.outputs}
    for name, exact in wanted.items():
        if ids[name] not in decided:  # else one rounding may decide for another branch
            # A number between two codes may become either: a step of 255 for each op.
            limit = 2 * error(emulated[name], exact) + 1e-2
            assert error(got[name], exact) <= limit


def error(got: Any, wanted: Any) -> float:
    norm = float(np.linalg.norm(wanted))
    return float(np.linalg.norm(got - wanted)) / (norm or 1.0)


def test_a_conversion_to_another_policy_starts_from_the_model_before(tmp_path: Path) -> None:
    model, low, again = (tmp_path / f"{n}.xml" for n in ("model", "low", "again"))
    openvino.save_model(chain(), model, compress_to_fp16=False)
    done = finecast.convert(model, low, LOW)
    file = frontend.load(low)
    assert file.converted == LOW
    assert str(file.model.get_rt_info(list(PLAN_KEY)).astype(str)) == done.plan.digest
    other = finecast.convert(low, again, "all:fp16")
    assert "an earlier conversion to all:bf16 was taken back" in other.warnings
    assert set(other.plan.formats.values()) == {Format.FP16}
    assert frontend.load(again).converted == "all:fp16"
    # A plan of that conversion is replayed on the model that it was made for.
    finecast.apply(other.plan, low, tmp_path / "third.xml")
    assert (tmp_path / "third.bin").read_bytes() == again.with_suffix(".bin").read_bytes()


def test_the_same_conversion_stays(tmp_path: Path) -> None:
    low = tmp_path / "low.xml"
    finecast.convert(chain(), low, LOW)
    for policy in (LOW, "none"):
        done = finecast.convert(low, tmp_path / "again.xml", policy, force=True)
        assert any("conversion to all:bf16 stays" in w for w in done.warnings)
        assert done.plan.counts.keys() <= {"bf16", "fp32"}
        assert low.with_suffix(".bin").read_bytes() == (tmp_path / "again.bin").read_bytes()


def test_ports_that_were_declared_low_have_their_types_back(tmp_path: Path) -> None:
    low = tmp_path / "low.xml"
    base = Policy.parse(LOW)
    policy = Policy(scope=base.scope, formats=base.formats, io_low=True)
    finecast.convert(chain(), low, policy)
    back = original(frontend.load(low).model, "all:fp16")
    assert [p.get_element_type() for p in back.inputs] == [openvino.Type.f32]
    assert [p.get_element_type() for p in back.outputs] == [openvino.Type.f32]
    assert back.outputs[0].get_names() == {"y", "probabilities"}


@pytest.mark.parametrize("name", MODELS)
def test_bodies_are_taken_back(name: str, tmp_path: Path) -> None:
    model, low = frontend.from_model(MODELS[name]()).model, tmp_path / "low.xml"
    done = finecast.convert(model, low, LOW)
    assert Format.BF16 in done.plan.formats.values()
    back = original(frontend.load(low).model, "all:fp16")
    assert structure(back) == structure(model)
    for before, after in zip(model.outputs, back.outputs, strict=True):
        assert before.get_names() == after.get_names()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_constant_that_is_still_there_is_read_again(
    compressed: bool, tmp_path: Path
) -> None:
    """Bit for bit: one reader of it was low, another was not."""
    x = op.parameter([2, WIDTH], np.float32, name="x")
    w = op.constant(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)).astype(np.float32))
    w.set_friendly_name("w")
    one = op.matmul(x, w, False, False, name="one")
    two = op.matmul(op.tanh(one, name="tanh"), w, False, False, name="two")
    model = model_of([two], [x])
    openvino.save_model(model, tmp_path / "net.xml", compress_to_fp16=compressed)
    model = openvino.Core().read_model(tmp_path / "net.xml")
    policy = Policy.parse(LOW)
    file, planner = planned(model, policy)
    graph, _ = read(file.model)
    products = {n.name: n.id for n in graph.nodes}
    formats = dict.fromkeys(products.values(), Format.FP32) | {products["two"]: Format.BF16}
    applied = frontend.apply(file, planner.plan(formats, "one of two"))
    back = original(applied.model, "all:fp16")
    feeds = feeds_of(model)
    (wanted,), (got,) = run(model, feeds).values(), run(back, feeds).values()
    np.testing.assert_array_equal(got, wanted)


def test_a_conversion_that_tells_no_changes_is_refused(tmp_path: Path) -> None:
    """As an earlier release wrote them, or with another tool's notes in their place."""
    low = tmp_path / "low.xml"
    finecast.convert(chain(), low, LOW)
    text = low.read_text(encoding="utf-8")
    start = text.index("<changes")
    stop = text.index("/>", start)
    for notes in ("", '<changes value="of another kind" />'):
        low.write_text(text[:start] + notes + text[stop + 2 :], encoding="utf-8")
        assert changes_of(frontend.load(low).model) is None
        with pytest.raises(ModelError, match="converted by finecast before, to all:bf16") as e:
            finecast.convert(low, tmp_path / "again.xml", "all:fp16")
        assert "made from" in str(e.value)
