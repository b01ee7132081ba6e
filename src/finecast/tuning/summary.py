"""What ``tune`` says of its result, the same in a terminal and in Python.

The models side by side, then what a person asks next: which ops stayed high and why, what a
faster plan would have cost, what was written, and how the model is run.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from finecast.data.metrics import ExpectedMetric
from finecast.devices.targets import load_target
from finecast.diagnosis.explanation import groups
from finecast.engines.exact import RELATIVE_ERROR
from finecast.measure.environment import cpu_label, environment
from finecast.naming import enumerated, number_of, percent
from finecast.native.engine_times import CLEAR
from finecast.numbers.formats import Format
from finecast.numbers.thresholds import SAME_TIME
from finecast.planning.contributions import Contributions
from finecast.plugin import title_of
from finecast.reports.base import TextTable, expected_text, output_lines
from finecast.reports.summary import kept_here, next_faster, prediction_off
from finecast.terminal import Verbatim
from finecast.tuning.goal import MIN_SPEEDUP, Objective

if TYPE_CHECKING:
    from finecast.tuning.hint import Baseline
    from finecast.tuning.result import Measured, Result

TF32_TIMES: Final = (
    "times are those of tf32 products, which the compiler or runtime has to switch on; the"
    " arithmetic that gives the model their numbers is not counted"
)
_MOST_PHASES: Final = 8
_LEAST_PHASE_S: Final = 0.1
_MOST_REASONS: Final = 3
_MOST_EVALUATED: Final = 5
_REMOVED: Final = "none"
# For objectives whose cost no other column shows: the heading of a column for it, and how its
# figure is computed from the cost.
_COUNTED: Final[Mapping[Objective, tuple[str, Callable[[float], float]]]] = {
    Objective.THROUGHPUT: ("calls/s", lambda cost_s: 1 / cost_s),
    Objective.MEMORY: ("MB in memory\n(estimated)", lambda cost_bytes: cost_bytes / 1e6),
}
_BY_RULES: Final = ("is kept by a rule", "are kept by rules")
_CANNOT: Final = (
    "has no kernel of its own in a lower format, or only moves data",
    "have no kernel of their own in a lower format, or only move data",
)
# Why an op stays in fp32, and why several do, by what decided other than rules alone.
_BECAUSE: Final[Mapping[str, tuple[str, str]]] = {
    "time": ("gains no time", "gain no time"),
    "casts": ("gains less than its casts cost", "gain less than their casts cost"),
    "error": (
        "would add more error than its time is worth",
        "would add more error than their time is worth",
    ),
    "bytes": ("saves no bytes", "save no bytes"),
    "kernel": ("runs in the kernel of another op", "run in the kernels of other ops"),
    "policy": _CANNOT,
    "whole plan": _CANNOT,
}


def comparison(result: Result) -> TextTable:
    """The fp32 model, the tuned one, and what the engine's own hint gives; then notes.

    Where that is faster and the output cannot state it, its line says which output can.
    """
    beside = _COUNTED.get(result.objective)
    timed = len(result.conditions.get("timed") or ())
    took = f"ms for {timed} calls" if timed > 1 else "ms a call"
    heads = (result.metric, took, "MB", *((beside[0],) if beside else ()), "speed")
    latency = result.objective is Objective.LATENCY
    gained = () if latency else (result.objective.words.gain,)

    def row(name: str, one: Measured | Baseline, size_bytes: int, gain: float) -> list[str]:
        figures = [
            f"{one.metric:.6g}",
            f"{one.latency_s * 1e3:.3f}",
            f"{size_bytes / 1e6:.2f}",
        ]
        figures += [f"{beside[1](one.cost):.4g}"] if beside else []
        figures += [f"x{result.baseline.latency_s / one.latency_s:.2f}"]
        return [name, *figures, *(f"x{gain:.2f}" for _ in gained)]

    fp32, tuned = result.baseline, result.tuned
    rows = [row(result.reference, fp32, fp32.size_bytes, 1.0)]
    if result.improved:
        rows.append(row("tuned", tuned, tuned.size_bytes, result.gain))
    rows += [
        row(_named(a, result), a, fp32.size_bytes, fp32.cost / a.cost)
        for a in result.baselines
    ]
    right = (*heads, *gained)
    return TextTable(
        title="; ".join(filter(None, (timed_in(result), speeds_apart(result)))),
        left=("",),
        right=right,
        rows=rows,
        notes=notes(result),
    )


def _elsewhere(result: Result, expected: ExpectedMetric) -> str:
    """What is lost on the data given, and what is expected on other data."""
    fp32, metric = result.baseline.metric, result.tuned.metric
    changed = f"{'falls' if metric < fp32 else 'rises'} by {abs(fp32 - metric):.2g}"
    here = "is unchanged" if metric == fp32 else changed
    if math.isinf(fp32):
        here = f"is {metric:.4g}"
    more = expected_text(expected.metric, expected.loss, expected.deviation)
    return f"{result.metric} {here} on your data; on new data of the same kind expect {more}"


def _named(baseline: Baseline, result: Result) -> str:
    """A baseline's name, and why it is not taken, or how it becomes a plan."""
    if not baseline.passed and kept_here(baseline.metric, result.conditions):
        certified = result.conditions.get("confidence") is not None
        reason = "not certified" if certified else "may lose too much on new data"
        return f"{baseline.name} ({reason})"
    if not baseline.passed:
        return f"{baseline.name} (loses too much)"
    as_plan = _as_plan(baseline, result)
    return f"{baseline.name} ({as_plan})" if as_plan else baseline.name


