"""Plans stated by OpenVINO's own hint, as a user asks for them; ONNX models as its IR."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest

from finecast import api
from finecast.data.workload import Workload
from finecast.engines import get_engine
from finecast.engines.base import Feeds
from finecast.errors import ExitCode
from finecast.frontends import onnx as onnx_frontend
from finecast.frontends import openvino as frontend
from finecast.frontends.openvino.changes import hint_of
from finecast.measure.racing import Effort, Race
from finecast.native.engine_subject import EngineSubject
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.problem import Proposal
from finecast.rules.policy import Policy
from finecast.tuning.hint import with_hinted_errors
from tests.cli.conftest import Answer
from tests.frontends.test_openvino_marks import FEEDS, convolutions, needs_hint
from tests.kernels import computes_bf16, skip_without_int8
from tests.times import race_all

Finecast = Callable[..., Answer]
BF16 = ["--auto-cast", "all", "--auto-cast-type", "bf16"]


@pytest.fixture
def ir(tmp_path: Path) -> Path:
    frontend.save(convolutions(), tmp_path / "net.xml")
    return tmp_path / "net.xml"


@needs_hint
def test_convert_by_hint(finecast: Finecast, ir: Path, tmp_path: Path) -> None:
    out, plan = tmp_path / "low.xml", tmp_path / "plan.json"
    kept = ["--exclude", "^[cr]1$"]
    answer = finecast(
        "convert", ir, "-o", out, *BF16, *kept, "--by-hint", "--plan-out", plan, "--json"
    )
    assert answer.code == 0, answer.err
    assert answer.json["ops"] == {"bf16": 6, "fp32": 2}
    assert answer.json["casts"] == 0
    error = answer.json["verified"]["relative_error"]
    assert error < 0.02
    assert (error > 0) == computes_bf16()
    assert json.loads(plan.read_text())["by_hint"] is True
    again = tmp_path / "again.xml"
    answer = finecast("apply", plan, ir, "-o", again)
    assert answer.code == 0, answer.err
    assert hint_of(frontend.load(again).model) == "bf16"
    assert out.with_suffix(".bin").read_bytes() == again.with_suffix(".bin").read_bytes()


@needs_hint
def test_an_onnx_model_becomes_ir(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    out = tmp_path / "low.xml"
    answer = finecast("convert", net, "-o", out, *BF16, "--by-hint", "--json")
    assert answer.code == 0, answer.err
    engine = get_engine("openvino")
    hinted = engine.load_hinted(net, Format.BF16)
    feeds = feeds_for(hinted.inputs[0].name, net)
    ours, theirs = engine.load(out).run(feeds), hinted.run(feeds)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def feeds_for(name: str, net: Path) -> Feeds:
    shape = onnx_frontend.load(net).model.graph.inputs[0].shape
    assert shape is not None
    sizes = [d if isinstance(d, int) else 2 for d in shape]
    return {name: np.random.default_rng(0).normal(size=sizes).astype(np.float32)}


def test_the_plan_of_an_onnx_model_as_ir_is_explained(
    finecast: Finecast, net: Path, tmp_path: Path
) -> None:
    """The plan tells which library read the model, as no output does."""
    plans = {"o.xml": tmp_path / "ir.json", "o.onnx": tmp_path / "onnx.json"}
    for name, plan in plans.items():
        given = ["--by-hint"] if name == "o.xml" else []
        answer = finecast(
            "convert", net, "-o", tmp_path / name, *BF16, *given, "--no-verify",
            "--plan-out", plan,
        )  # fmt: skip
        assert answer.code == 0, answer.err
        node = Plan.load(plan).decisions[0].node
        answer = finecast("explain", net, node, "--plan", plan, "--json")
        assert answer.code == 0, answer.err
        assert answer.json["native"].startswith("openvino" if given else "onnx")
    answer = finecast("apply", plans["o.onnx"], net, "-o", tmp_path / "p.xml")
    assert answer.code == ExitCode.FAILED
    assert "name the output NAME.onnx" in " ".join(answer.err.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--io", "low"], "leave --io out"),
        (["--io", "x=bf16"], "leave --io out"),
        (
            ["--auto-cast-type", "bf16,fp16"],
            "one format beside quantized integers.*--auto-cast-type bf16 or fp16",
        ),
        (["--target", "trn1"], r"-o NAME\.xml"),
    ],
)
def test_what_a_hint_cannot_state_is_refused(
    finecast: Finecast, ir: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    given = [] if "--auto-cast-type" in options else ["--auto-cast-type", "bf16"]
    answer = finecast(
        "convert", ir, "-o", tmp_path / "o.xml", "--auto-cast", "all", *given, *options,
        "--by-hint",
    )  # fmt: skip
    assert answer.code == ExitCode.USAGE
    assert re.search(says, " ".join(answer.err.split()))
    assert not (tmp_path / "o.xml").exists()


def test_models_that_are_low_have_no_hint(
    finecast: Finecast, ir: Path, tmp_path: Path
) -> None:
    low = tmp_path / "low.xml"
    assert finecast("convert", ir, "-o", low, *BF16).code == 0
    theirs = frontend.load(low).model.clone()
    del theirs.get_rt_info()["finecast"]  # as another tool makes it
    frontend.save(theirs, tmp_path / "theirs.xml")
    answer = finecast(
        "convert", tmp_path / "theirs.xml", "-o", tmp_path / "o.xml", *BF16, "--by-hint"
    )
    assert answer.code == ExitCode.USAGE
    assert "in reduced precision or quantized" in " ".join(answer.err.split())


@needs_hint
def test_what_is_converted_says_how_to_run_it(
    finecast: Finecast, ir: Path, tmp_path: Path
) -> None:
    """The model is in fp32, and computes so under the hint that other models need."""
    out, plan = tmp_path / "low.xml", tmp_path / "plan.json"
    answer = finecast("convert", ir, "-o", out, *BF16, "--by-hint", "--plan-out", plan)
    line = '"INFERENCE_PRECISION_HINT": "bf16"'
    assert line in " ".join(answer.out.split())
    answer = finecast("apply", plan, ir, "-o", tmp_path / "again.xml")
    assert line in " ".join(answer.out.split())
    answer = finecast("convert", ir, "-o", tmp_path / "casts.xml", *BF16)
    assert "INFERENCE_PRECISION_HINT" not in answer.out
    policy = replace(Policy.parse("all:bf16"), by_hint=True)
    for made in (api.convert(convolutions(), policy=policy), api.apply(plan, ir)):
        assert line in " ".join(made.warnings)
        assert hint_of(made.model) == "bf16"


CODES = ["--auto-cast", "all", "--auto-cast-type", "int8,bf16", "--by-hint"]


@needs_hint
def test_codes_are_stated_and_the_hint_lowers_the_rest(
    finecast: Finecast, ir: Path, tmp_path: Path
) -> None:
    skip_without_int8()
    out, plan, again = tmp_path / "low.xml", tmp_path / "plan.json", tmp_path / "again.xml"
    np.savez(tmp_path / "data.npz", x=FEEDS["x"])
    data = ["--data", tmp_path / "data.npz"]
    answer = finecast("convert", ir, "-o", out, *CODES, *data, "--plan-out", plan, "--json")
    assert answer.code == 0, answer.err
    assert {"int8", "bf16"} <= answer.json["ops"].keys()
    assert answer.json["casts"] > 0  # the codes'; the engine's own are not in the model
    made = frontend.load(out).model
    assert hint_of(made) == "bf16"
    kinds = {op.get_type_name() for op in made.get_ops()}
    assert "FakeQuantize" in kinds
    assert openvino.Type.bf16 not in {op.get_output_element_type(0) for op in made.get_ops()}
    ran = get_engine("openvino").load_hinted(out, Format.FP32).kernel_formats()
    assert any("int8" in one.computed for one in ran)
    assert finecast("apply", plan, ir, "-o", again).code == 0
    assert out.with_suffix(".bin").read_bytes() == again.with_suffix(".bin").read_bytes()


@needs_hint
def test_tune_tries_codes_over_the_hint(
    ir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_int8()
    if not computes_bf16():
        pytest.skip("OpenVINO's hint lowers nothing on this CPU")

    def times(
        self: EngineSubject, built: Mapping[str, Built], workload: Workload, effort: Effort
    ) -> Race:
        """Stated times: codes take half of fp32's, and what is low by the hint a tenth off."""
        for one in built.values():  # a race runs each model once, too
            self.session(one).run(workload.timing()[0])
        return Race.stated(
            1.0,
            {
                name: (0.5 if one.plan.encodings else 1.0) - 0.1 * one.plan.by_hint
                for name, one in built.items()
            },
        )

    monkeypatch.setattr(EngineSubject, "times", times)
    # All plans race: predicted times of so small a net are noise, and would leave some out.
    race_all(monkeypatch)
    result = api.tune(
        ir,
        tmp_path / "low.xml",
        data={"x": np.repeat(FEEDS["x"], 4, axis=0)},
        policy="auto:int8,bf16",
        tolerance=5.0,
        criterion="absolute",
        metric="snr_db",
        lock=False,
        progress=False,
    )
    assert result.plan.by_hint
    assert result.plan.encodings
    assert result.gain == pytest.approx(2.5)


