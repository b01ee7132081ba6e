"""What ``tune`` in Python gives: a few lines when printed, and the plan beside the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import finecast
from finecast.errors import UsageError
from finecast.measure.racing import Effort
from finecast.planning.plan import Plan
from finecast.tuning import measuring
from finecast.tuning.hint import Baseline
from finecast.tuning.measuring import Measurements, Measuring
from finecast.tuning.result import Result, Verdict
from tests.frontends.tools import parse, tensor

Tune = Callable[..., Result]
X = np.random.default_rng(1).standard_normal((16, 768)).astype(np.float32)


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    """Wide enough that products in bf16 gain by trn1's rates."""
    model = parse("""mlp (float[N,768] x) => (float[N,768] y) {
      a = MatMul(x, w)
      b = Relu(a)
      y = MatMul(b, w)
    }""")
    w = np.random.default_rng(0).standard_normal((768, 768)).astype(np.float32) / 28
    model.graph.initializer.append(tensor("w", w))
    onnx.save(model, tmp_path / "mlp.onnx")
    return tmp_path / "mlp.onnx"


@pytest.fixture
def tune(mlp: Path) -> Tune:
    """``finecast.tune`` for a device whose times are modelled: the verdict is no machine's."""

    def run(output: Path | None = None, **more: Any) -> Result:
        given = {"data": {"x": X}, "metric": "cosine", "target": "trn1", "batch": 16}
        return finecast.tune(mlp, output, **given, **more)

    return run


@pytest.fixture(scope="module")
def results() -> dict[float, Result]:
    """What tests that only read it found, by the least speedup that was asked for."""
    return {}


@pytest.fixture
def tuned(tune: Tune, results: dict[float, Result]) -> Result:
    """The result of one search, for tests that change nothing of it."""
    if 1.0 not in results:
        results[1.0] = tune()
    return results[1.0]


@pytest.fixture
def unchanged(tune: Tune, results: dict[float, Result]) -> Result:
    """That of a search in which no plan is fast enough."""
    if 50.0 not in results:
        results[50.0] = tune(min_speedup=50.0)
    return results[50.0]


def test_the_plan_is_written_beside_the_model(tune: Tune, tmp_path: Path) -> None:
    found = tune(tmp_path / "low.onnx")
    assert found.improved
    assert Plan.load(tmp_path / "low.plan.json") == found.plan
    again = finecast.apply(tmp_path / "low.plan.json", tmp_path / "mlp.onnx")
    assert again.plan == found.plan
    # So is the study, by which a report knows the speed that was found.
    known = finecast.report(tmp_path / "low.plan.json").content["result"]
    assert known["speedup"] == pytest.approx(found.speedup, rel=1e-5)


def test_speeds_in_several_processes_are_those_of_the_tuned_model(tuned: Result) -> None:
    """They stood on the line of fp32, whose speed is 1 in each."""
    found = replace(tuned, target="", engine="openvino", speedups=(1.9, 2.0, 2.1))
    fp32, low = found.lines[1:3]
    assert "processes" not in fp32
    assert low.endswith("(x1.90 to x2.10 in 3 processes)")
    assert found.comparison.title.endswith("; x1.90 to x2.10 in 3 processes")


def test_what_was_predicted_is_said_where_it_is_another_figure(tuned: Result) -> None:
    """Of a plan that predictions are scaled to, both were said, and are one measurement."""
    same = replace(tuned, predicted_error=tuned.measured_error)
    other = replace(tuned, predicted_error=2 * tuned.measured_error)
    (said, *_), (both, *_) = (
        [line for line in one.lines if line.startswith("relative output error")]
        for one in (same, other)
    )
    assert "predicted" not in said
    assert "predicted" in both


