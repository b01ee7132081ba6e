"""Plans are read back as written, in this version of the file format and all older ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.errors import UsageError
from finecast.numbers.formats import FLOATS, Format
from finecast.planning.plan import PLAN_VERSION, Decision, Plan
from finecast.rules.base import DECIDED_BY, DECISION, Reason

SAMPLES = Path(__file__).parent.parent / "samples" / "plans"
WORDS = st.text(max_size=12)
FORMATS = st.sampled_from(FLOATS)
EVIDENCE = st.dictionaries(WORDS, st.floats(allow_nan=False) | WORDS, max_size=2)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    reasons = st.builds(
        Reason,
        rule=WORDS,
        text=WORDS,
        permits=st.lists(WORDS, max_size=2).map(tuple),
        evidence=EVIDENCE,
    )
    decisions = st.builds(
        Decision,
        node=WORDS,
        op=WORDS,
        format=FORMATS,
        reasons=st.lists(reasons, max_size=2).map(tuple),
    )
    return Plan(
        model=draw(WORDS),
        policy=draw(WORDS),
        opset=draw(st.integers(1, 30)),
        decisions=tuple(draw(st.lists(decisions, max_size=3, unique_by=lambda d: d.node))),
        io=draw(st.dictionaries(WORDS, FORMATS, max_size=2)),
        engine=draw(WORDS),
    )


PLAN = Plan(
    model="m",
    policy="auto:bf16",
    opset=22,
    decisions=(
        Decision(node="a", op="matmul", format=Format.BF16),
        Decision(node="b", op="softmax", format=Format.FP32),
        Decision(node="c", op="matmul", format=Format.BF16),
    ),
)


@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(plans(), plans())
def test_digest_is_of_what_the_plan_does(plan: Plan, other: Plan) -> None:
    bare = tuple(replace(d, reasons=()) for d in plan.decisions)
    assert replace(plan, decisions=bare[::-1], engine="x", policy="y").digest == plan.digest
    same = (plan.model, plan.opset, plan.formats, dict(plan.io)) == (
        other.model,
        other.opset,
        other.formats,
        dict(other.io),
    )
    assert (plan.digest == other.digest) == same


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, model="n"),
        replace(PLAN, opset=23),
        replace(PLAN, io={"x": Format.BF16}),
        replace(PLAN, decisions=PLAN.decisions[:2]),
        replace(PLAN, by_hint=True),
        replace(PLAN, decisions=(replace(PLAN.decisions[0], format=Format.FP32),)),
    ],
)
def test_digest_changes_with_what_the_plan_does(other: Plan) -> None:
    assert other.digest != PLAN.digest


def test_counts_and_lookup() -> None:
    assert list(PLAN.counts.items()) == [("bf16", 2), ("fp32", 1)]
    found = PLAN.decision("b")
    assert found is not None
    assert found.format is Format.FP32
    assert PLAN.decision("z") is None


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("*.json")), ids=lambda p: p.stem)
def test_plans_of_every_version_load(sample: Path) -> None:
    plan = Plan.load(sample)
    stated: dict[str, Any] = json.loads(sample.read_text())
    assert plan.formats["/attn/MatMul"] is Format.BF16
    assert plan.formats["/attn/Softmax"] is Format.FP32
    assert plan.io == {"x": Format.BF16}
    assert plan.from_type == stated.get("from_type", "")
    assert plan.frozen is stated.get("frozen")
    assert plan.keep_ops == stated.get("keep_ops", False)
    assert plan.by_hint == stated.get("by_hint", False)
    assert plan.kv_cache.label == stated.get("kv_cache", "fp32")
    assert [a.to_dict() for a in plan.adjustments] == stated.get("adjustments", [])


def test_every_version_has_a_sample_and_keeps_its_digest() -> None:
    samples = {p.stem: p for p in SAMPLES.glob("*.json")}
    assert set(samples) == {f"v{n}" for n in range(1, PLAN_VERSION + 1)}
    newest = samples[f"v{PLAN_VERSION}"]
    # Studies and models carry digests: a release must not compute another one.
    assert Plan.load(newest).digest == json.loads(newest.read_text())["digest"]


def test_a_plan_without_its_checksum_is_refused() -> None:
    """Nothing else holds its policy, its engine and its reasons."""
    content = json.loads(PLAN.to_json())
    del content["checksum"]
    for change in ({}, {"policy": "all:fp16"}, {"engine": "onnxruntime"}):
        with pytest.raises(UsageError, match="the plan was changed: it has no checksum"):
            Plan.from_json(json.dumps(content | change))
    with pytest.raises(UsageError, match="its checksum is not that of what it says"):
        Plan.from_json(json.dumps(content | {"version": 10, "checksum": "0"}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", r"not a finecast plan, which is JSON \(line 1: Expecting value\) \(p"),
        ("[]", "not a finecast plan: it is \\[\\], expected an object"),
        ("null", "not a finecast plan"),
        ("{}", "not a finecast plan: it has no 'version'"),
        ('{"version": 99}', r"version 99 is newer than 11.*upgrade finecast"),
        (
            PLAN.to_json().replace('"bf16"', '"bf17"'),
            r"format is 'bf17', which is not known \(p\.json, decisions\[0\]\)",
        ),
        (PLAN.to_json()[:-20], "not a finecast plan"),
        (PLAN.to_json().replace('"opset": 22', '"opset": Infinity'), "not a finecast plan"),
    ],
)
def test_what_is_not_a_plan(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Plan.from_json(text, where="p.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the plan.*nothing\.json"):
        Plan.load(tmp_path / "nothing.json")


def test_a_binary_file_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\x80\x81\xff")
    with pytest.raises(UsageError, match=r"cannot read the plan: it is no text .*tune"):
        Plan.load(path)


def test_a_folder_is_no_plan(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the plan: Is a directory \("):
        Plan.load(tmp_path)


def test_a_plan_without_figures_is_the_same_whatever_was_measured() -> None:
    kept = Reason(rule="precision", text="it overflows", permits=("fp32", "bf16"))

    def searched(time_us: float) -> Plan:
        why = Reason(
            rule=DECISION,
            text=f"bf16 saves {time_us} us",
            permits=("bf16",),
            evidence={DECIDED_BY: "time", "bf16 us": time_us},
        )
        decision = Decision(node="a", op="MatMul", format=Format.BF16, reasons=(kept, why))
        return Plan(model="0", policy="auto:bf16", opset=17, decisions=(decision,))

    first, second = searched(12.5), searched(13.0)
    assert first.digest == second.digest
    assert first.to_json() != second.to_json()
    stripped = first.without_figures()
    assert stripped.to_json() == second.without_figures().to_json()
    assert stripped.digest == first.digest
    (decision,) = Plan.from_json(stripped.to_json()).decisions
    assert decision.reasons == (kept, Reason(rule=DECISION, text="", permits=("bf16",)))
