"""A report's sentences: the ops that it names are those that cost the accuracy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import finecast
from finecast.planning.contributions import (
    SHARES_OF,
    Contributions,
    PrecisionGroup,
    error_share,
    precision_groups,
)
from finecast.planning.plan import Plan
from finecast.reports.content import Sources, content_of
from finecast.reports.summary import summary_of
from finecast.rules.base import Reason
from finecast.rules.policy import Policy
from finecast.tuning.result import Result
from tests.reports import made

WIDTH, LOUD = 256, 20.0
PRODUCTS = ("quiet", "loud", "last")


@pytest.fixture(scope="module")
def outlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A net in which ``loud`` reads a channel 20 times as large as the others, and its data.

    The steps of int8 have to cover that channel: most of the error is that of ``loud``.
    """
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=(WIDTH, WIDTH)) / np.sqrt(WIDTH) for n in PRODUCTS}
    weights["quiet"][:, 0] *= LOUD
    weights["loud"][0] /= LOUD
    nodes, read = [], "x"
    for name in PRODUCTS:
        nodes.append(helper.make_node("MatMul", [read, f"w_{name}"], [name], name=name))
        read = f"{name}_positive"
        nodes.append(helper.make_node("Relu", [name], [read], name=read))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH])]
        for name in ("x", read)
    ]
    stored = [
        numpy_helper.from_array(w.astype(np.float32), f"w_{n}") for n, w in weights.items()
    ]
    graph = helper.make_graph(nodes, "net", ends[0], ends[1], stored)
    opsets = [helper.make_opsetid("", 17)]
    path = tmp_path_factory.mktemp("outlier") / "net.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path, {"x": rng.normal(size=(256, WIDTH)).astype(np.float32)}


def tuned(outlier: tuple[Path, dict[str, Any]], *in_fp32: str) -> Result:
    """In int8 but for these ops, for a device whose times are modelled."""
    path, data = outlier
    kept = tuple(re.compile(f"^{name}$") for name in in_fp32)
    policy = replace(Policy.parse("auto:int8"), exclude=kept)
    asked: dict[str, Any] = {"metric": "snr_db", "tolerance": 10, "target": "avx512-vnni"}
    return finecast.tune(path, data=data, policy=policy, **asked)


def test_the_error_falls_by_the_share_of_the_first_op_named_if_that_is_in_fp32(
    outlier: tuple[Path, dict[str, Any]],
) -> None:
    found = tuned(outlier)
    assert found.counts["int8"] == len(PRODUCTS)
    content = found.report().to_dict()
    first, *others = content["summary"]["limits"]
    assert first["measured_share"] == pytest.approx(first["share"], abs=0.05)
    name = content["ops"][first["op"]]["name"]
    assert name == "loud"
    before = found.measured_error or 0.0
    fell = {n: 1 - ((tuned(outlier, n).measured_error or 0.0) / before) ** 2 for n in PRODUCTS}
    assert max(fell, key=lambda n: fell[n]) == name
    assert fell[name] == pytest.approx(first["share"], abs=0.05)
    for one in others:
        assert fell[content["ops"][one["op"]]["name"]] == pytest.approx(one["share"], abs=0.05)
    assert content["summary"]["kept"] == []


def test_report_tune_explain_and_blame_name_the_same_op_first(
    outlier: tuple[Path, dict[str, Any]],
) -> None:
    path, data = outlier
    found = tuned(outlier)
    first = found.report().to_dict()["summary"]["limits"][0]
    said = f"{SHARES_OF}: loud (int8) {first['measured_share']:.0%}, "
    explained = finecast.explain(path, plan=found.plan)
    assert said in str(found)
    assert said in str(explained)
    for one in (found.to_dict(), explained.to_dict()):
        (loud, *_) = one["contributions"]["reduced_precision"]
        assert loud["op"] == "loud"
        assert loud["measured_share"] == pytest.approx(first["measured_share"], abs=1e-5)
    blamed = finecast.blame(path, found.plan, data=data, max_error=1e-5)
    name, share = next(iter(blamed.largest_shares.items()))
    assert name == "loud"
    assert share == pytest.approx(first["share"], abs=0.1)
    assert f"{SHARES_OF}: loud" in str(blamed)


