"""The data of a report: what is known, what is not, and its schema."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from finecast.data.certificates import Certificate
from finecast.data.metrics import ExpectedMetric
from finecast.engines.base import KernelTime
from finecast.errors import UsageError
from finecast.numbers.formats import FLOATS, Format
from finecast.reports import drawing
from finecast.reports.content import Sources, content_of
from finecast.reports.plan_report import (
    _KEYWORDS,
    PlanReport,
    check_content,
    report_path,
    schema,
)
from finecast.reports.summary import summary_of
from finecast.tuning.goal import Objective
from tests.graph.text import from_text
from tests.reports import made


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    return made.content()


@pytest.fixture(scope="module", params=["improved", "unchanged", "plan alone", "everything"])
def any_content(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "plan alone":
        plan = made.result().plan
        return content_of(Sources(model="m", plan=plan))
    if request.param == "everything":
        return made.everything()
    return made.content(improved=request.param == "improved")


def test_content_is_strict_json_of_its_schema(any_content: dict[str, Any]) -> None:
    text = json.dumps(any_content, allow_nan=False)
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(text), schema(), jsonschema.Draft202012Validator)
    check_content(json.loads(text), where="here")


def test_the_schema_says_of_each_time_in_which_race_it_was_measured() -> None:
    found = schema()["$defs"]["result"]["properties"]
    many = ("frontier", "candidates", "baselines", "trials")
    models = [found[name] for name in ("baseline", "tuned", "next_faster")]
    models += [found[name]["items"] for name in many]
    for properties in (one["properties"] for one in models):
        times = properties.keys() & {"latency_ms", "predicted", "measured"}
        assert "latency_ms" in times
        assert all("race" in properties[n]["description"] for n in times - {"predicted"})


def test_the_schema_uses_only_words_that_are_checked() -> None:
    def words(rule: Any) -> set[str]:
        if not isinstance(rule, dict):
            return set()
        inner = [*rule.get("properties", {}).values(), *rule.get("$defs", {}).values()]
        inner += [rule.get("items"), rule.get("additionalProperties")]
        return set(rule).union(*map(words, inner))

    assert words(schema()) <= _KEYWORDS


def broken(change: dict[str, Any]) -> dict[str, Any]:
    return made.content() | change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version.*upgrade finecast"),
        ({"kind": "other"}, "kind"),
        ({"ops": 3}, r"report.ops is int, expected array"),
        ({"ops": [{"name": "a"}]}, r"ops\[0\] has no 'op'"),
        ({"ops": [{"name": "a", "op": "add", "class": "c", "reasons": [99]}]}, "op 0 names"),
        ({"how_to_run": [1]}, r"how_to_run\[0\] is int"),
        ({"lines": "text"}, "lines"),
        ({"result": {}}, "result has no 'verdict'"),
        ({"blame": {"low": "m"}}, "blame has no 'verdict'"),
        ({"diff": [1]}, "diff is list"),
        ({"repairs": [{"op": 99, "operands": [], "reasons": []}]}, "a repair names"),
    ],
)
def test_other_content_is_refused(change: dict[str, Any], words: str) -> None:
    text = json.dumps(broken(change))
    with pytest.raises(UsageError, match=words):
        PlanReport.from_json(text, where="r.json")


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, "{", '"text"'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"r\.json"):
        PlanReport.from_json(text, where="r.json")


def test_a_report_round_trips() -> None:
    report = made.result().report()
    again = PlanReport.from_json(report.to_json(), where="here")
    assert again.content == report.content
    assert repr(again) == repr(report)


def test_ops_have_types_reasons_times_and_what_they_read(content: dict[str, Any]) -> None:
    ops, middle = content["ops"], content["ops"][2]
    assert [op["type"] for op in ops] == ["fp16", "fp16", "fp32", "fp16", "fp16"]
    assert middle["ms"] == {"fp32": 0.1, "fp16": 0.04}
    assert middle["scope"] == "net/layer.1"
    assert middle["ran"] == "fp16"  # the kernel that the engine took all the same
    (reason,) = (content["reasons"][i] for i in middle["deciding"])
    assert reason["text"].startswith("kept fp32: fp16 would save 72 us net")
    (read,) = (content["values"][i] for i in middle["inputs"])
    assert ops[read["from"]]["name"] == "net/layer.0/n1"


@pytest.mark.parametrize("fmt", FLOATS, ids=lambda fmt: fmt.label)
def test_limits_of_a_format_are_those_of_its_rounding(fmt: Format) -> None:
    """To nearest, ties to even; numbers of a format as wide as fp32 are never out of range."""
    limits = made.content()["formats"][fmt.label]
    zero, over = limits["to_zero_up_to"], limits["overflow_from"]
    if fmt is not Format.FP32:  # half of its smallest number is no number of fp32
        zeros = np.array([zero, np.nextafter(np.float32(zero), np.float32(1))], np.float32)
        assert [bool(x) for x in fmt.round(zeros)] == [False, True]
    if over < Format.FP32.max:
        edge = np.float32(over)
        below, above = (
            np.nextafter(edge, np.float32(0)),
            np.nextafter(edge, np.float32(np.inf)),
        )
        kept, lost = fmt.round(np.array([below, above], np.float32))
        assert kept == limits["largest"]
        assert not math.isfinite(lost)


def test_a_cause_is_told_as_far_as_it_is_known(content: dict[str, Any]) -> None:
    text = content["summary"]["kept"][0]["text"]
    assert "err by 0% for its activations and by 20% for its weights." in text
    assert "20% of its numbers, or more, are too small and become zero in fp16." in text
    (kept,) = (unit for unit in content["units"] if unit["type"] == "fp32")
    said = summary_of(content, [], [kept | {"alone": {}}])
    assert said["kept"][0]["text"].endswith(
        "Only the size of the error is known, not its cause."
    )


def test_the_chosen_plan_stands_where_the_last_race_measured_it() -> None:
    found = made.result()
    chosen, digest = found.findings, found.plan.digest
    fast = chosen.candidates[0].plan.digest
    raced = replace(chosen, final_benchmark={digest: (2.0, 5e-4), fast: (1.9, 5.2e-4)})
    content = replace(found, findings=raced).report().to_dict()
    candidates = {c["plan"]: c for c in content["result"]["candidates"]}
    assert candidates[digest]["final_benchmark"] == {"gain": 2.0, "latency_ms": 0.5}
    # The last race knows better: the other plan was faster in the first race alone.
    assert " as fast" not in content["summary"]["next_faster"]


def test_a_plan_that_was_ahead_in_the_last_race_alone_is_named() -> None:
    found = made.result()
    fast, own = found.findings.candidates
    slow = replace(fast, cost=6e-4, latency_s=6e-4, passed=True, metric=0.9)
    race = {own.plan.digest: (2.0, 5e-4), slow.plan.digest: (2.04, 4.9e-4)}
    raced = replace(found.findings, candidates=(own, slow), final_benchmark=race)
    said = replace(found, findings=raced).report().to_dict()["summary"]["next_faster"]
    assert "x1.02 as fast as the chosen one" in said
    assert "0.83" not in said
    assert "less than 3% apart" in said
    assert "the more accurate one is chosen" in said


def test_the_main_op_of_a_kernel_is_the_one_with_the_most_operations() -> None:
    graph = from_text(
        "input %0 x fp32[N, 64]\n"
        "input %1 w fp32[64, 32]\n"
        "node act relu onnx::Relu fp32 (%0) -> (%2 a fp32[N, 64])\n"
        "node product matmul onnx::MatMul fp32 (%2, %1) -> (%3 b fp32[N, 32])\n"
        "output %3\n"
    )
    fused = KernelTime(
        kernel="k", kind="MatMul", ops=("act", "product"), format="fp32", time_s=1e-3
    )
    plan = replace(made.result().plan, decisions=())
    sources = Sources(model="m", plan=plan, graph=graph, kernels={"fp32": [fused]})
    content = content_of(sources)
    (kernel,) = content["kernels"]["fp32"]
    assert [content["ops"][i]["name"] for i in kernel["ops"]] == ["product", "act"]


def test_facts_are_counts_by_binade(content: dict[str, Any]) -> None:
    first = content["values"][0]
    assert first["from"] == "input"
    assert first["facts"]["zeros"] == 1
    assert sum(first["facts"]["binades"]) == 4
    low = first["facts"]["first"]
    assert 2.0**low <= 1e-9 < 2.0 ** (low + 1)
    assert content["values"][-1]["facts"]["infs"] == 1


def test_repairs_have_what_is_done_and_its_proof() -> None:
    content = made.everything()
    (repair,) = content["repairs"]
    assert content["ops"][repair["op"]]["name"] == "net/layer.0/n0"
    (operand,) = repair["operands"]
    assert (operand["at"], operand["lowest"], operand["highest"]) == ("input 0", -2, -2)
    (reason,) = (content["reasons"][i] for i in repair["reasons"])
    assert reason["text"].endswith("no bit changes")


def test_what_other_verbs_found_is_said_in_a_line() -> None:
    lines = PlanReport(content=made.everything()).lines
    assert any(line.startswith("From old.json: 5 ops in both") for line in lines)
    assert any(line.startswith("low.onnx: 1 op to blame") for line in lines)


def test_sentences_name_what_limits_and_what_the_next_plan_would_have_cost(
    content: dict[str, Any],
) -> None:
    said = content["summary"]
    assert said["verdict"] == (
        "With 4 of 5 ops in fp16 a call takes 500 us instead of 1 ms (x2.00 as fast,"
        " measured), and top1 is 0.9 instead of 0.91."
    )
    worst = said["kept"][0]
    assert content["ops"][worst["op"]]["name"] == "net/layer.1/n2"
    assert (
        "stays in fp32: fp16 would save 72 us, and raise the predicted error" in worst["text"]
    )
    assert "to 20" in worst["text"]
    assert said["next_faster"] == (
        "The next faster plan, lowest in fp16, was x1.25 as fast as the chosen one: it"
        " scored 0.1, below your limit (top1 >= 0.89)."
    )


def test_the_first_screen_answers_four_questions() -> None:
    found = made.result()
    faster, loss, costs, following = found.report().to_dict()["summary"]["answers"]
    assert faster.startswith("A call takes 500 us instead of 1 ms: x2.00 as fast, measured")
    apart = replace(found, speedups=(2.0, 1.9, 2.1)).report().to_dict()["summary"]["answers"]
    assert ": x2.00 as fast (1.90 to 2.10 in 3 processes), measured" in apart[0]
    assert loss == (
        "Its top1 on your 200 samples is 0.9 instead of 0.91; what it loses on new data was"
        " not estimated, as fewer than 10 samples differ, or the metric has no number for"
        " each: --confidence guarantees a limit."
    )
    assert costs.startswith(
        "Where its squared output error comes from: predicted 25% from net/"
    )
    assert costs.count("predicted") == 1
    assert following.startswith(
        "Next: write it by its save(). If it loses too much, tune with"
    )
    assert "--exclude '^net/" in following
    expected = ExpectedMetric(metric=0.89, loss=0.004, deviation=0.001, cautious=0.889)
    certain = Certificate(
        bound=0.02, confidence=0.95, samples=400, loss=0.001, method="exact bound"
    )
    told = {"elsewhere": expected}, {"certificate": certain}
    there, at_most = (
        replace(found, **one).report().to_dict()["summary"]["answers"][1] for one in told
    )
    assert there.endswith("expect a loss of 0.004 on average (standard error 0.001).")
    assert at_most.endswith("lose at most 0.02, at 95% confidence.")


def test_a_report_of_an_unchanged_model_says_that_it_stays() -> None:
    unchanged = made.content(improved=False)["summary"]["answers"]
    assert unchanged[0].startswith("The model stays as it is: no plan is faster")
    assert made.without_search(made.result()).report().to_dict()["summary"]["answers"] == []


def test_a_plan_that_lacks_a_certificate_is_not_said_to_miss_the_limit() -> None:
    """It scored more than was asked for, and was not proven to keep that elsewhere."""
    found = made.result()
    fast = replace(found.findings.candidates[0], metric=0.9, passed=False)
    findings = replace(found.findings, candidates=(fast, *found.findings.candidates[1:]))
    found = replace(
        found, findings=findings, conditions={**found.conditions, "confidence": 0.95}
    )
    said = found.report().to_dict()["summary"]["next_faster"]
    assert said.endswith(
        "it scored 0.9 on these data, within your limit (top1 >= 0.89), but could not be"
        " certified at 95% confidence."
    )
    assert any("not be certified at 95%" in line for line in found.lines)
    picture = drawing("picture")  # of a plugin
    if picture is not None:
        assert "is not certified" in picture(found.to_dict(), "plans")


@pytest.mark.parametrize(
    ("objective", "counted"),
    [
        (Objective.SIZE, "the model is 0.0005 MB instead of 0.001 (x2.00), and top1"),
        (
            Objective.THROUGHPUT,
            "2e+03 calls a second are served instead of 1e+03 (x2.00)",
        ),
        (Objective.MEMORY, "5e-10 MB are in memory instead of 1e-09, as estimated (x2.00)"),
        (Objective.FIRST_TOKEN, "measured), and top1"),
    ],
)
def test_what_an_objective_counts_stands_beside_the_time(
    objective: Objective, counted: str
) -> None:
    found = replace(made.result(), objective=objective).of_size(500)
    said = found.report().to_dict()["summary"]
    assert "500 us instead of 1 ms (x2.00 as fast," in said["verdict"]
    assert counted in said["verdict"]
    assert " as the chosen one" in said["next_faster"]


def test_the_fastest_plan_has_no_faster_one() -> None:
    found = made.result()
    alone = replace(found.findings, candidates=found.findings.candidates[1:])
    said = replace(found, findings=alone).report().to_dict()["summary"]["next_faster"]
    assert said == "There is no next faster plan: this one is the best of 1 plan considered."


def test_weights_and_activations_alone(content: dict[str, Any]) -> None:
    alone = content["alone"]["fp16"]
    assert alone["activations"] == 0
    assert alone["weights"] == alone["both"] == pytest.approx(0.2, rel=1e-3)
    (unit,) = (u for u in content["units"] if 2 in u["ops"])
    assert unit["alone"]["fp16"] == {"weights": 0.2, "activations": 0.0}


def test_what_a_plan_alone_does_not_tell_is_said() -> None:
    plan = made.result().plan
    content = content_of(Sources(model="m", plan=plan))
    assert content["result"] is None
    assert content["values"] == []
    assert [text.partition(":")[0] for text in content["unknown"]] == [
        "the graph",
        "the search",
        "the engine's kernels",
    ]
    assert content["summary"]["verdict"].endswith("its run, which is not beside it.")
    assert len(content["units"]) == 5  # the plan's own reasons have figures


def test_a_model_that_stays_says_why() -> None:
    said = made.content(improved=False)["summary"]
    assert said["verdict"] == "The model stays as it is: no plan is faster here."


def test_a_report_is_a_page_or_data() -> None:
    with pytest.raises(UsageError, match=r"\.html or \.json"):
        report_path("report.pdf")
