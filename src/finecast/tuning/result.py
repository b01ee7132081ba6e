"""The result of a verb that gives a model: its plan, what was measured, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final

from finecast.data.certificates import Certificate
from finecast.data.metrics import NOT_EXPECTED, OF_DECISIONS, ExpectedMetric
from finecast.devices.targets import load_target
from finecast.engines.base import KernelTime
from finecast.engines.exact import RELATIVE_ERROR
from finecast.engines.usage import Inputs, how_to_run, in_memory_notes
from finecast.errors import UsageError, in_shell
from finecast.measure.environment import environment
from finecast.measure.racing import Interval
from finecast.measure.study import Trial
from finecast.naming import number_of, percent
from finecast.native.artefact import Converted, Destination, Verified
from finecast.native.engine_times import EngineTime
from finecast.native.gains import Gain
from finecast.native.opening import engine_of
from finecast.native.orders import OrderSpread
from finecast.native.subject import Built
from finecast.planning.contributions import Contributions
from finecast.planning.kept_products import KeptProducts
from finecast.planning.plan import Decision, Plan
from finecast.planning.problem import Priced
from finecast.plugin import title_of
from finecast.reports import drawing
from finecast.reports.base import Report, TextTable
from finecast.reports.content import Sources, content_of
from finecast.reports.plan_report import PlanReport
from finecast.tuning.findings import Findings, Found
from finecast.tuning.goal import Objective
from finecast.tuning.hint import Baseline
from finecast.tuning.pickling import reduced
from finecast.tuning.summary import (
    TF32_TIMES,
    better_as_ir,
    comparison,
    notes,
    speeds_apart,
    timed_in,
)

_NOT_RUN: Final = Verified(engine=None)


class Verdict(Enum):
    """How a verb ended: ``tune`` improves the model or leaves it, others convert it."""

    CONVERTED = "converted"
    IMPROVED = "improved"
    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class InOtherEngine:
    """How a tuned file does in an engine that it was not made in.

    Attributes:
        engine: The engine, as ``NAME:DEVICE``.
        speed: How many times as fast as fp32 the file is there; None if it does not run.
        why: Why it does not run there.
    """

    engine: str
    speed: Interval | None = None
    why: str = ""

    @property
    def text(self) -> str:
        """The same in words."""
        engine = title_of(self.engine)
        if self.speed is None:
            return f"in {engine} this file does not run: {self.why}"
        times = f"x{self.speed.median:.2f}"
        if self.speed.high < 1:
            return f"in {engine} this file is slower than fp32 is there: {times}"
        if self.speed.low > 1:
            return f"in {engine}, too, this file is faster than fp32 is there: {times}"
        return f"in {engine} this file is about as fast as fp32 is there: {times}"

    def to_dict(self) -> dict[str, Any]:
        """The same in JSON's types."""
        speed = self.speed
        return {
            "engine": self.engine,
            "speedup": None if speed is None else speed.median,
            "low": None if speed is None else speed.low,
            "high": None if speed is None else speed.high,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Size of one model and, where it was tuned, its metric and latency; else these are NaN.

    ``outputs`` has a built-in metric by output, the worst first, which decides. ``cost`` is
    what the objective counts: latency, seconds of a call under load, or bytes; NaN if it was
    not measured.
    """

    size_bytes: int
    metric: float = math.nan
    latency_s: float = math.nan
    cost: float = math.nan
    outputs: Mapping[str, float] = field(default_factory=dict[str, float])

    def text(self, metric: str) -> str:
        """The metric, by its name, the time of a call and the size."""
        took, size = f"{self.latency_s * 1e3:.3f} ms a call", f"{self.size_bytes / 1e6:.2f} MB"
        return f"{metric} {self.metric:.6g}, {took}, {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """An op in a result.

    Attributes:
        node: Its name.
        op: What it computes.
        type: The label of its format.
        reason: Why it has that.
        ms: Time of its kernel, which it may share with other ops: in the tuned model where the
            engine tells that, else in that format; None where that is not known.
        error: Relative error of the worst output if its kernel alone had that format; None
            where that is not known.
        ran: The format that its kernel in the tuned model computes in, which may be another
            one: an op in fp32 may be part of a kernel on codes. None where the engine does not
            tell, or removed the op.
    """

    node: str
    op: str
    type: str
    reason: str
    ms: float | None = None
    error: float | None = None
    ran: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result(Report):
    """What ``convert``, ``apply`` or ``tune`` gives; printed it is a few lines.

    Attributes:
        verdict: Whether the model was converted as asked or, if tuned, is better than fp32.
        plan: The format of every op, and why.
        counts: Number of ops by the format that they compute in; ops that another tool
            quantized are counted apart.
        casts: Casts between ops: those of inputs and outputs are not among them.
        seconds: How long it took.
        baseline: Measurements of the model given.
        tuned: Those of the result; of the model given where that is unchanged.
        model: The model in the kind that was given. None if it was converted to a file.
        asked: The file or folder that the model was to be written to.
        output: The same if it was written.
        lock: The lock that was written beside it.
        warnings: Notes for the user: what makes the result weak, for example.
        nodes: Nodes of the graph before the conversion.
        verified: How the model was verified as it was written, or would be.
        restated: Low ops that were rewritten as the engine's matchers know them, and why.
        gains: What adjustments of operands do to the error. Of a conversion all that were
            asked for, of which the model has those that gain.
        reference: The name of the baseline: fp32, or the model given if that was low or
            quantized.
        why: The reason of a verdict of ``tune``.
        metric: The name of the metric that the criterion is about.
        objective: What the search minimised.
        trials: Plans that were evaluated, or taken from the study.
        certificate: The bound on the loss of accuracy, where a confidence was asked for.
        elsewhere: What is expected on other data of the same kind, where samples tell it.
        orders: Metric and error over orders of summation, on a device that is emulated.
        evaluations: Evaluations on all data in this run.
        phases: The seconds of each phase of ``tune``, the longest first; they add up to
            ``seconds``.
        probes: Runs of the model for sensitivities.
        reused_sensitivities: Formats whose sensitivities an earlier run measured.
        speedup: How many times as fast as fp32 a call of the tuned model is.
        speedup_spread: The width of the interval in which that lies.
        speedups: The same in each of the processes in which it was timed, of which ``speedup``
            is the middle.
        gain: How many times as good as fp32 the tuned model is by the objective.
        gain_spread: The width of the interval in which that lies.
        predicted_error: Relative error of the worst output against fp32, by the sensitivities.
        predicted_parts: The same of codes of ``weights`` alone and of ``activations`` alone;
            empty where the plan has not both.
        kernels: The kernels of the tuned model, if the engine tells.
        output_errors: The same by output, measured where it was predicted, the worst first.
        error_figure: What these errors are called. Shares of numbers that differ, of outputs
            without floats, are not what was predicted of roundings.
        error_samples: The number of samples that they are of; the metric is of all data.
        left_out: Outputs that no error is told of, as they copy an input or others are named.
        target: The device that was emulated, with modelled times; empty if all was measured.
        reused: How many of the trials an earlier run made.
        stale: Files beside the output that an earlier run left and this one did not replace.
        built: What the plan gave; None where it is unchanged or was not tuned.
        baselines: Models that the engine lowers by itself, without tuning.
        findings: What the search considered: frontier, sensitivities and candidates.
        engine: What it was measured in, as ``NAME:DEVICE``; empty if not tuned.
        engine_times: How fast the fp32 model is by engine, the preferred one first; empty
            where an engine was named, or one alone runs the model.
        other_engines: How the file that was written does in other engines that are here.
        source: The path of the model given; a name where it is an object.
        plan_out: The file that the plan was written to.
        files: What else was written: the study, pictures and reports.
        inputs: The arrays of a call that was timed; empty if not tuned.
        fp32_kernels: Those of the fp32 model; profiled for a study or a report only.
        conditions: What the metric and the times are of: the metric to keep, the number of
            samples, the shapes of the feeds that are timed, the date; empty if not tuned.
        writer: Writes the model of the plan to a destination.
    """

    verdict: Verdict
    plan: Plan
    counts: Mapping[str, int]
    casts: int
    seconds: float
    baseline: Measured
    tuned: Measured
    model: Any = None
    asked: Path | None = None
    output: Path | None = None
    lock: Path | None = None
    warnings: tuple[str, ...] = ()
    nodes: int = 0
    verified: Verified = _NOT_RUN
    restated: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()
    reference: str = "fp32"
    why: str = ""
    metric: str = "metric"
    objective: Objective = Objective.LATENCY
    trials: tuple[Trial, ...] = ()
    certificate: Certificate | None = None
    elsewhere: ExpectedMetric | None = None
    orders: OrderSpread = field(default_factory=OrderSpread)
    evaluations: int = 0
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    probes: int = 0
    reused_sensitivities: tuple[str, ...] = ()
    speedup: float = 1.0
    speedup_spread: float = 0.0
    speedups: tuple[float, ...] = ()
    gain: float = 1.0
    gain_spread: float = 0.0
    predicted_error: float = 0.0
    predicted_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    kernels: tuple[KernelTime, ...] = ()
    output_errors: Mapping[str, float] = field(default_factory=dict[str, float])
    error_figure: str = RELATIVE_ERROR
    error_samples: int = 0
    left_out: tuple[str, ...] = ()
    target: str = ""
    reused: int = 0
    stale: tuple[Path, ...] = ()
    built: Built | None = None
    baselines: tuple[Baseline, ...] = ()
    findings: Findings = field(default_factory=Findings)
    engine: str = ""
    engine_times: Sequence[EngineTime] = ()
    other_engines: tuple[InOtherEngine, ...] = ()
    source: Path = Path("model")
    plan_out: Path | None = None
    files: tuple[Path, ...] = ()
    inputs: Inputs = field(default_factory=dict[str, tuple[tuple[int, ...], str]])
    fp32_kernels: tuple[KernelTime, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict[str, Any])
    writer: Callable[[Destination], object] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without what reads the model."""
        return reduced(self)

    @classmethod
    def of(cls, converted: Converted) -> Result:
        """The result of a conversion."""
        before, after = (Measured(size_bytes=size) for size in converted.size_bytes)
        shared = {f.name: getattr(converted, f.name) for f in fields(converted)}
        del shared["size_bytes"]
        return cls(verdict=Verdict.CONVERTED, baseline=before, tuned=after, **shared)

    def and_then(self, phases: Mapping[str, float]) -> Result:
        """The result once further ``phases``, of other names, took these seconds, too."""
        every = sorted(({**self.phases, **phases}).items(), key=lambda found: -found[1])
        return replace(self, phases=dict(every), seconds=self.seconds + sum(phases.values()))

    def of_size(self, size_bytes: int) -> Result:
        """The result once its model takes so many bytes on disk, of which its gain then is."""
        if self.objective is not Objective.SIZE:
            return replace(self, tuned=replace(self.tuned, size_bytes=size_bytes))
        tuned = replace(self.tuned, size_bytes=size_bytes, cost=float(size_bytes))
        return replace(self, tuned=tuned, gain=self.baseline.size_bytes / size_bytes)

    @property
    def lines(self) -> list[str]:
        """The verdict, both models side by side, and what the result is made of."""
        warnings = [f"warning: {text}" for text in in_shell(self.warnings)]
        if self.verdict is not Verdict.CONVERTED:
            lines = [f"{self.verdict.value}: {'; '.join((self.why, *better_as_ir(self)))}"]
            timed = timed_in(self)
            timed = f", {timed}" if timed else ""
            lines.append(f"{self.reference}: {self.baseline.text(self.metric)}{timed}")
            if self.improved:
                words = self.objective.words
                faster = f"x{self.gain:.2f} {words.as_good} as {self.reference}"
                apart = speeds_apart(self)
                faster += f" ({apart})" if apart else ""
                lines.append(f"tuned: {self.tuned.text(self.metric)}, {faster}")
            return [*lines, *warnings, *notes(self)]
        ops = ", ".join(f"{count} {label}" for label, count in self.counts.items())
        before, after = (one.size_bytes / 1e6 for one in (self.baseline, self.tuned))
        casts = f"{number_of(self.casts, 'cast')} between ops"
        lines = [f"converted by {self.plan.policy}: {ops or 'no op in fp32'}; {casts}"]
        lines += self.plan.declared
        lines.append(f"{before:.2f} MB before, {after:.2f} MB after, in {self.seconds:.1f} s")
        return [*lines, *_verified_lines(self.verified), *warnings]

    @property
    def comparison(self) -> TextTable:
        """The models side by side, as a terminal has them in place of the first lines."""
        return comparison(self)

    @property
    def tables(self) -> Sequence[TextTable]:
        """What became of each op."""
        rows = [
            (r.node, r.op, r.type, r.ran or "", r.reason, _figure(r.ms), _figure(r.error))
            for r in self.ops
        ]
        left = ("node", "op", "type", "ran", "reason")
        return [TextTable(title="ops", left=left, right=("ms", "error"), rows=rows)]

    def _repr_html_(self) -> str:
        """The same in a notebook, with the picture of a search."""
        picture = None if self.verdict is Verdict.CONVERTED else drawing("picture")
        shown = "" if picture is None else picture(self.to_dict(), "plans")
        return shown + Report._repr_html_(self)

    @property
    def improved(self) -> bool:
        """Whether there is a better model, by the objective, that keeps the criterion."""
        return self.verdict is Verdict.IMPROVED

    @property
    def size_bytes(self) -> tuple[int, int]:
        """Bytes of the model before and after."""
        return self.baseline.size_bytes, self.tuned.size_bytes

    @property
    def accuracy(self) -> dict[str, Any]:
        """The metric of both models, and the certificate, in JSON's types."""
        return {
            "metric": self.metric,
            "fp32": self.baseline.metric,
            "tuned": self.tuned.metric,
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
        }

    @property
    def measured_error(self) -> float:
        """Relative error of the worst output against fp32, measured where it was predicted."""
        return max(self.output_errors.values(), default=0.0)

    @property
    def kept_products(self) -> KeptProducts | None:
        """The products in fp32; where the model is unchanged, those that the rules keep so."""
        return self.findings.kept_products(self.plan if self.improved else None)

    @property
    def not_estimated(self) -> str:
        """Why nothing is expected of new data; empty if it is, or the model is unchanged."""
        planner, scored = self.findings.planner, next(iter(self.baseline.outputs), "")
        if self.elsewhere is not None or not self.improved or planner is None:
            return ""
        outputs = planner.graph.outputs
        labels = any(one.name == scored and one.format is None for one in outputs)
        if not labels or self.metric not in OF_DECISIONS:
            return NOT_EXPECTED
        scores = next((one.name for one in outputs if one.format is not None), "")
        judged = f" (--of {scores} judges by scores)" if scores else ""
        return f"output {scored!r} holds labels, not scores{judged}"

    @property
    def next_faster(self) -> Found | None:
        """The next faster plan, which missed or was not tried; None if there is none."""
        return self.findings.next_faster(self.plan)

    @property
    def frontier(self) -> tuple[Found, ...]:
        """Each plan that the search considered once, the fastest by prediction first."""
        steps, candidates = self.findings.frontier, self.findings.candidates
        plans_by_digest = {one.plan.digest: one for one in (*steps, *candidates)}
        return tuple(sorted(plans_by_digest.values(), key=lambda one: one.predicted_cost))

    @property
    def ran(self) -> dict[str, str]:
        """The format that the kernel of each op computes in, by the name of the op's node.

        Ops that the engine removed are in none.
        """
        formats_by_node: dict[str, set[str]] = {}
        for kernel in self.kernels:
            for node in kernel.ops:
                formats_by_node.setdefault(node, set()).add(kernel.format)
        return {
            one.node: " and ".join(sorted(formats_by_node[one.node]))
            for one in self.plan.counted
            if one.node in formats_by_node
        }

    @property
    def ops(self) -> tuple[OpRow, ...]:
        """What became of each op, and why."""
        findings = self.findings
        units = {(n, one.format): one for one in findings.sensitivities for n in one.nodes}
        kept = {n: one.fp32_cost for one in findings.sensitivities for n in one.nodes}
        timed, ran = findings.priced is Priced.TIME, self.ran
        took = {node: k.time_s * 1e3 for k in self.kernels if k.time_s for node in k.ops}

        def row(one: Decision) -> OpRow:
            unit = units.get((one.node, one.format))
            cost = kept.get(one.node) if unit is None else unit.low_cost
            stated = [r.evidence.get(f"{one.format.label} us") for r in one.deciding]
            times = [took[one.node]] if one.node in took else []
            times += [us / 1e3 for us in stated if isinstance(us, float)]
            times += [cost * 1e3] if timed and cost is not None else []
            return OpRow(
                node=one.node,
                op=one.op,
                type=one.format.label,
                reason="; ".join(r.text for r in one.deciding),
                ms=times[0] if times else None,
                error=None if unit is None else unit.error,
                ran=ran.get(one.node),
            )

        return tuple(row(one) for one in self.plan.counted)

    @property
    def run_notes(self) -> tuple[str, ...]:
        """How the model is run so that it computes as planned: Python, line by line.

        Of a model in memory it is a note, where a hint lowers it.
        """
        if self.output is None and not self.target and self.verdict is not Verdict.UNCHANGED:
            return in_memory_notes(self.plan)
        away = bool(self.target)
        if self.verdict is Verdict.UNCHANGED or self.output is None:
            return ()
        if away and not load_target(self.target).is_cpu:
            return ()
        return how_to_run(
            self.output,
            engine_of(self.output) if away else self.engine or self.plan.engine,
            {*self.counts, *self._four_bits},
            inputs=self.inputs,
            throughput=self.objective is Objective.THROUGHPUT,
            by_hint=self.plan.by_hint,
            kv_cache=self.plan.kv_cache,
        )

    @property
    def _four_bits(self) -> set[str]:
        """Types of 4 bits in the model given; the commonest where its graph is not known."""
        planner = self.findings.planner
        if planner is None or any("MatMulNBits" in n.native for n in planner.graph.nodes):
            return {"int4"}
        return {one.dtype for one in planner.graph.values if "int4" in one.dtype}

    def save(self, output: str | Path, *, force: bool = False) -> None:
        """Write the model to a file or a folder, by its plan.

        Raises:
            UsageError: If there is nothing better than the model given, or the output exists
                and ``force`` is not given.
        """
        if self.verdict is Verdict.UNCHANGED or self.writer is None:
            raise UsageError(
                "there is no other model than the one given",
                where=f"the verdict is {self.verdict.value}",
                fix="use that",
            )
        self.writer(Destination(path=Path(output), force=force))

    def report(self, path: str | Path | None = None, *, force: bool = False) -> PlanReport:
        """What people look at; written to ``path``: a page (``.html``) or data (``.json``).

        Raises:
            UsageError: If the suffix is another one, or the file exists without ``force``.
        """
        findings, planner = self.findings, self.findings.planner
        sources = Sources(
            model=self.source.name,
            plan=self.plan,
            graph=None if planner is None else planner.graph,
            facts=findings.facts,
            analysis=findings.analysis,
            found=None if self.verdict is Verdict.CONVERTED else self.to_dict(),
            kernels={"fp32": self.fp32_kernels, "tuned": self.kernels},
            machine=environment().as_json(),
            how_to_run=self.run_notes,
        )
        made = PlanReport(content=content_of(sources))
        if path is not None:
            made.save(path, force=force)
        return made

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {
            "verdict": self.verdict.value,
            "output": None if self.output is None else str(self.output),
            "lock": None if self.lock is None else str(self.lock),
            "ops": dict(self.counts),
            "casts": self.casts,
            "by_hint": self.plan.by_hint,
            "opset": self.plan.opset,
            "reference": self.reference,
            "seconds": self.seconds,
            "formats": labels(self.plan),
            "ran": self.ran,
            "adjustments": [gain.to_dict() for gain in self.gains],
            "decisions": [one.to_dict() for one in self.verified.decisions],
            "warnings": in_shell(self.warnings),
        }
        if self.verdict is not Verdict.CONVERTED:
            content |= {"why": self.why, "stale": [str(path) for path in self.stale]}
            return content | self._search()
        before, after = self.size_bytes
        content |= {"nodes": self.nodes, "size_bytes": {"before": before, "after": after}}
        return content | {
            "verified": _verified(self.verified),
            "restated": list(self.restated),
        }

    def _search(self) -> dict[str, Any]:
        """What ``tune`` found, as JSON."""
        findings, faster, kept = self.findings, self.next_faster, self.kept_products
        return {
            "metric": self.metric,
            "objective": self.objective.value,
            "conditions": dict(self.conditions),
            "target": self.target or None,
            "times": self._times,
            "engine": self.engine or None,
            "engine_times": [asdict(time) for time in self.engine_times],
            "other_engines": [one.to_dict() for one in self.other_engines],
            "baseline": _measured(self.baseline, self.objective),
            "tuned": _measured(self.tuned, self.objective),
            "speedup": self.speedup,
            "speedup_spread": self.speedup_spread,
            "speedups": list(self.speedups),
            "gain": self.gain,
            "gain_spread": self.gain_spread,
            "evaluations": self.evaluations,
            "reused_trials": self.reused,
            "certificate": None if self.certificate is None else self.certificate.to_dict(),
            "elsewhere": None if self.elsewhere is None else asdict(self.elsewhere),
            "not_estimated": self.not_estimated,
            "orders": self.orders.to_dict() if self.target else None,
            "probes": self.probes,
            "reused_sensitivities": list(self.reused_sensitivities),
            "phases_s": dict(self.phases),
            "journal": [asdict(step) for step in self.findings.journal],
            "relative_error": {
                "predicted": self.predicted_error,
                "predicted_parts": dict(self.predicted_parts),
                "measured": self.measured_error,
                "figure": self.error_figure,
                "samples": self.error_samples,
                "outputs": self.output_errors,
                "left_out": list(self.left_out),
            },
            "contributions": Contributions.of(self.plan).to_dict(),
            "frontier": [self._found(one) for one in findings.frontier],
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
            "candidates": [self._found(one) for one in findings.candidates],
            "kept_products": None if kept is None else asdict(kept),
            "next_faster": None if faster is None else self._found(faster),
            "baselines": [
                {
                    "name": a.name,
                    "metric": a.metric,
                    "latency_ms": a.latency_s * 1e3,
                    **_counted(a.cost, self.objective),
                    "passed": a.passed,
                }
                for a in self.baselines
            ],
            "trials": [
                {
                    "plan": t.key.plan,
                    "name": t.name,
                    "metric": t.metric,
                    "latency_ms": None if t.latency_s is None else t.latency_s * 1e3,
                    "passed": t.passed,
                }
                for t in self.trials
            ],
        }

    @property
    def _times(self) -> str:
        text = f"modelled for {self.target}, not measured" if self.target else "measured"
        return f"{text}; {TF32_TIMES}" if "tf32" in self.plan.counts else text

    def _found(self, one: Found) -> dict[str, Any]:
        """A plan that was considered.

        ``measured`` has nulls where the plan was never run, as most steps of a frontier are
        not. ``gain`` is how many times as good as fp32 it was in the first races, by the
        objective; ``final_benchmark`` has the same of the last race, None if it was not in it;
        ``changes`` are the formats of the nodes that have another one in the result. The
        result's own plan has the error that the result has, which is of more samples.
        """
        own, findings = labels(self.plan), self.findings
        formats = labels(one.plan)
        last = findings.final_benchmark.get(one.plan.digest)
        chosen = self.improved and one.plan.digest == self.plan.digest
        error = self.measured_error if chosen else one.error
        changed = (
            n for n in {**formats, **own} if formats.get(n, "fp32") != own.get(n, "fp32")
        )
        return {
            "plan": one.plan.digest,
            "name": one.name,
            "predicted": {
                **_cost(one.predicted_cost, findings),
                "relative_error": one.predicted_error,
            },
            "measured": {**_cost(one.cost, findings), "relative_error": error},
            "latency_ms": None if one.latency_s is None else one.latency_s * 1e3,
            "gain": findings.gain(one),
            "final_benchmark": None
            if last is None
            else {"gain": last[0], "latency_ms": last[1] * 1e3},
            "casts": one.casts,
            "metric": one.metric,
            "passed": one.passed,
            "changes": {node: formats.get(node, "fp32") for node in changed},
        }


def labels(plan: Plan) -> dict[str, str]:
    """The label of each node's format."""
    return {node: fmt.label for node, fmt in plan.formats.items()}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _verified_lines(checked: Verified) -> list[str]:
    if checked.engine is None:
        return [checked.note or "not run in an engine"]
    lines: list[str] = []
    if checked.relative_error is not None:
        error = f"relative error {percent(checked.relative_error)} against {checked.reference}"
        lines.append(f"verified in {title_of(checked.engine)}: {error}")
    lines += checked.decided
    return lines + ([f"note: {checked.note}"] if checked.note else [])


def _verified(checked: Verified) -> dict[str, Any]:
    return {
        "engine": checked.engine,
        "max_abs_error": checked.max_abs_error,
        "max_abs_errors": dict(checked.largest),
        "relative_error": checked.relative_error,
        "outputs": dict(checked.outputs),
        "reference": checked.reference,
        "taken_error": checked.taken_error,
        "sizes": dict(checked.sizes),
        "random_inputs": checked.random,
        "samples": checked.samples,
        "kernels": checked.kernels,
        "fallen_apart": list(checked.apart),
        "note": checked.note,
    }


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


def _cost(cost: float | None, findings: Findings) -> dict[str, float | None]:
    """A cost with its unit."""
    timed = findings.priced is Priced.TIME
    value = cost if cost is None or not timed else cost * 1e3
    return {"ms" if timed else "bytes": value}
