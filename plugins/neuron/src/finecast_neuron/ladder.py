"""Every rung of a compiler's options, emulated, with its modelled time and its verdict.

Beside the rungs are per-op plans: casts in the model itself, for ``--auto-cast none``.

A session is built for each rung, for it evaluates two to three times faster than one whose
roundings are switched, and loads in a second. Laws: the recommended rung passes the criterion;
no passing rung has a shorter modelled time.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from finecast import Criterion, Format, Plan, Policy, Scope
from finecast.data import Workload, by_output
from finecast.devices import Emulation, setting_of
from finecast.engines import CachedSession, Session
from finecast.errors import in_shell
from finecast.measure import Effort
from finecast.naming import percent
from finecast.native import DeviceModel, OpenedModel
from finecast.planning import lowest, propose
from finecast.progress import Progress, silent
from finecast.reports import Report, TextTable
from finecast.rules import first_nonfinite
from finecast.tuning import Candidate, chain, nan_baseline, same_time

# Formats that a cast in the model can state and every compiler respects. Tf32 is not
# one: ONNX has no such type, so that a compiler would see slow arithmetic and fp32 products.
CASTABLE: Final = (Format.BF16, Format.FP16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One step of a compiler's ladder.

    Attributes:
        name: The options, as the compiler's guide spells them.
        emulation: What they do to numbers.
        template: The compiler's command line, with ``{model}`` and ``{output}`` in it.
        snippet: One line of Python that passes the options through the framework.
    """

    name: str
    emulation: Emulation
    template: str
    snippet: str

    def command(self, model: str = "model.hlo", output: str = "model.neff") -> str:
        """The compiler's exact command line."""
        return self.template.format(model=shlex.quote(model), output=shlex.quote(output))


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung: metric, relative errors by output on calibration data, modelled time."""

    rung: Rung
    metric: float
    errors: Mapping[str, float]
    time_s: float
    passed: bool

    @property
    def error(self) -> float:
        """Relative error of the worst output."""
        return max(self.errors.values(), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A per-op plan that passes on all data: metric, errors by output, modelled time."""

    plan: Plan
    metric: float
    errors: Mapping[str, float]
    time_s: float

    @property
    def error(self) -> float:
        """Relative error of the worst output."""
        return max(self.errors.values(), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LadderOutcome(Report):
    """All rungs, most accurate first, and a plan by op.

    Attributes:
        baseline: The fp32 model's metric.
        rungs: The rungs.
        best: The recommended rung; None if none passes.
        left_out: Outputs that no error is told of.
        plan: The fastest plan by op that beats the best rung; None if there is none.
        why: The reason of that.
        output: Where the plan's model was written.
        warnings: Why the metric says little on the data.
        target: The device's name.
        metric_name: The name of the metric.
    """

    baseline: float
    rungs: tuple[RungResult, ...]
    best: RungResult | None
    left_out: tuple[str, ...] = ()
    plan: PlanResult | None = None
    why: str = "not asked for"
    output: Path | None = None
    warnings: tuple[str, ...] = ()
    target: str = ""
    metric_name: str = "metric"

    @property
    def fastest_s(self) -> float:
        """Modelled time of the fastest rung."""
        return min(r.time_s for r in self.rungs)

    @property
    def slowest_s(self) -> float:
        """Modelled time of the slowest rung, of which speeds are told as multiples."""
        return max(r.time_s for r in self.rungs)

    @property
    def lines(self) -> list[str]:
        """The rungs with their verdicts, and what became of the plan by op."""
        named = f"{self.target}: fp32 {self.metric_name} {self.baseline:.6g}"
        lines = [f"{named}; modelled speed against the slowest option"]
        for one in self.rungs:
            verdict = "recommended" if one is self.best else "pass" if one.passed else "fail"
            speed = f"x{self.slowest_s / one.time_s:.2f}"
            lines.append(f"{one.rung.name}: {verdict}, metric {one.metric:.6g}, {speed}")
        warnings = [f"warning: {text}" for text in in_shell(self.warnings)]
        return [*lines, f"plan by op: {self.why}", *warnings]

    @property
    def tables(self) -> Sequence[TextTable]:
        """The rungs; the recommended one has a star."""
        rows = [
            (
                one.rung.name,
                ("pass" if one.passed else "fail") + (" *" if self.best is one else ""),
                f"{one.metric:.6g}",
                percent(one.error),
                f"x{self.slowest_s / one.time_s:.2f}",
            )
            for one in self.rungs
        ]
        right = (self.metric_name, "output error", "speed")
        return [
            TextTable(left=("options", "verdict"), right=right, rows=rows, fold=("options",))
        ]

    def _content(self) -> dict[str, Any]:
        best, plan, slowest = self.best, self.plan, self.slowest_s
        return {
            "fp32": self.baseline,
            "left_out": list(self.left_out),
            "rungs": [
                {
                    "options": r.rung.name,
                    "metric": r.metric,
                    "output_error": r.error,
                    "output_errors": r.errors,
                    "outputs": by_output(r.metric),
                    "modelled_time_us": r.time_s * 1e6,
                    "speed": slowest / r.time_s,
                    "passed": r.passed,
                }
                for r in self.rungs
            ],
            "recommended": None
            if best is None
            else {
                "options": best.rung.name,
                "command": best.rung.command(),
                "snippet": best.rung.snippet,
            },
            "per_op": {
                "why": self.why,
                "metric": plan.metric if plan else None,
                "output_error": plan.error if plan else None,
                "output_errors": plan.errors if plan else None,
                "speed": slowest / plan.time_s if plan else None,
                "ops": plan.plan.counts if plan else None,
                "written": None if self.output is None else str(self.output),
            },
        }


@dataclass(slots=True, kw_only=True)
class LadderWalk:
    """A model on one target, rung by rung; ``reference`` is the fp32 model."""

    model: OpenedModel
    reference: Session
    workload: Workload
    criterion: Criterion
    rungs: Sequence[Rung]
    progress: Progress = silent
    device: DeviceModel = field(init=False)
    baseline: float = field(init=False)

    def __post_init__(self) -> None:
        """Evaluate the fp32 model.

        Raises:
            ModelError: If its metric is NaN.
        """
        self.progress("fp32", 0, 1)
        reference = CachedSession(self.reference)
        self.baseline = self.workload.evaluate(reference, None)
        # One program serves all rungs: they differ in no option that rewrites the model.
        self.device = DeviceModel(
            program=self.model.program(self.rungs[0].emulation),
            workload=self.workload,
            reference=reference,
        )
        if math.isnan(self.baseline):
            graph, facts = self.device.graph, dict(self.device.facts)
            first = first_nonfinite(graph, facts) or ""
            raise nan_baseline(self.model.name, self.workload, lambda: first)
        self.criterion.check(self.baseline, self.workload.worst)
        self.progress("fp32", 1, 1)

    def walk(self) -> LadderOutcome:
        """Evaluate every rung on all data."""
        results: list[RungResult] = []
        for done, rung in enumerate(self.rungs):
            self.progress(rung.name, done, len(self.rungs))
            results.append(self._judge(rung, rung.emulation))
        self.progress("options", len(self.rungs), len(self.rungs))
        passing = [r for r in results if r.passed]
        best = min(passing, key=lambda r: (r.time_s, r.error)) if passing else None
        return LadderOutcome(
            baseline=self.baseline,
            rungs=tuple(results),
            best=best,
            left_out=self.device.exact.left_out,
        )

    def _judge(self, rung: Rung, emulation: Emulation) -> RungResult:
        device = self.device
        setting = setting_of(device.graph, emulation)
        metric, errors = self.baseline, dict[str, float]()
        if not device.computes_fp32(emulation, setting):
            metric, errors = device.evaluate(device.session(emulation, setting))
        return RungResult(
            rung=rung,
            metric=metric,
            errors=errors,
            time_s=device.time_s(emulation, setting),
            passed=self.criterion.passes(metric, self.baseline),
        )


# A per-op plan has to be faster than the best rung by this factor: the roofline tells no
# smaller difference.
_WORTHWHILE: Final = 1.01


def search_per_op(
    walk: LadderWalk, outcome: LadderOutcome, named: tuple[Emulation, Policy] | None = None
) -> tuple[PlanResult | None, str]:
    """The fastest passing per-op plan that beats the best rung, and a text on the result.

    Args:
        walk: The ladder.
        outcome: Its rungs.
        named: The formats that the user names, which may be those of no rung.
    """
    best = outcome.best
    if named is None and best is not None and best.time_s <= outcome.fastest_s:
        return None, "no plan by op can be faster than this option, the fastest one"
    limit = best.time_s if best is not None else math.inf
    plans = [r for e, p in _bases(outcome, named) if (r := _fastest(walk, e, p, limit))]
    if plans:
        return min(
            plans, key=lambda r: r.time_s
        ), "faster than the best option within the limit"
    return (
        None,
        "no plan by op that was tried is within the limit and faster than the best option",
    )


def _bases(
    outcome: LadderOutcome, named: tuple[Emulation, Policy] | None
) -> list[tuple[Emulation, Policy]]:
    """Emulations and policies to search: those named, else each castable format of a rung."""
    if named is not None:
        return [named]
    chosen: dict[str, Emulation] = {}
    for result in outcome.rungs:
        emulation = result.rung.emulation
        if emulation.format in CASTABLE and emulation.scope is not Scope.NONE:
            chosen.setdefault(emulation.format.label, emulation)
    return [(e, Policy(scope=Scope.AUTO, formats=(e.format,))) for e in chosen.values()]


def _fastest(
    walk: LadderWalk, emulation: Emulation, policy: Policy, limit: float
) -> PlanResult | None:
    subject = walk.model.subject(None, emulation)
    examined = subject.examine(policy, (), walk.workload, walk.progress)
    planner, analysis = examined.planner, examined.analysis()
    proposals = (*propose(planner, analysis), *lowest(planner, analysis))
    unique = {p.plan.digest: p for p in reversed(proposals)}
    built = {digest: subject.model.build(p.plan) for digest, p in unique.items()}
    times = subject.times(built, walk.workload, Effort(min_time_s=0.0))
    results: dict[str, PlanResult] = {}

    def passes(candidate: Candidate) -> bool:
        session = walk.device.program.plan_session(candidate.plan, emulation)
        metric, errors = walk.device.evaluate(session)
        results[candidate.plan.digest] = PlanResult(
            plan=candidate.plan, metric=metric, errors=errors, time_s=candidate.latency_s
        )
        return walk.criterion.passes(metric, walk.baseline)

    candidates = [
        Candidate(
            name=p.name,
            plan=p.plan,
            error=p.error,
            cost=(time_s := times.latency_s(digest)),
            latency_s=time_s,
            casts=built[digest].casts,
        )
        for digest, p in unique.items()
    ]
    worthwhile = [c for c in candidates if c.latency_s * _WORTHWHILE < limit]
    best = fastest_passing(chain(worthwhile, limit), passes)
    return None if best is None else results[best.plan.digest]


def fastest_passing(
    chained: Sequence[Candidate], passes: Callable[[Candidate], bool]
) -> Candidate | None:
    """The fastest candidate that passes, if passing is monotone along the chain.

    Law: at most 2 + ceil(log2(n)) candidates are evaluated, and the returned one was. Of
    candidates that count as equally fast the most accurate that passes is returned. None means
    that all evaluated candidates fail, and says nothing of the others.

    Args:
        chained: Candidates, fastest first, each more accurate than the one before.
        passes: Evaluates a candidate.
    """
    fastest, passed = -1, set[int]()
    low, high, middle = 0, len(chained) - 1, 0
    while low <= high:
        if passes(chained[middle]):
            passed.add(middle)
            fastest, high = middle, middle - 1
        else:
            low = middle + 1
        middle = (low + high) // 2
    if fastest < 0:
        return None
    equal = (i for i, c in enumerate(chained) if same_time(chained[fastest], c))
    near = max(equal)
    is_finer = near in passed or passes(chained[near])
    return chained[near if is_finer else fastest]
