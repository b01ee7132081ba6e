"""What ``finecast tune`` prints: the tuned model beside fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from finecast.pipeline.result import TF32_TIMES

if TYPE_CHECKING:
    from rich.table import Table

    from finecast.pipeline.hint import Anchor
    from finecast.pipeline.result import Measured, Result

_MOST_PHASES: Final = 6
# For objectives whose cost no other column shows: the heading of a column for it, and how its
# figure is computed from the cost.
_COUNTED: Final[Mapping[Objective, tuple[str, Callable[[float], float]]]] = {
    Objective.THROUGHPUT: ("calls/s", lambda cost_s: 1 / cost_s),
    Objective.MEMORY: ("MB in memory\n(estimated)", lambda cost_bytes: cost_bytes / 1e6),
}


def phase_line(phases: Mapping[str, float]) -> str:
    """What the search spent its time on; empty where that is not known."""
    told = [f"{name} {seconds:.1f} s" for name, seconds in phases.items() if seconds >= 0.1]
    return f"time by phase: {', '.join(told[:_MOST_PHASES])}" if told else ""


def _table(outcome: Result, metric: str, output: Path) -> Table:
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


def _is_faster_hint(anchor: Anchor, outcome: Result) -> bool:
    """Whether an engine's hint, not a model that was given, is faster than the result."""
    return "hint" in anchor.name and anchor.cost < outcome.tuned.cost


def _states_no_hint(outcome: Result, output: Path) -> bool:
    """Whether the output is ONNX for OpenVINO, whose IR alone states plans by the hint."""
    engine = outcome.plan.engine.partition(":")[0]
    return engine == "openvino" and output.suffix.lower() == ".onnx"


def write_report(
    outcome: Result, metric: str, output: Path, plan: Path, *, as_json: bool
) -> None:
    """Print the verdict, the models side by side, and what was written."""
    if as_json:
        write_json(outcome.to_dict())
        return
    from finecast.compat.neuron.ladders import casts_off
    from finecast.measure.environment import cpu_label, environment

    improved = outcome.improved
    write_line(f"{outcome.verdict.value}: {outcome.why}")
    table = _table(outcome, metric, output)
    ops = ", ".join(f"{n} {fmt}" for fmt, n in outcome.counts.items())
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
        lines.append(TF32_TIMES)
    where = f"wrote {output} and {plan}" if improved else "nothing written: use the fp32 model"
    lines.append(Verbatim(where))
    lines += map(Verbatim, outcome.run_notes)
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