def _as_plan(baseline: Baseline, result: Result) -> str:
    """How a baseline becomes a plan that is faster than the result; empty if it does not.

    ONNX for OpenVINO states no plan by the engine's hint; OpenVINO's IR does.
    """
    asked, engine = result.asked, result.plan.engine.partition(":")[0]
    if asked is None or engine != "openvino" or asked.suffix.lower() != ".onnx":
        return ""
    faster = baseline.cost * MIN_SPEEDUP <= result.tuned.cost
    if not baseline.passed or "hint" not in baseline.name or not faster:
        return ""
    return f"-o {asked.stem}.xml makes it a plan"


def _chosen_engine(result: Result) -> list[str]:
    """That another engine than the preferred one was chosen, or that one thread is faster."""
    if not result.engine_times:
        return []
    preferred, *_ = result.engine_times
    own = next(t for t in result.engine_times if t.engine == result.engine)
    lines: list[str] = []
    if own is not preferred:
        hinted = " by its bf16 hint" if preferred.unsearched_s < preferred.call_s else ""
        there, here = (s * 1e3 for s in (own.call_s, preferred.unsearched_s))
        lines.append(
            f"{title_of(own.engine)} was chosen: in a quick comparison fp32 takes {there:.3g}"
            f" ms a call there, {here:.3g} in {title_of(preferred.engine)}{hinted}"
        )
    alone = own.gain_of_one_thread
    if alone > 1:
        threads = result.conditions.get("threads", environment().cores)
        lines.append(
            f"fp32 is x{alone:.2f} as fast on one thread as on {threads}, on which speeds here"
            " are measured"
        )
    return lines


def better_as_ir(result: Result) -> list[str]:
    """That the output in OpenVINO's own form would be much faster."""
    than = "this .onnx" if result.improved else "fp32"
    forms = [
        f"-o {result.asked.stem}.xml would be x{result.tuned.cost / a.cost:.2f} as fast"
        f" as {than}, by {a.name}"
        for a in result.baselines
        if result.asked and _as_plan(a, result) and result.tuned.cost / a.cost > SAME_TIME
    ]
    return forms[:1]


