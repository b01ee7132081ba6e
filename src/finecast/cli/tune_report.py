"""What ``finecast tune`` prints: the tuned model beside fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from finecast.cli.output import (
    Verbatim,
    add_row,
    new_table,
    output_lines,
    write_json,
    write_line,
    write_table,
)
from finecast.naming import number_of
from finecast.pipeline.goal import Objective

if TYPE_CHECKING:
    from rich.table import Table

    from finecast.pipeline.hint import Anchor
    from finecast.pipeline.outcome import Findings, Found, Measured, Outcome
    from finecast.planning.plan import Plan

_TF32_TIMES = (
    "times are those of tf32 products, which the compiler or runtime has to switch on; the"
    " arithmetic that gives the model their numbers is not counted"
)
_MOST_PHASES: Final = 6
# For objectives whose cost no other column shows: the heading of a column for it, and how its
# figure is computed from the cost.
_COUNTED: Final[Mapping[Objective, tuple[str, Callable[[float], float]]]] = {
    Objective.THROUGHPUT: ("calls/s", lambda cost_s: 1 / cost_s),
    Objective.MEMORY: ("MB in memory\n(estimated)", lambda cost_bytes: cost_bytes / 1e6),
}


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """The report as JSON."""
    findings, faster = outcome.findings, outcome.next_faster
    return {
        "verdict": outcome.verdict.value,
        "why": outcome.why,
        "objective": outcome.objective.value,
        "target": outcome.target or None,
        "times": _times(outcome),
        "baseline": _measured(outcome.baseline, outcome.objective),
        "tuned": _measured(outcome.tuned, outcome.objective),
        "speedup": outcome.speedup,
        "speedup_spread": outcome.speedup_spread,
        "gain": outcome.gain,
        "gain_spread": outcome.gain_spread,
        "evaluations": outcome.evaluations,
        "reused_trials": outcome.reused,
        "probes": outcome.probes,
        "seconds": outcome.seconds,
        "phases_s": dict(outcome.phases),
        "ops": outcome.ops,
        "reference": outcome.reference,
        "casts": outcome.casts,
        "by_hint": outcome.plan.by_hint,
        "relative_error": {
            "predicted": outcome.predicted_error,
            "measured": outcome.measured_error,
            "outputs": outcome.output_errors,
            "left_out": list(outcome.left_out),
        },
        "adjustments": [gain.to_dict() for gain in outcome.gains],
        "formats": labels(outcome.plan),
        "frontier": [_found(one, outcome) for one in findings.frontier],
        "sensitivities": [
            {
                "nodes": list(one.nodes),
                "format": one.format.label,
                "relative_error": one.error,
                "fp32": _cost(one.fp32_cost, findings),
                "low": _cost(one.low_cost, findings),
            }
            for one in findings.sensitivities
        ],
        "candidates": [_found(one, outcome) for one in findings.candidates],
        "next_faster": None if faster is None else _found(faster, outcome),
        "anchors": [
            {
                "name": a.name,
                "metric": a.metric,
                "latency_ms": a.latency_s * 1e3,
                **_counted(a.cost, outcome.objective),
                "passed": a.passed,
            }
            for a in outcome.anchors
        ],
        "warnings": list(outcome.warnings),
        "stale": [str(path) for path in outcome.stale],
        "trials": [
            {
                "plan": t.key.plan,
                "name": t.name,
                "metric": t.metric,
                "latency_ms": None if t.latency_s is None else t.latency_s * 1e3,
                "passed": t.passed,
            }
            for t in outcome.trials
        ],
    }


def labels(plan: Plan) -> dict[str, str]:
    """The label of each node's format."""
    return {node: fmt.label for node, fmt in plan.formats.items()}


def _cost(cost: float | None, findings: Findings) -> dict[str, float | None]:
    """A cost with its unit."""
    from finecast.planning.problem import Priced

    timed = findings.priced is Priced.TIME
    value = cost if cost is None or not timed else cost * 1e3
    return {"ms" if timed else "bytes": value}


def _found(one: Found, outcome: Outcome) -> dict[str, Any]:
    """A plan that was considered; null for what was not measured.

    ``changes`` are the formats of the nodes that have another one in the result.
    """
    own, findings = labels(outcome.plan), outcome.findings
    formats = labels(one.plan)
    changed = (n for n in {**formats, **own} if formats.get(n, "fp32") != own.get(n, "fp32"))
    return {
        "plan": one.plan.digest,
        "name": one.name,
        "predicted": {
            **_cost(one.predicted_cost, findings),
            "relative_error": one.predicted_error,
        },
        "measured": {**_cost(one.cost, findings), "relative_error": one.error},
        "latency_ms": None if one.latency_s is None else one.latency_s * 1e3,
        "casts": one.casts,
        "metric": one.metric,
        "passed": one.passed,
        "changes": {node: formats.get(node, "fp32") for node in changed},
    }


def phase_line(phases: Mapping[str, float]) -> str:
    """What the search spent its time on; empty where that is not known."""
    told = [f"{name} {seconds:.1f} s" for name, seconds in phases.items() if seconds >= 0.1]
    return f"time by phase: {', '.join(told[:_MOST_PHASES])}" if told else ""