def test_other_models_have_no_marks(finecast: Finecast, net: Path, tmp_path: Path) -> None:
    answer = finecast("convert", net, "-o", tmp_path / "o.onnx", *BF16, "--by-hint")
    assert answer.code == ExitCode.USAGE
    assert "-o NAME.xml" in " ".join(answer.err.split())


@needs_hint
def test_tune_tries_both_and_says_how_to_run_it(
    finecast: Finecast, ir: Path, tmp_path: Path
) -> None:
    """What is written runs in OpenVINO by the line that is printed, as it was measured."""
    np.savez(tmp_path / "data.npz", x=np.repeat(FEEDS["x"], 4, axis=0))
    out = tmp_path / "tuned.xml"
    answer = finecast(
        "tune", ir, "-o", out, "--data", tmp_path / "data.npz", "--max-drop", "0.5", *BF16,
    )  # fmt: skip
    assert answer.code == 0, answer.err
    plan = Plan.load(out.with_suffix(".xml.plan.json"))
    code = answer.out.partition("run it in Python:\n")[2]
    hint = "bf16" if plan.by_hint else "f32"
    assert f'"INFERENCE_PRECISION_HINT": "{hint}"' in code
    names: dict[str, Any] = {}
    exec(code, names)  # as the user pastes it
    found = names["model"].get_property("INFERENCE_PRECISION_HINT").to_string()
    # OpenVINO gives the hint that it follows: fp32 where the CPU has no bf16 kernels.
    assert found == (hint if computes_bf16() else "f32")
    assert names["outputs"]


def test_errors_of_plans_by_a_hint_are_in_the_measured_ratio() -> None:
    def proposal(*, by_hint: bool) -> Proposal:
        plan = Plan(model="m", policy="p", opset=0, decisions=(), by_hint=by_hint)
        return Proposal(name="one", plan=plan, time_s=1.0, error=4.0)

    both = {p.plan.digest: p for p in (proposal(by_hint=False), proposal(by_hint=True))}
    casts, hinted = both
    measured = {casts: 0.1, hinted: 0.05}
    found = with_hinted_errors(both, {d: d for d in both}, lambda d: measured[d])  # pyright: ignore
    assert found[casts].error == 4.0
    assert found[hinted].error == 1.0
    alone = with_hinted_errors(both, {hinted: hinted}, lambda d: measured[d])  # pyright: ignore
    assert alone == both