def notes(result: Result) -> list[str]:
    """What a person asks next, a line each; code and commands are ``Verbatim``."""
    lines, record = [*_chosen_engine(result), _made_of(result)], result.to_dict()
    lines += result.plan.declared
    if result.improved:
        seen = "emulated" if result.target else "measured"
        measured = percent(result.measured_error)
        predicted = percent(result.predicted_error)
        # Predictions are scaled to the plans with most ops in a format: for these the two are
        # one figure.
        foretold = result.error_figure == RELATIVE_ERROR and predicted != measured
        before = f"predicted {predicted}, " if foretold else ""
        lines.append(
            f"{result.error_figure}: {before}{seen} {measured},"
            f" on {number_of(result.error_samples, 'sample')}"
        )
        off = prediction_off(record)
        lines += [off] if off else []
        lines += _parts(result.predicted_parts)
        lines += output_lines(result.output_errors, result.left_out, result.tuned.outputs)
        lines += [f"adjusted, {gain.text}" for gain in result.gains]
        note = result.verified.note
        lines += [f"compared with fp32 on the timed inputs: {note}"] if note else []
        lines += result.verified.decided
    if result.certificate is not None:
        lines.append(f"certified: {result.certificate}")
    elif result.elsewhere is not None:
        lines.append(_elsewhere(result, result.elsewhere))
    elif result.improved and result.not_estimated:
        lines.append(f"what it loses on new data was not estimated: {result.not_estimated}")
    spread = result.orders.text(result.metric, result.error_figure, judged=True)
    lines += [spread] if spread else []
    lines += Contributions.of(result.plan).lines if result.improved else []
    lines += _kept(result)
    products = result.kept_products
    lines += [products.text] if products else []
    lines += _ran(result)
    if result.engine_times:
        preferred, *others = result.engine_times
        times = ", ".join(time.text for time in result.engine_times)
        near = preferred.engine == result.engine and any(
            other.call_s < preferred.call_s for other in others
        )
        hinted = preferred.unsearched_s < preferred.call_s
        reached = "what it reaches by its bf16 hint" if hinted else "it"
        kept = (
            f"{title_of(preferred.engine)} is kept unless another is x{CLEAR} as fast as"
            f" {reached}"
        )
        why = f"; {kept}" if near else ""
        compared = f"a call of fp32 in a quick comparison of engines: {times}{why}"
        lines.append(f"{compared}; choose by --engine")
    lines += [one.text for one in result.other_engines]
    missed = (record["next_faster"] or {}).get("passed") is False
    faster = next_faster(record, result.plan.digest) if result.improved or missed else ""
    lines += [faster] if faster else []
    lines += _evaluated(result)
    if result.reused_sensitivities:
        formats = ", ".join(result.reused_sensitivities)
        lines.append(f"sensitivities of {formats} were taken from the study")
    if result.target:
        off = load_target(result.target).casts_off
        lines.append(
            f"for {result.target}: accuracy emulated, times modelled, not measured"
            + (f"; compile it with {off}" if off else "")
        )
    if "tf32" in result.plan.counts:
        lines.append(TF32_TIMES)
    lines += _phases(result.phases)
    lines += _files(result)
    if result.output is not None and result.run_notes:
        lines += map(Verbatim, ("run it in Python:", *result.run_notes))
    return lines


def _made_of(result: Result) -> str:
    """What the model is made of, and what the search took."""
    ops = ", ".join(f"{n} in {fmt}" for fmt, n in result.counts.items())
    trials = number_of(result.reused, "trial")
    reused = f", {trials} of the study reused" if result.reused else ""
    machine = environment()
    casts = number_of(result.casts, "cast")
    return (
        f"ops: {ops or 'none in fp32'}, and {casts} between ops; search on"
        f" {number_of(machine.cores, 'core')} of {cpu_label(machine)}: {result.seconds:.1f}"
        f" s, {_evaluations(result)}{reused}, {number_of(result.probes, 'run')} on few samples"
    )


def _evaluations(result: Result) -> str:
    """How often all data were evaluated, and what of: plans are not all of it."""
    hints = sum("hint" in one.name for one in result.baselines)
    others = [one.name for one in result.baselines if "hint" not in one.name]
    plans = result.evaluations - 1 - len(result.baselines)
    of = [
        result.reference,
        *([number_of(plans, "plan")] if plans > 0 else []),
        *([number_of(hints, "precision hint")] if hints else []),
        *others,
    ]
    return f"{number_of(result.evaluations, 'evaluation')} on all data (of {enumerated(of)})"


def timed_in(result: Result) -> str:
    """In which engine times were measured, on how many threads; empty where none was."""
    if result.target or not result.engine:
        return ""
    threads = number_of(result.conditions.get("threads", environment().cores), "thread")
    return f"timed in {title_of(result.engine)}, {threads}{_sizes(result)}"


def speeds_apart(result: Result) -> str:
    """The range of the speeds in several processes, of which the result has the middle.

    Empty where times were not measured, and for one speed.
    """
    speeds = result.speedups
    if result.target or len(speeds) <= 1:
        return ""
    return f"x{min(speeds):.2f} to x{max(speeds):.2f} in {len(speeds)} processes"


def _sizes(result: Result) -> str:
    """How many samples the timed calls have; empty if no call has more than one."""
    counts: set[int] = set()
    for call in result.conditions.get("timed") or ():
        fronts = {shape[0] if shape else 1 for shape in call.values()}
        counts.add(fronts.pop() if len(fronts) == 1 else 1)
    if max(counts, default=1) <= 1:
        return ""
    return f", batch {enumerated(sorted(counts))}"


def _parts(errors: Mapping[str, float]) -> list[str]:
    """A line on the error of quantized weights alone and activations alone, if known."""
    if not errors:
        return []
    told = ", of ".join(f"{name} alone {percent(error)}" for name, error in errors.items())
    return [f"predicted error of quantized {told}"]


