"""What ``finecast tune`` prints: the tuned model beside fp32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from finecast.cli.output import (
    Verbatim,
    add_row,
    new_table,
    write_json,
    write_line,
    write_table,
)
from finecast.naming import number_of
from finecast.numbers.formats import Format
from finecast.reports.outputs import output_lines
from finecast.tuning.explanation import groups
from finecast.tuning.goal import Objective
from finecast.tuning.result import TF32_TIMES

if TYPE_CHECKING:
    from rich.table import Table

    from finecast.tuning.hint import Anchor
    from finecast.tuning.result import Measured, Result

_MOST_PHASES: Final = 6
_MOST_REASONS: Final = 3
_REMOVED: Final = "no kernel of its own"
# For objectives whose cost no other column shows: the heading of a column for it, and how its
# figure is computed from the cost.
_COUNTED: Final[Mapping[Objective, tuple[str, Callable[[float], float]]]] = {
    Objective.THROUGHPUT: ("calls/s", lambda cost_s: 1 / cost_s),
    Objective.MEMORY: ("MB in memory\n(estimated)", lambda cost_bytes: cost_bytes / 1e6),
}
# Why ops stay in fp32, by what decided; rules are named.
_BECAUSE: Final[Mapping[str, str]] = {
    "time": "gain no time",
    "casts": "gain less than their casts cost",
    "error": "would cost too much accuracy",
    "bytes": "save no bytes",
    "kernel": "share a kernel with such ops",
    "plan": "may have no lower type, or only move numbers",
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


def _parts(errors: Mapping[str, float]) -> list[str]:
    """A line on the error of codes of weights alone and of activations alone, if known."""
    if not errors:
        return []
    told = ", ".join(f"of {name} alone {error:.3g}" for name, error in errors.items())
    return [f"predicted for the codes {told}"]


def _kept(outcome: Result) -> list[str]:
    """A line on the ops that stay in fp32 and what decided that; none if no op is low."""
    found = [one for one in groups(outcome.plan) if one.format == Format.FP32.label]
    total = len(outcome.plan.counted)
    kept = sum(len(one.nodes) for one in found)
    if not outcome.improved or not kept:
        return []
    reasons = "; ".join(
        f"{len(one.nodes)} {_BECAUSE.get(one.decided_by, f'by {one.decided_by}')}"
        for one in found[:_MOST_REASONS]
    )
    more = sum(len(one.nodes) for one in found[_MOST_REASONS:])
    rest = f"; {more} for other reasons" if more else ""
    stay = "stays" if kept == 1 else "stay"
    return [f"{kept} of {number_of(total, 'op')} {stay} fp32: {reasons}{rest}"]


def _ran(outcome: Result) -> list[str]:
    """A line on the types of the engine's kernels, beside those asked for; none if untold.

    Engines fuse ops: an op in fp32 may run inside a kernel on codes.
    """
    ran = outcome.ran
    if not ran:
        return []
    counts = Counter(
        (one.format.label, ran.get(one.node, _REMOVED)) for one in outcome.plan.counted
    )
    asked = dict.fromkeys(label for label, _ in counts)
    told = [
        ", ".join(f"{n} {of} in {into}" for (of, into), n in counts.most_common() if of == one)
        for one in asked
    ]
    return [f"as the kernels ran them: {'; '.join(told)}"]


def _faster(outcome: Result, metric: str) -> list[str]:
    """A line on the next faster plan, and what it would cost; none if there is none."""
    one, fp32 = outcome.next_faster, outcome.findings.fp32_cost
    if one is None:
        return []
    cost = one.cost if one.cost is not None else one.predicted_cost
    known = fp32 is not None and 0 < cost < math.inf
    kind = "" if one.cost is not None else "predicted "
    gain = f", {kind}x{fp32 / cost:.2f}" if known and fp32 is not None else ""
    error = f"not evaluated, predicted output error {one.predicted_error:.3g}"
    if one.passed is not None and one.metric is not None:
        verdict = "keeps the criterion, too" if one.passed else "misses the criterion"
        error = f"{metric} {one.metric:.6g} {verdict}"
    return [f"the next faster plan, {one.name}{gain}: {error}"]


def _written(outcome: Result, output: Path, plan: Path) -> str:
    if not outcome.improved:
        return "nothing written: use the fp32 model"
    if outcome.lock is None:
        return f"wrote {output} and {plan}"
    return f"wrote {output}, {plan} and {outcome.lock}"


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
        lines += _parts(outcome.predicted_parts)
        lines += output_lines(outcome.output_errors, outcome.left_out, outcome.tuned.outputs)
        lines += [f"adjusted, {gain.text}" for gain in outcome.gains]
    if outcome.certificate is not None:
        lines.append(f"certified: {outcome.certificate}")
    lines += _ran(outcome)
    lines += _kept(outcome)
    lines += _faster(outcome, metric)
    if outcome.reused_sensitivities:
        formats = ", ".join(outcome.reused_sensitivities)
        lines.append(f"sensitivities of {formats} are those of an earlier run, of the study")
    if outcome.target:
        off = casts_off(outcome.target)
        lines.append(
            f"for {outcome.target}: accuracy emulated, times modelled, not measured"
            + (f"; compile it with {off}" if off else "")
        )
    if "tf32" in outcome.plan.counts:
        lines.append(TF32_TIMES)
    lines.append(Verbatim(_written(outcome, output, plan)))
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
    if improved:
        lines.append(
            Verbatim(f"why each op has its type: finecast explain MODEL --plan {plan}")
        )
    if outcome.lock is not None:
        lines.append(Verbatim(f"on the machine that will run it: finecast verify {output}"))
    write_table(table, note, *lines)