def test_outputs_of_one_stem_have_plans_of_their_own(mlp: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(768, 768)

        def forward(self, x: Any) -> Any:
            return self.layer(self.layer(x).relu())

    program = torch.export.export(Net().eval(), (torch.from_numpy(X[:16]),))
    torch.export.save(program, tmp_path / "net.pt2")
    plans: dict[str, Plan] = {}
    for model, output in ((mlp, "low.onnx"), (tmp_path / "net.pt2", "low.pt2")):
        given: dict[str, Any] = {"data": {"x": X}, "metric": "cosine", "target": "trn1"}
        found = finecast.tune(model, tmp_path / output, batch=16, force=True, **given)
        assert found.improved
        plans[output] = found.plan
    assert Plan.load(tmp_path / "low.plan.json") == plans["low.onnx"]
    assert Plan.load(tmp_path / "low.pt2.plan.json") == plans["low.pt2"]


def test_the_plan_goes_where_it_is_asked_for(tune: Tune, tmp_path: Path) -> None:
    found = tune(tmp_path / "low.onnx", plan_out=tmp_path / "mine.json")
    assert Plan.load(tmp_path / "mine.json") == found.plan
    assert not (tmp_path / "low.plan.json").exists()
    tune(plan_out=tmp_path / "alone.json")
    assert Plan.load(tmp_path / "alone.json") == found.plan


def test_a_plan_replaces_nothing_unasked(tune: Tune, tmp_path: Path) -> None:
    (tmp_path / "low.plan.json").write_text("mine")
    with pytest.raises(UsageError, match="output exists"):
        tune(tmp_path / "low.onnx")
    with pytest.raises(UsageError, match="same file"):
        tune(tmp_path / "low.onnx", plan_out=tmp_path / "mlp.onnx")
    assert (tmp_path / "low.plan.json").read_text() == "mine"
    assert not (tmp_path / "low.onnx").exists()
    assert tune(tmp_path / "low.onnx", force=True).improved


def test_where_nothing_is_better_no_plan_is_written(tune: Tune, tmp_path: Path) -> None:
    found = tune(tmp_path / "low.onnx", min_speedup=50.0)
    assert not found.improved
    assert (found.asked, found.output) == (tmp_path / "low.onnx", None)
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.onnx"]
    assert "tuned:" not in repr(found)


def test_the_largest_product_that_stays_fp32_is_named_with_its_reason(mlp: Path) -> None:
    model = onnx.load(mlp)
    model.graph.node[2].CopyFrom(
        onnx.helper.make_node(
            "Einsum", ["b", "w", "b"], ["y"], "triple", equation="nd,de,ne->ne"
        )
    )
    onnx.save(model, mlp)
    how: dict[str, Any] = {"data": {"x": X}, "metric": "cosine", "target": "trn1", "batch": 16}
    how["policy"] = "auto:bf16"
    text = "1 product stays fp32, 'triple' (Einsum, 60% of the products' operations): "
    for least in (1.0, 50.0):
        found = finecast.tune(mlp, **how, min_speedup=least)
        products = found.kept_products
        assert products is not None
        assert "onnx::Einsum has no bf16 in its definition" in products.why
        assert f"{text}{products.why}" in repr(found)
        assert found.to_dict()["kept_products"]["node"] == "triple"


def test_results_are_printed_in_a_few_lines(tuned: Result, mlp: Path) -> None:
    said = repr(tuned).splitlines()
    assert said[0].startswith("improved: ")
    assert said[1].startswith("  fp32: cosine 1, ")
    assert "as fast as fp32" in said[2]
    assert len(said) < 20
    assert {"load", "baseline", "sensitivity", "timing", "write"} <= tuned.phases.keys()
    assert sum(tuned.phases.values()) == pytest.approx(tuned.seconds)
    assert repr(tuned.plan).startswith(f"<Plan {tuned.plan.digest} of ")
    done = finecast.convert(mlp, policy="all:bf16")
    assert repr(done).startswith("converted by all:bf16: ")
    assert len(repr(done)) < 1000


@pytest.mark.parametrize(
    ("output", "cost", "passed", "told"),
    [
        ("low.onnx", 0.5, True, True),
        ("low.xml", 0.5, True, False),  # which races plans by the hint already
        ("low.onnx", 2.0, True, False),  # it is slower than the result
        ("low.onnx", 0.99, True, False),  # it gains less than what counts
        ("low.onnx", 0.5, False, False),
    ],
)
def test_a_faster_hint_says_which_output_makes_it_a_plan(
    unchanged: Result,
    output: str,
    cost: float,
    passed: bool,
    told: bool,
) -> None:
    cost *= unchanged.tuned.cost
    anchor = Baseline(name="the hint", metric=1.0, passed=passed, latency_s=cost, cost=cost)
    plan = replace(unchanged.plan, engine="openvino")
    found = replace(unchanged, baselines=(anchor,), target="", plan=plan, asked=Path(output))
    (_, beside) = found.comparison.rows
    assert ("(-o low.xml makes it a plan)" in beside[0]) is told
    assert not found.improved
    hint = "; or the hint: -o low.xml makes it a plan" if told else ""
    assert f"no model was written: use the model given{hint}" in repr(found).splitlines()[-1]
    advice = "; -o low.xml would be x2.00 as fast as fp32, by the hint"
    first = f"unchanged: {found.why}{advice if told else ''}\n"
    assert repr(found).startswith(first)


def test_labels_as_output_are_the_reason_that_nothing_is_expected_of_new_data(
    tmp_path: Path,
) -> None:
    """scikit-learn's classifiers have them first: nothing said why no loss is estimated."""
    model = parse("""classifier (float[N,768] x) => (int64[N] label, float[N,768] scores) {
      a = MatMul(x, w)
      b = Relu(a)
      scores = MatMul(b, w)
      label = ArgMax<axis=1,keepdims=0>(scores)
    }""")
    w = np.random.default_rng(0).standard_normal((768, 768)).astype(np.float32) / 28
    model.graph.initializer.append(tensor("w", w))
    onnx.save(model, tmp_path / "m.onnx")
    asked: dict[str, Any] = {"data": {"x": X}, "target": "trn1", "batch": 16}
    asked |= {"max_drop": 0.5}
    found = finecast.tune(tmp_path / "m.onnx", metric="agreement", **asked)
    why = "output 'label' holds labels, not scores (--of scores judges by scores)"
    assert found.improved
    assert f"what it loses on new data was not estimated: {why}" in found.lines
    (loss,) = (a for a in found.report().content["summary"]["answers"] if "new data" in a)
    assert why in loss
    judged = finecast.tune(tmp_path / "m.onnx", metric="agreement", of=["scores"], **asked)
    assert not judged.not_estimated
    assert any("on new data of the same kind expect a loss" in line for line in judged.lines)


def test_evaluations_are_counted_by_what_they_are_of(tune: Tune) -> None:
    """Those of fp32 and of the hint counted as if they were plans."""
    found = tune()
    anchor = Baseline(name="the hint", metric=1.0, passed=True, latency_s=1.0, cost=1.0)
    given = replace(anchor, name="the model given")
    of = {
        "1 evaluation on all data (of fp32)": replace(found, evaluations=1),
        "3 evaluations on all data (of fp32, 1 plan and the model given)": replace(
            found, evaluations=3, baselines=(given,)
        ),
        "4 evaluations on all data (of fp32, 2 plans and 1 precision hint)": replace(
            found, evaluations=4, baselines=(anchor,)
        ),
    }
    for text, one in of.items():
        assert any(text in line for line in one.lines), text


@pytest.mark.parametrize(("timeout_s", "over"), [(1e-9, True), (9e9, False), (None, False)])
def test_a_timeout_ends_the_last_race_early_and_is_told_if_it_was_not_enough(
    tune: Tune, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, over: bool
) -> None:
    settled: list[float] = []
    real = Measuring.measure

    def measure(self: Measuring, built: Any, effort: Effort, *rest: Any) -> Measurements:
        settled.append(effort.settle_s)
        return real(self, built, effort, *rest)

    monkeypatch.setattr(Measuring, "measure", measure)
    monkeypatch.setattr(measuring, "FINAL", Effort(min_time_s=0.0, settle_s=5.0))
    found = tune(timeout_s=timeout_s)
    assert found.improved
    assert settled[-1] == (0.0 if over else max(5.0, found.phases["baseline"]))
    told = [text for text in found.warnings if "longer than the timeout_s of 1e-09 s" in text]
    assert [f"took {found.seconds:.1f} s" in text for text in told] == [True] * over


def test_the_time_by_phase_adds_up(tuned: Result) -> None:
    phases = {"sensitivity": 2.5, "load": 1.25, "rules": 0.01, "plans": 0.02}
    found = replace(tuned, phases=phases)
    note = next(note for note in found.comparison.notes if note.startswith("time by phase"))
    seconds = [float(s) for s in re.findall(r"([\d.]+) s", note)]
    assert sum(seconds) == pytest.approx(sum(phases.values()), abs=0.06 * (1 + len(seconds)))


def test_progress_is_reported(tune: Tune) -> None:
    stages: list[str] = []
    tune(progress=lambda stage, _done, _total: stages.append(stage))
    assert {"baseline", "sensitivity", "timing"} <= set(stages)
    with pytest.raises(UsageError, match="progress"):
        tune(progress="yes")


def test_a_result_has_all_that_was_found(
    tuned: Result, unchanged: Result, tmp_path: Path
) -> None:
    assert tuned.improved
    rows = {row.node: row for row in tuned.ops}
    assert {n: r.type for n, r in rows.items()} == {
        n: f.label for n, f in tuned.plan.formats.items()
    }
    assert all(row.reason for row in rows.values())
    low = [row for row in rows.values() if row.type != "fp32"]
    assert all(row.ms is not None and row.error is not None for row in low)
    steps = tuned.frontier
    assert tuned.plan.digest in {one.plan.digest for one in steps}
    costs = [one.predicted_cost for one in steps]
    assert costs == sorted(costs)
    page = tuned._repr_html_()
    assert "improved" in page
    assert "<td>" + tuned.ops[0].node in page
    tuned.save(tmp_path / "saved.onnx")
    with pytest.raises(UsageError, match="exists"):
        tuned.save(tmp_path / "saved.onnx")
    tuned.save(tmp_path / "saved.onnx", force=True)
    away = replace(tuned, target="avx2-vnni", output=Path("m.onnx"))
    code = away.run_notes
    assert "inputs = {'x': numpy.zeros((16, 768), 'float32')}  # your data" in code
    assert any("compile_model('m.onnx', 'CPU', settings)" in line for line in code)
    assert replace(away, output=Path("m.pt2")).run_notes[0] == "import torch"
    assert replace(away, target="trn1").run_notes == ()
    assert unchanged.run_notes == ()
    with pytest.raises(UsageError, match="no other model than the one given"):
        unchanged.save(tmp_path / "other.onnx")


def test_one_plan_has_one_measured_error(tuned: Result) -> None:
    """The list of plans had the error of the first benchmark's samples, the result its own."""
    found = replace(tuned, output_errors={"y": 0.125}, verdict=Verdict.IMPROVED)
    listed = {one["plan"]: one["measured"] for one in found.to_dict()["candidates"]}
    assert listed[found.plan.digest]["relative_error"] == 0.125
    others = [m for digest, m in listed.items() if digest != found.plan.digest]
    assert all(measured["relative_error"] != 0.125 for measured in others)