def _evaluated(result: Result) -> list[str]:
    """A line on the plans that were evaluated where none was taken; none where one was."""
    if result.improved:
        return []
    scored = [one for one in result.findings.candidates if one.metric is not None]
    fp32 = result.findings.fp32_cost
    texts = [
        f"{one.name} {one.metric:.6g}"
        + (f" (x{fp32 / one.cost:.2f} as fast)" if fp32 and one.cost else "")
        for one in scored[:_MOST_EVALUATED]
    ]
    more = len(scored) - len(texts)
    texts += [f"{more} more"] if more else []
    if not texts:
        return []
    return [f"{result.metric} of the plans that were evaluated: {', '.join(texts)}"]


def _kept(result: Result) -> list[str]:
    """A line on the ops that stay in fp32 and what decided that; none if no op is low."""
    fp32_groups = [one for one in groups(result.plan) if one.format == Format.FP32.label]
    total = len(result.plan.counted)
    kept = sum(len(one.nodes) for one in fp32_groups)
    if not result.improved or not kept:
        return []
    counts = Counter[tuple[str, str]]()
    for one in fp32_groups:
        counts[_BECAUSE.get(one.decided_by, _BY_RULES)] += len(one.nodes)
    named = counts.most_common(_MOST_REASONS)
    reasons = "; ".join(f"{count} {because[count > 1]}" for because, count in named)
    more = kept - sum(count for _, count in named)
    rest = f"; {more} for other reasons" if more else ""
    stay = "stays" if kept == 1 else "stay"
    return [f"{kept} of {number_of(total, 'op')} {stay} fp32: {reasons}{rest}"]


def _ran(result: Result) -> list[str]:
    """A line on the types of the engine's kernels, beside those planned; none if unknown.

    Engines fuse ops: an op in fp32 may run inside a kernel on integers.
    """
    ran = result.ran
    if not ran:
        return []
    counts = Counter(
        (one.format.label, ran.get(one.node, _REMOVED)) for one in result.plan.counted
    )
    planned = Counter(one.format.label for one in result.plan.counted)
    types = "; ".join(
        f"{number_of(count, f'{label} op')}: "
        + ", ".join(f"{n} in {into}" for (of, into), n in counts.most_common() if of == label)
        for label, count in planned.items()
    )
    return [f"types of the kernels that ran them (ops fused into one share its type): {types}"]


def _phases(phases: Mapping[str, float]) -> list[str]:
    """A line on what the time was spent on, which adds up; none where that is not known."""
    long = [(name, s) for name, s in phases.items() if s >= _LEAST_PHASE_S][:_MOST_PHASES]
    rest = sum(phases.values()) - sum(seconds for _, seconds in long)
    every = [*long, *([("other", rest)] if rest >= _LEAST_PHASE_S else [])]
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in every)
    return [f"time by phase: {told}"] if long else []


def _files(result: Result) -> list[str]:
    """Lines on what was written, and on what to do next."""
    if not result.improved:
        kept = [path for path in result.files if path.exists()]  # no study without trials
        wrote = [f"wrote {enumerated(kept)}"] if kept else []
        hints = [f"{a.name}: {how}" for a in result.baselines if (how := _as_plan(a, result))]
        use = "; or ".join(("use the model given", *hints))
        return [*wrote, f"no model was written: {use}"]
    samples = result.lock.with_suffix(".npz") if result.lock is not None else None
    locks = [path for path in (result.lock, samples) if path is not None and path.exists()]
    files = [*filter(None, (result.output, result.plan_out)), *locks, *result.files]
    lines = [f"wrote {enumerated(files)}"] if files else []
    if result.output is None:
        lines.append("the model is .model of the result; .save(PATH) writes it")
    if result.plan_out is not None:
        path, here = result.source.absolute(), Path.cwd()
        path = path.relative_to(here) if path.is_relative_to(here) else path
        command = f"finecast explain {shlex.quote(str(path))}"
        command += f" --plan {shlex.quote(str(result.plan_out))}"
        if path.exists():
            lines.append(Verbatim(f"why each op has its format: {command}"))
        else:
            lines.append("the format of each op, with its reason, is in .ops of the result")
    if result.lock is not None:
        written = shlex.quote(str(result.output))
        lines.append(Verbatim(f"on the machine that will run it: finecast verify {written}"))
        if samples in locks:
            lines.append(f"{samples} has samples of your data: --no-lock leaves them out")
    return lines
