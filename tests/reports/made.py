"""A report made without a search: of a chain of ops whose times and errors are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finecast.diagnosis.blaming import Blame, Culprit, WrongResult
from finecast.diagnosis.difference import Side, difference
from finecast.engines.base import KernelTime
from finecast.measure.study import Trial, TrialKey
from finecast.native.subject import Built
from finecast.numbers.formats import Format
from finecast.planning.adjustments import WHOLE, Adjustment
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis, Roundings
from finecast.planning.proposing import propose
from finecast.planning.range_scaling import RULE
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.base import Reason
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.tuning.findings import Findings, Found, sensitivities
from finecast.tuning.result import Measured, Result, Verdict
from tests.graph.text import from_text

FP32, FP16 = Format.FP32, Format.FP16
US = 1e-6


def planned(count: int) -> tuple[Planner, Analysis, Plan]:
    """A chain in which each op saves time in fp16, and the middle one loses all digits."""
    nodes = (
        f"node net/layer.{i // 2}/n{i} matmul onnx::MatMul fp32 (%{i}) -> (%{i + 1} v{i} fp32)"
        f" scope=net/layer.{i // 2}\n"
        for i in range(count)
    )
    graph = from_text("input %0 x fp32\n" + "".join(nodes) + f"output %{count}\n")
    allowed = {
        i: Permission(formats=frozenset({FP32, FP16}), reasons=()) for i in range(count)
    }
    planner = Planner(graph=graph, policy=Policy.parse("auto:fp16"), permissions=allowed)
    errors = np.full(count, 1e-6)
    errors[count // 2] = 0.04
    analysis = Analysis(
        units=make_units(graph, allowed, [FP16]),
        times={FP32: np.full(count, 100 * US), FP16: np.full(count, 40 * US)},
        cast_time=lambda _value, source, to: 0.0 if source is to else 6 * US,
        rounded={
            FP16: Roundings(
                units=errors, shared=np.zeros(len(errors)), lists=[], errors=np.zeros(0)
            )
        },
        node_time=lambda _node, fmt: 100 * US if fmt is FP32 else 40 * US,
    )
    steps = [p.plan for p in propose(planner, analysis)]
    middle = graph.nodes[count // 2].name
    plan = next(p for p in steps[::-1] if p.formats[middle] is FP32)
    return planner, analysis, plan


def facts_of(planner: Planner) -> dict[int, ValueFacts]:
    """Facts of each value; those of the last one overflow in fp16."""
    values = planner.graph.values
    x = np.array([0.0, 1e-9, 0.5, 1.0, 3.0], np.float32)
    found = {v.id: ValueFacts.of(x) for v in values}
    large = np.array([1.0, 7e4, 1e6, np.inf], np.float32)
    return found | {len(values) - 1: ValueFacts.of(large)}


def result(count: int = 5, *, improved: bool = True) -> Result:
    """What a search among these plans might have given."""
    planner, analysis, plan = planned(count)
    names = [n.name for n in planner.graph.nodes]
    fast = planner.lowest(FP16)
    key = TrialKey(model="m", plan=fast.digest, engine="openvino", data="d")
    missed = Trial(key=key, name="lowest in fp16", metric=0.1, passed=False, latency_s=4e-4)
    candidates = (
        Found(
            name="lowest in fp16",
            plan=fast,
            predicted_cost=count * 40 * US,
            predicted_error=0.2,
            cost=4e-4,
            latency_s=4e-4,
            casts=0,
            metric=0.1,
            passed=False,
        ),
        Found(
            name="plan 1",
            plan=plan,
            predicted_cost=count * 50 * US,
            predicted_error=0.002,
            cost=5e-4,
            latency_s=5e-4,
            casts=2,
            error=0.0021,
            metric=0.9,
            passed=True,
        ),
    )
    times = {"fp32": (FP32, 1e-4), "tuned": (FP16, 4e-5)}
    kernels = {
        model: (
            *(
                KernelTime(kernel=n, kind="MatMul", ops=(n,), format=fmt.label, time_s=time_s)
                for n in names
            ),
            KernelTime(kernel="r", kind="Reorder", ops=(), format="fp32", time_s=6 * US),
        )
        for model, (fmt, time_s) in times.items()
    }
    verdict = Verdict.IMPROVED if improved else Verdict.UNCHANGED
    return Result(
        verdict=verdict,
        why="plan 1 keeps the accuracy asked for" if improved else "no plan is faster here",
        plan=plan if improved else planner.unchanged("no plan is faster here"),
        counts=plan.counts,
        casts=2,
        seconds=3.0,
        baseline=Measured(size_bytes=1000, metric=0.91, latency_s=1e-3, cost=1e-3),
        tuned=Measured(size_bytes=600, metric=0.9, latency_s=5e-4, cost=5e-4),
        metric="top1",
        trials=(missed,),
        evaluations=2,
        phases={"timing": 2.0, "load": 1.0},
        speedup=2.0,
        gain=2.0,
        built=Built(model=None, plan=plan, size_bytes=600) if improved else None,
        findings=Findings(
            fp32_cost=1e-3,
            frontier=candidates[1:],
            sensitivities=sensitivities(planner, analysis),
            candidates=candidates,
            planner=planner,
            analysis=analysis,
            facts=facts_of(planner),
        ),
        source=Path("chain.onnx"),
        kernels=kernels["tuned"],
        fp32_kernels=kernels["fp32"],
        conditions={
            "target_metric": 0.89,
            "higher_is_better": True,
            "samples": 200,
            "timed": [{"x": [4, 8]}],
            "timing_notes": [],
            "date": "2026-01-02",
        },
    )


def content(count: int = 5, **given: Any) -> dict[str, Any]:
    """The content of its report."""
    return result(count, **given).report().to_dict()


def everything(count: int = 5) -> dict[str, Any]:
    """The content of a report with all that other verbs add: repairs, changes, culprits."""
    found = result(count)
    planner = found.findings.planner
    assert planner is not None
    names = [n.name for n in planner.graph.nodes]
    proof = Reason(rule=RULE, text="v1 reaches 7e4: it is computed times 2^-2; no bit changes")
    scaled = Adjustment(node=names[0], axis=WHOLE, exponents=(-2,))
    plan = found.plan.adjusted([scaled], {names[0]: [proof]})
    before, after = planner.lowest(FP16), plan
    changes = difference(Side.of_plan(before, "old.json"), Side.of_plan(after, "new.json"))
    blamed = Blame(
        low="low.onnx",
        figure="relative output error",
        fp32=0.0,
        value=0.5,
        restored=0.01,
        limit=0.02,
        passed=False,
        culprits=(
            Culprit(
                node=names[1],
                op="MatMul",
                format="fp16",
                moved=(names[2],),
                alone=0.4,
                reasons=("overflow: v1 reaches 7e4",),
                source="net.py:3",
            ),
        ),
        instead=("another",),
        first=WrongResult(node=names[1], op="MatMul", why="4 numbers NaN or Inf"),
        ops=count,
        evaluations=2,
    )
    report = replace(found, plan=plan).report()
    return report.beside(diff=changes.to_dict(), blame=blamed.to_dict()).to_dict()


def renamed(made: dict[str, Any], name: str) -> dict[str, Any]:
    """The content with this text wherever a model or a user's file may bring one."""
    named = dict(made)
    named["model"] = {**made["model"], "name": name}
    named["ops"] = [{**op, "name": name, "scope": name, "line": 0} for op in made["ops"]]
    named["lines"] = [name]
    named["values"] = [{**value, "name": name, "shape": [name]} for value in made["values"]]
    named["reasons"] = [{**reason, "text": name, "rule": name} for reason in made["reasons"]]
    named["summary"] = {**made["summary"], "verdict": name, "heading": name}
    text = json.dumps({part: made[part] for part in ("diff", "blame") if part in made})
    for op in made["ops"]:
        text = text.replace(json.dumps(op["name"]), json.dumps(name))
    return named | json.loads(text)


def without_search(found: Result) -> Result:
    """The result as one of which the plan alone is left."""
    return replace(
        found, findings=Findings(), kernels=(), fp32_kernels=(), verdict=Verdict.CONVERTED
    )
