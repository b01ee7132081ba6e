"""Tunes a model for several kinds of machines at once, by the prices that each of them left.

Law: a process here that runs as a machine of another kind evaluates plans as that machine
would, and writes the lock by which that machine verifies the model.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile, zip_longest
from pathlib import Path

from finecast.data.workload import Workload
from finecast.engines.base import calls_of
from finecast.errors import UsageError
from finecast.files import write_text
from finecast.measure.study import Study
from finecast.naming import enumerated
from finecast.native.artefact import Destination
from finecast.native.lock import Machine, Runner, samples_of
from finecast.native.machine_kind import SUFFIX, MachineKind, low_formats
from finecast.native.model import OpenedModel, ReadOptions
from finecast.native.opening import lock_beside, plan_beside
from finecast.native.subject import Built, Subject
from finecast.numbers.formats import Format
from finecast.planning.fleet import Fleet, PricedKind, Prices, Serving
from finecast.progress import Phases
from finecast.terminal import Verbatim
from finecast.tuning import workers
from finecast.tuning.certifying import certifier_of
from finecast.tuning.fleet import Choosing, KindJudge
from finecast.tuning.fleet_plans import FleetPlans, KindOutcome
from finecast.tuning.goal import LOCAL, Budget, Objective, TuneRequest
from finecast.tuning.result import Measured, Result, Verdict
from finecast.tuning.workers import WorkerExecutor


def outputs_of(request: TuneRequest, output: Path | None) -> list[Path]:
    """The models that may be written: the output, or with several plans ``NAME.1.onnx`` on.

    Among them are those of higher numbers that an earlier run left.
    """
    if output is None or request.within is None:
        return [] if output is None else [output]
    paths = (output.with_name(f"{output.stem}.{n}{output.suffix}") for n in count(1))
    most = len(request.fleet)
    return [
        path
        for _, path in takewhile(lambda it: it[0] < most or it[1].exists(), enumerate(paths))
    ]


def lock_of(output: Path, kind: str) -> Path:
    """The lock of a model for one kind of machine: ``m.KIND.lock.json`` for ``m.onnx``."""
    lock = lock_beside(output)
    return lock.with_name(f"{lock.name.removesuffix('.lock.json')}.{kind}.lock.json")


def _plan_of(request: TuneRequest, output: Path) -> Path:
    return (
        plan_beside(output)
        if request.within is not None
        else request.plan_out or plan_beside(output)
    )


def files_of(request: TuneRequest, output: Path | None) -> Iterator[tuple[str, Path]]:
    """What is written beside the models: its role and its path."""
    for path in outputs_of(request, output):
        if path != output:
            yield "the output", path
        yield "the plan", _plan_of(request, path)
        for kind in request.fleet if request.lock else ():
            lock = lock_of(path, MachineKind.called(kind))
            yield "a lock", lock
            yield "the samples of a lock", samples_of(lock)


def check_prices(request: TuneRequest) -> None:
    """Refuse what prices of kernels, or a fleet, are not for.

    Raises:
        UsageError: If an option has no use beside them.
    """
    named = "--fleet" if request.fleet else "--prices"
    if request.prices is None and not request.fleet:
        if request.within is not None:
            raise UsageError(
                "it is of the machines of a fleet", where="--within", fix="give --fleet, too"
            )
        return
    refused = {
        "--target": request.device is not None,
        "--objective": request.goal.objective is not Objective.LATENCY,
    }
    if request.fleet:
        refused |= {
            "--prices": request.prices is not None,
            "--resume": request.resume,
            "--start": request.start is not None,
            "--frontier": request.frontier is not None,
            "--report": request.report is not None,
            "--executor": request.execution.executor != LOCAL,
        }
    for option in (name for name, given in refused.items() if given):
        raise UsageError(f"{named} and {option} do not go together", fix="leave one out")
    names = Counter(map(MachineKind.called, request.fleet))
    for name in (name for name, times in names.items() if times > 1):
        raise UsageError(
            f"two kinds of machines are called {name}",
            where="--fleet",
            fix=f"name their files apart, as server{SUFFIX} and laptop{SUFFIX}",
        )


def prices_of(outcome: Result, subject: Subject, workload: Workload, path: Path) -> str:
    """Write what ops take on this machine, as a search found it.

    Returns:
        Why nothing was written; empty if it was.
    """
    planner, analysis = outcome.findings.planner, outcome.findings.analysis
    if planner is None or analysis is None:
        return "no prices were written: no op may be lower, or no lower plan ran"
    runs = outcome.improved
    MachineKind(
        name=MachineKind.called(path),
        runner=Runner.of(subject.runs_in),
        machine=Machine.here(),
        inputs=_inputs(workload),
        prices=Prices.of(planner, analysis),
        best=low_formats(outcome.plan) if runs else {},
        call_s=(outcome.baseline.latency_s, outcome.tuned.latency_s),
    ).write(path)
    return ""


def _inputs(workload: Workload) -> Mapping[str, Sequence[int]]:
    return {n: array.shape for n, array in calls_of(workload.timing()[0])[0].items()}


def plans_for(
    model: OpenedModel,
    how: ReadOptions,
    output: Destination,
    request: TuneRequest,
    study: Study | None,
) -> Result:
    """One plan for all kinds of machines whose prices are given, or as few as are allowed.

    The model of each plan is written, with a lock for each kind that it was evaluated on. The
    result's plan and model are the first one's.

    Raises:
        UsageError: If prices are of another model or of calls of other sizes, or what has to
            be opened by other processes is no path.
        ModelError, EngineError: If the model cannot be run or converted.
    """
    run = _Run(
        model=model,
        how=how,
        output=output,
        request=request,
        kinds={one.name: one for one in map(MachineKind.load, request.fleet)},
        progress=Phases(request.progress, "load", request.goal.start_s),
    )
    with ExitStack() as stack:
        return run.result(stack, study)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run of ``tune`` for a fleet.

    Attributes:
        model: The model.
        how: How it is read.
        output: Where it goes.
        request: What was asked for.
        kinds: The kinds of machines by name.
        progress: Told of each step.
    """

    model: OpenedModel
    how: ReadOptions
    output: Destination
    request: TuneRequest
    kinds: Mapping[str, MachineKind]
    progress: Phases

    def result(self, stack: ExitStack, study: Study | None) -> Result:
        """The plans, written; ``stack`` ends the processes."""
        request, progress = self.request, self.progress
        subject = self.model.subject(request.engine, None)
        subject.keeps_prices, subject.study = request.price_book, study
        subject.prices_all = True
        self._check_engine(subject.runs_in)
        executor = self._executor(stack, subject, {})
        workload = self.model.workload(executor.data(), subject.reference)
        progress("baseline", 0, 1)
        here = self._judge(executor, workload)
        places = {name: kind.environment for name, kind in self.kinds.items()}
        judges = {
            name: self._judge(self._executor(stack, subject, place), workload)
            if place
            else here
            for name, place in places.items()
            if place is not None
        }
        choosing = Choosing(
            fleet=self._fleet(subject, workload),
            judges=judges or {"": here},
            budget=Budget(goal=request.goal),
            progress=progress,
        )
        servings = choosing.chosen(request.within)
        progress("write", 0, 1)
        built = [self.model.build(one.proposal.plan) for one in servings]
        paths = [
            self._written(model, path, subject, workload)
            for model, path in zip_longest(built, outputs_of(request, self.output.path))
            if model is not None
        ]
        plans = FleetPlans(
            plans=[one.proposal.plan for one in servings],
            outputs=paths,
            kinds=[
                self._outcome(name, number, servings[number], choosing, paths[number])
                for name in self.kinds
                for number, serving in enumerate(servings)
                if name in serving.losses
            ],
            bounds=[one.bound for one in servings],
            metric=request.data.label or "metric",
        )
        plans = replace(plans, notes=self._notes(plans, choosing))
        phases = progress.seconds()
        improved = any(plan.lowers for plan in plans.plans)
        size = self.model.size_bytes
        return Result(
            verdict=Verdict.IMPROVED if improved else Verdict.UNCHANGED,
            why=plans.lines[0],
            plan=plans.plans[0],
            counts=plans.plans[0].counts_in(choosing.fleet.planner.graph),
            casts=built[0].casts,
            seconds=sum(phases.values()),
            phases=phases,
            baseline=Measured(size_bytes=size, metric=float(here.baseline)),
            tuned=Measured(size_bytes=built[0].size_bytes),
            metric=plans.metric,
            evaluations=choosing.evaluations,
            probes=choosing.fleet.analysis.probes,
            model=self.model.given_back(built[0] if improved else None),
            output=paths[0],
            lock=next((k.lock for k in plans.kinds if k.plan == 0 and k.lock), None),
            plan_out=None if paths[0] is None else _plan_of(request, paths[0]),
            warnings=(*subject.told, *workload.warnings),
            fleet=plans,
        )

    def _check_engine(self, here: str) -> None:
        """Refuse prices of another engine's kernels.

        Raises:
            UsageError: If the engine here, or that of another kind, is not theirs.
        """
        for kind in self.kinds.values():
            own = kind.runner.name
            others = (f"{one.name} with {one.runner.name}" for one in self.kinds.values())
            if any(one.runner.name != own for one in self.kinds.values()):
                raise UsageError(
                    f"the kinds were priced with different engines: {', '.join(others)}",
                    where="--fleet",
                    fix="run tune --prices on each of them with the same --engine",
                )
            if own != here:
                raise UsageError(
                    f"the prices are of {own}, and the model runs in {here or 'none'} here",
                    where=str(kind.path),
                    fix=f"give --engine {own}, or prices of {here or 'the same engine'}",
                )

    def _executor(
        self, stack: ExitStack, subject: Subject, environment: Mapping[str, str]
    ) -> WorkerExecutor:
        """What evaluates in a process with these variables.

        Raises:
            UsageError: If it cannot open the same there.
        """
        entered = workers.evaluating(
            self.model, self.how, self.output.path, self.request, environment
        )
        made = stack.enter_context(entered)(subject)
        if made is None:
            raise UsageError(
                "plans of a fleet are evaluated by processes that run as its machines, and"
                " these open model, data and functions by path",
                where="--fleet",
                fix="give paths, and leave --jobs out",
            )
        return made

    def _judge(self, executor: WorkerExecutor, workload: Workload) -> KindJudge:
        """A judge with fp32's metric in its process."""
        criterion = replace(
            self.request.goal.criterion, higher_is_better=workload.higher_is_better
        )
        baseline = executor.baseline(workload)
        criterion.check(baseline, workload.worst)
        return KindJudge(
            executor=executor,
            criterion=criterion,
            baseline=baseline,
            certifier=certifier_of(criterion, baseline, workload.groups),
        )

    def _fleet(self, subject: Subject, workload: Workload) -> Fleet:
        """The choice: what the rules permit here, errors that are measured here, all prices.

        Raises:
            UsageError: If prices do not fit, or leave nothing to choose.
        """
        request, policy = self.request, self.request.policy
        if policy.open_formats:
            formats = self._formats(subject)
            policy = replace(policy, formats=formats, open_formats=False)
        subject.check_formats(policy)
        self.model.check_policy(policy)
        rules = tuple(request.user_rules.items())
        examined = subject.examine(policy, rules, workload, self.progress)
        planner = examined.planner
        names = [node.name for node in planner.graph.nodes]
        for kind in self.kinds.values():
            kind.check(planner.graph.digest, names, _inputs(workload))
        if not planner.is_free:
            raise UsageError(
                "the rules leave no op a lower format",
                where=self.model.name,
                fix="finecast explain says which rules",
            )
        analysis = examined.analysis(of_time=False)
        priced = {
            name: PricedKind(prices=kind.prices, best=kind.best, planner=planner)
            for name, kind in self.kinds.items()
        }
        for name in (n for n, kind in priced.items() if not 0 < kind.best_s < math.inf):
            raise UsageError(
                "its best plan has no price",
                where=str(self.kinds[name].path),
                fix="run tune --prices there again",
            )
        self.progress("plans", 0, 1)
        return Fleet(planner=planner, analysis=analysis, kinds=priced)

    def _formats(self, subject: Subject) -> tuple[Format, ...]:
        """Low formats that any of the machines priced and that run here, too.

        Raises:
            UsageError: If there is none.
        """
        priced = [fmt for kind in self.kinds.values() for fmt in kind.prices.formats[1:]]

        def runs(fmt: Format) -> bool:
            with suppress(UsageError):
                subject.check_formats(replace(self.request.policy, formats=(fmt,)))
                return True
            return False

        own = [fmt for fmt in subject.formats if fmt in priced]
        found = tuple(fmt for fmt in dict.fromkeys((*own, *priced)) if runs(fmt))
        if not found:
            raise UsageError(
                "none of the formats that the machines priced runs here",
                where="--fleet",
                fix="plan for the fleet on the newest of its machines",
            )
        return found

    def _written(
        self, built: Built, path: Path | None, subject: Subject, workload: Workload
    ) -> Path | None:
        """Write a model with its plan, if it is to be written and lowers any op."""
        if path is None or not built.plan.lowers:
            return None
        self.model.write(built, replace(self.output, path=path), subject, workload)
        write_text(_plan_of(self.request, path), built.plan.to_json())
        return path

    def _outcome(
        self, name: str, number: int, serving: Serving, choosing: Choosing, path: Path | None
    ) -> KindOutcome:
        """What a plan is on one kind, for which a lock is written if it was evaluated so."""
        kind, plan = choosing.fleet.kinds[name], serving.proposal.plan
        found = KindOutcome(
            name=name,
            plan=number,
            fp32_s=kind.fp32_s,
            best_s=kind.best_s,
            time_s=kind.best_s * (1 + serving.losses[name]),
        )
        judge = choosing.judges.get(name)
        if judge is None:
            return found
        metric = float(judge.metrics.get(plan.digest, judge.baseline))
        found = replace(
            found,
            baseline=float(judge.baseline),
            metric=metric,
            certificate=judge.certificate(plan),
        )
        if path is None or not self.request.lock:
            return found
        lock = lock_of(path, name)
        accuracy = {
            "metric": self.request.data.label or "metric",
            "fp32": found.baseline,
            "tuned": metric,
            "certificate": found.certificate and found.certificate.to_dict(),
        }
        assert isinstance(judge.executor, WorkerExecutor)  # ``_judge`` made it
        judge.executor.lock(path, lock, plan.digest, accuracy)
        return replace(found, lock=lock)

    def _written_files(self, plans: FleetPlans) -> Iterator[str]:
        """What was written, and which of it has samples of the data."""
        samples: list[Path] = []
        for number, path in enumerate(plans.outputs):
            if path is None:
                continue
            locks = [k.lock for k in plans.kinds if k.plan == number and k.lock is not None]
            own = [one for one in map(samples_of, locks) if one.exists()]
            files = [path, _plan_of(self.request, path), *locks, *own]
            yield f"wrote {enumerated(files)}"
            samples += own
        if samples:
            data = f"{'has' if len(samples) == 1 else 'have'} samples of your data"
            yield f"{enumerated(samples)} {data}: --no-lock leaves them out"

    def _of_plans(self, plans: FleetPlans, choosing: Choosing) -> Iterator[str]:
        """What each plan has, why it lowers nothing, and what limits it."""
        certifies = self.request.goal.criterion.confidence is not None
        for number, plan in enumerate(plans.plans):
            counts = ", ".join(f"{ops} {fmt}" for fmt, ops in plan.counts.items())
            named = f"plan {number + 1}" if len(plans.plans) > 1 else "the plan"
            own = [k for k in plans.kinds if k.plan == number]
            if not plan.lowers:
                yield f"{named}: {counts}: {choosing.why_fp32(frozenset(k.name for k in own))}"
                if len(own) > 1 and any(self.kinds[k.name].best for k in own):
                    yield "--within 5% looks for several plans, each for some of the kinds"
                continue
            yield f"{named}: {counts}{proven(plans.bounds[number], own)}"
            if certifies and not any(k.certificate for k in own):
                yield f"{named} is not certified: no process here runs as one of its kinds"
        for kind in self.kinds.values():
            formats = {*kind.best.values()} - {*choosing.fleet.analysis.times}
            if formats:
                labels = enumerated(sorted(fmt.label for fmt in formats))
                yield f"the own best plan of {kind.name} has {labels}, which no plan here has"

    def _notes(self, plans: FleetPlans, choosing: Choosing) -> Sequence[str]:
        """What else is to be known, and what to do next."""
        lines = [*self._of_plans(plans, choosing)]
        lines.append("times are sums of the kernels that each machine measured by itself")
        certified = [k for k in plans.kinds if k.certificate is not None]
        if certified:
            bound = max(
                (k.certificate for k in certified if k.certificate), key=lambda c: c.bound
            )
            lines.append(f"certified on each kind that was evaluated: {bound}")
        others = [
            f"{kind.name} was priced with {kind.runner.version}"
            for kind in self.kinds.values()
            if kind.runner.version != Runner.of(kind.runner.name).version
        ]
        if others:
            lines.append(f"another engine runs here: {', '.join(others)}")
        lines += [
            f"a plan was left out, which does not run on {name}: {text}"
            for name, judge in choosing.judges.items()
            for text in dict.fromkeys(judge.failed)
        ]
        lines += self._written_files(plans)
        for kind in plans.kinds:
            path = plans.outputs[kind.plan]
            if path is None:
                lines.append(f"on {kind.name}: use the model given")
            elif kind.lock is not None:
                command = f"finecast verify {shlex.quote(str(path))}"
                lock = f" --lock {shlex.quote(str(kind.lock))}"
                lines.append(Verbatim(f"on {kind.name}: {command}{lock}"))
            elif not kind.judged:
                plan = shlex.quote(str(_plan_of(self.request, path)))
                lines.append(
                    f"no process here runs as {kind.name}: there, tune --start {plan}"
                    " --max-trials 1 evaluates it"
                )
        return lines


def proven(bound: float, kinds: Sequence[KindOutcome]) -> str:
    """What no plan is better than; empty if that is unknown, or says nothing."""
    least = f"{min(bound, max(k.loss for k in kinds)):.1%}" if bound > 0 else ""
    if least in ("", f"{0:.1%}"):
        return ""
    return f"; any plan of no larger error loses {least} or more on some kind"