def test_an_op_in_fp32_is_named_apart_however_much_error_it_would_add() -> None:
    content = made.content()
    said = content["summary"]
    assert {content["ops"][one["op"]]["type"] for one in said["limits"]} == {"fp16"}
    assert sum(one["share"] for one in said["limits"]) == pytest.approx(0.75, abs=0.01)
    assert [content["ops"][one["op"]]["name"] for one in said["kept"]] == ["net/layer.1/n2"]
    assert said["kept_heading"].startswith("The op in fp32 that would gain the most time")
    assert "fp16 would save 72 us, and raise the predicted error" in said["kept"][0]["text"]


def group(name: str, fmt: str, **evidence: float) -> PrecisionGroup:
    """A group of one op whose reason has these figures."""
    figures = {key.replace("_", " "): value for key, value in evidence.items()}
    reason = Reason(rule="decision", text="", permits=(fmt,), evidence=figures)
    return PrecisionGroup(ops=(name,), main=name, kind="matmul", format=fmt, reason=reason)


def test_low_ops_are_ranked_by_what_their_return_to_fp32_takes_from_the_error() -> None:
    low = {
        name: group(name, "int8", error_if_fp32=error, error_if_int8=0.1)
        for name, error in {"some": 0.09, "most": 0.05, "little": 0.0999}.items()
    }
    kept = group("kept", "fp32", error_if_fp32=0.1, error_if_int8=9.0)
    costly = Contributions.among([kept, *low.values()])
    assert costly.low == (low["most"], low["some"])  # the last has too little
    assert costly.kept == ()  # it would gain no time


def test_ops_in_fp32_are_ranked_by_the_time_that_a_format_which_they_may_have_saves() -> None:
    def kept(name: str, bf16_us: float, casts_us: float, error: float) -> PrecisionGroup:
        figures = {"fp32_us": 100.0, "bf16_us": bf16_us, "casts_if_bf16_us": casts_us}
        figures |= {"int8_us": 1.0}  # not permitted: no casts are known
        return group(name, "fp32", **figures, error_if_fp32=0.01, error_if_bf16=error)

    fast, slow, worse = (
        kept("fast", 20.0, 10.0, 0.011),
        kept("slow", 60.0, 10.0, 9.0),
        kept("worse", 60.0, 50.0, 0.01),
    )
    costly = Contributions.among([slow, worse, fast])
    assert costly.kept == (fast, slow)
    assert fast.saved_us == {"bf16": 70.0}
    (line,) = costly.lines
    assert "fast (bf16 would save 70 us; output error 1% -> 1.1%), slow" in line


def test_ops_that_were_decided_together_are_named_by_their_product() -> None:
    plan: Plan = made.result().plan
    low = [d for d in plan.decisions if d.format.label == "fp16"]
    (own,) = (r for r in low[0].reasons if r.rule == "decision")
    together = replace(own, evidence={**own.evidence, "ops in one kernel": 2.0})
    decisions = {
        low[0].node: replace(low[0], op="transpose", reasons=(together,)),
        low[1].node: replace(low[1], reasons=(together,)),
    }
    plan = replace(plan, decisions=tuple(decisions.get(d.node, d) for d in plan.decisions))
    (pair,) = (one for one in precision_groups(plan) if len(one.ops) == 2)
    assert (pair.ops, pair.main) == ((low[0].node, low[1].node), low[1].node)
    content = content_of(Sources(model="net", plan=plan))
    names = [op["name"] for op in content["ops"]]
    assert low[1].node in [names[one["op"]] for one in content["summary"]["limits"]]


@pytest.mark.parametrize("errors", [{}, {"fp32": 0.1}, {"fp32": 0.0, "int8": 0.0}])
def test_no_share_is_told_where_no_error_is_known(errors: dict[str, float]) -> None:
    assert error_share("int8", errors) == 0


def test_an_output_that_is_lost_with_and_without_a_unit_tells_nothing_of_it() -> None:
    lost = float("inf")
    assert error_share("int8", {"fp32": lost, "int8": lost}) == 0
    assert error_share("int8", {"fp32": 0.1, "int8": lost}) == 1


def test_no_op_is_referred_to_where_none_is_named() -> None:
    """As of outputs whose rows are compared as a set, where errors of ops do not add up."""
    *_, following = summary_of(made.content(), [], [])["answers"]
    assert "first of these" not in following
    assert "If it loses too much, let finecast blame find the ops" in following