def _times(outcome: Outcome) -> str:
    text = f"modelled for {outcome.target}, not measured" if outcome.target else "measured"
    return f"{text}; {_TF32_TIMES}" if "tf32" in outcome.plan.counts else text


def _measured(one: Measured, objective: Objective) -> dict[str, Any]:
    return {
        "metric": one.metric,
        "outputs": dict(one.outputs),
        "latency_ms": one.latency_s * 1e3,
        "size_bytes": one.size_bytes,
        **_counted(one.cost, objective),
    }


def _counted(cost: float, objective: Objective) -> dict[str, float]:
    """The cost by the objective, unless it is the latency or the size, which are shown."""
    if not math.isfinite(cost):
        return {}
    if objective is Objective.THROUGHPUT:
        return {"calls_per_s": 1 / cost}
    return {"memory_bytes": cost} if objective is Objective.MEMORY else {}


def _table(outcome: Outcome, metric: str, output: Path) -> Table:
    """The fp32 model, the tuned one, and what the engine's own lowering gives.

    Where that is faster and the output cannot state it, its line says which output can.
    """
    objective, fp32 = outcome.objective, outcome.baseline
    beside = _COUNTED.get(objective)
    heads = (metric, "ms a call", "MB", *((beside[0],) if beside else ()), "speed")
    gained = () if objective is Objective.LATENCY else (objective.words.gain,)
    table = new_table("", ("",), (*heads, *gained))

    def row(name: str, one: Measured | Anchor, size_bytes: int, gain: float) -> None:
        figures = [
            f"{one.metric:.6g}",
            f"{one.latency_s * 1e3:.3f}",
            f"{size_bytes / 1e6:.2f}",
        ]
        figures += [f"{beside[1](one.cost):.4g}"] if beside else []
        figures += [f"x{outcome.baseline.latency_s / one.latency_s:.2f}"]
        add_row(table, name, *figures, *(f"x{gain:.2f}" for _ in gained))

    row(outcome.reference, fp32, fp32.size_bytes, 1.0)
    if outcome.improved:
        row("tuned", outcome.tuned, outcome.tuned.size_bytes, outcome.gain)
    for anchor in outcome.anchors:
        name = anchor.name
        if not anchor.passed:
            name += " (misses the criterion)"
        elif _is_faster_hint(anchor, outcome) and _states_no_hint(outcome, output):
            name += f" (-o {output.stem}.xml makes it a plan)"
        row(name, anchor, fp32.size_bytes, fp32.cost / anchor.cost)
    return table


def _is_faster_hint(anchor: Anchor, outcome: Outcome) -> bool:
    """Whether an engine's hint, not a model that was given, is faster than the result."""
    return "hint" in anchor.name and anchor.cost < outcome.tuned.cost


def _states_no_hint(outcome: Outcome, output: Path) -> bool:
    """Whether the output is ONNX for OpenVINO, whose IR alone states plans by the hint."""
    engine = outcome.plan.engine.partition(":")[0]
    return engine == "openvino" and output.suffix.lower() == ".onnx"


def write_report(
    outcome: Outcome, metric: str, output: Path, plan: Path, *, as_json: bool
) -> None:
    """Print the verdict, the models side by side, and what was written."""
    if as_json:
        write_json(to_dict(outcome))
        return
    from finecast.compat.neuron.ladders import casts_off
    from finecast.engines.usage import how_to_run
    from finecast.measure.environment import cpu_label, environment

    improved = outcome.improved
    write_line(f"{outcome.verdict.value}: {outcome.why}")
    table = _table(outcome, metric, output)
    ops = ", ".join(f"{n} {fmt}" for fmt, n in outcome.ops.items())
    seen = "emulated" if outcome.target else "measured"
    lines: list[str] = []
    if improved:
        lines.append(
            f"relative output error: predicted {outcome.predicted_error:.3g},"
            f" {seen} {outcome.measured_error:.3g}"
        )
        lines += output_lines(outcome.output_errors, outcome.left_out, outcome.tuned.outputs)
        lines += [f"adjusted, {gain.text}" for gain in outcome.gains]
    if outcome.target:
        off = casts_off(outcome.target)
        lines.append(
            f"for {outcome.target}: accuracy emulated, times modelled, not measured"
            + (f"; compile it with {off}" if off else "")
        )
    if "tf32" in outcome.plan.counts:
        lines.append(_TF32_TIMES)
    where = f"wrote {output} and {plan}" if improved else "nothing written: use the fp32 model"
    lines.append(Verbatim(where))
    if improved and not outcome.target:
        many = outcome.objective is Objective.THROUGHPUT
        run = how_to_run(
            output,
            outcome.plan.engine,
            outcome.ops,
            throughput=many,
            by_hint=outcome.plan.by_hint,
        )
        lines += map(Verbatim, run.splitlines())
    trials = number_of(outcome.reused, "trial")
    reused = f", {trials} of the study reused" if outcome.reused else ""
    note = (
        f"{ops or 'no op in fp32'}; {number_of(outcome.casts, 'cast')} inside;"
        f" {number_of(outcome.evaluations, 'evaluation')} on all data{reused},"
        f" {number_of(outcome.probes, 'probe')},"
        f" {outcome.seconds:.1f} s on {cpu_label(environment())}"
    )
    if told := phase_line(outcome.phases):
        lines.append(told)
    write_table(table, note, *lines)
