"""What a search on a real net saw, kept as JSON lines; and the spreads that follow from it.

    python -m benchmarks.lab record digits=examples/digits/digits.onnx --busy
    python -m benchmarks.lab record sts_minilm_l6 --write build/lab/recordings
    python -m benchmarks.lab record NAME=MODEL.onnx --data DATA.npz --metric top1
    python -m benchmarks.lab record build/peers/models/*      # of make peers, with its data
    python -m benchmarks.lab fit build/lab/recordings

A recording is a file of some kilobytes: a header, then a line for each kernel whose
predicted time can be held beside a measured one, each plan, race, compilation, and for each
plan that was evaluated the margins of its decisions. Law: ``Recording.read`` gives what
``write`` was given.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any, Final, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.bench_tune import score
from benchmarks.common import print_environment, shared_case
from benchmarks.lab import assumptions as assumed
from benchmarks.peers.task import Task
from finecast import api
from finecast.data.workload import Workload
from finecast.engines import get_engine
from finecast.engines.base import Array, Engine, Feeds, Session
from finecast.errors import FinecastError
from finecast.measure.environment import environment
from finecast.measure.racing import ANCHOR, Effort, Race
from finecast.native.subject import Built, Subject
from finecast.numbers.formats import Format
from finecast.planning.alternatives import labels_of
from finecast.planning.problem import build_problem
from finecast.tuning.executor import Evaluated, LocalExecutor
from finecast.tuning.result import Result, Verdict

VERSION: Final = 1
"""Version of the lines; older ones stay readable."""

_ROUNDS: Final = 12
_SAMPLES: Final = 600
_DIGITS: Final = 6
_CASES: Final = {
    "cifar10_resnet20": "top1",
    "sts_minilm_l6": "spearman",
    "vad_silero": "frame_auc",
}
_DIGITS_NET: Final = Path(__file__).resolve().parents[2] / "examples" / "digits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What was tuned, where, and what came of it.

    ``busy`` says that other processes ran beside it, so that its times tell little.
    """

    version: int
    model: str
    kind: str
    engine: str
    formats: list[str]
    ops: int
    samples: int
    target: float
    baseline: float
    busy: bool
    date: str
    machine: dict[str, Any]
    phases: dict[str, float]
    seconds: float
    evaluations: int
    improved: bool
    chosen: str
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """The ops of a unit in the tuned model: seconds that were predicted, and measured."""

    ops: list[str]
    format: str
    fp32_s: float
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """A plan that was considered; None stands for what was not measured."""

    digest: str
    name: str
    formats: dict[str, int]
    predicted_s: float | None
    predicted_error: float
    cost_s: float | None
    fp32_s: float | None
    casts: int | None
    error: float | None
    metric: float | None
    passed: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceLine:
    """The seconds of each in the first rounds of a race, by digest; ``fp32`` among them."""

    rounds: dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadLine:
    """The seconds of a compilation."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLine:
    """The differences of the two logits that are fp32's largest, sample by sample."""

    digest: str
    margins: list[float]


_KINDS: Final[Mapping[str, type]] = {
    "header": Header,
    "kernel": KernelLine,
    "plan": PlanLine,
    "race": RaceLine,
    "load": LoadLine,
    "samples": SamplesLine,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
Logits = NDArray[np.float32]
Line = Header | KernelLine | PlanLine | RaceLine | LoadLine | SamplesLine
_L = TypeVar("_L", KernelLine, PlanLine, RaceLine, LoadLine, SamplesLine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A header and lines."""

    header: Header
    lines: Sequence[Line]

    def write(self, path: Path) -> None:
        """Write it, a line each."""
        path.parent.mkdir(parents=True, exist_ok=True)
        encoded = (
            json.dumps({"line": _NAMES[type(line)], **asdict(line)}, separators=(",", ":"))
            for line in (self.header, *self.lines)
        )
        path.write_text("\n".join(encoded) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read one.

        Raises:
            SystemExit: If the file is none, or of a newer version.
        """
        try:
            text = path.read_text(encoding="utf-8").splitlines()
            first, *_ = contents = [json.loads(line) for line in text]
            if first["version"] > VERSION:
                raise SystemExit(f"{path}: version {first['version']} is newer than {VERSION}")
            header, *lines = (_KINDS[one.pop("line")](**one) for one in contents)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path}: no recording: {error}") from error
        if not isinstance(header, Header):
            raise SystemExit(f"{path}: no recording: its first line is no header")
        return cls(header=header, lines=lines)

    def of(self, kind: type[_L]) -> list[_L]:
        """The lines of a kind."""
        return [line for line in self.lines if isinstance(line, kind)]


# ------------------------------------------------------------------------------ recording one


class _Watched(Session):
    """A session whose decisions are kept."""

    def __init__(self, session: Session, keep: list[Logits]) -> None:
        self.session, self.keep = session, keep
        self.inputs, self.outputs, self.free = session.inputs, session.outputs, session.free

    def run(self, feeds: Feeds) -> dict[str, Array]:
        outputs = self.session.run(feeds)
        for array in outputs.values():
            logits = array.ndim == 2 and array.shape[1] > 1 and array.dtype.kind == "f"
            if logits:
                self.keep.append(np.asarray(array, np.float32).copy())
                break
        return outputs

    @property
    def keeps_state(self) -> bool:
        return self.session.keeps_state

    def reset(self) -> None:
        self.session.reset()

    def step(self, feeds: Feeds) -> dict[str, Array]:
        return self.session.step(feeds)


@dataclass(slots=True)
class _Watch:
    """Keeps what a search measures while it runs in this process."""

    lines: list[Line] = field(default_factory=list[Line])
    logits: dict[str, list[Logits]] = field(default_factory=dict[str, list[Logits]])
    digest: str = ANCHOR

    @contextmanager
    def on(self) -> Generator[None]:
        """Watch compilations, races and evaluations until it ends."""
        with ExitStack() as stack:
            for owner in _owners(Engine, "load"):
                self._patch(stack, owner, "load", self._load)
            for owner in _owners(Subject, "times"):
                self._patch(stack, owner, "times", self._times)
            for owner in _owners(Workload, "evaluate"):
                self._patch(stack, owner, "evaluate", self._evaluate)
            self._patch(stack, LocalExecutor, "evaluate", self._of_plan)
            yield

    def _patch(self, stack: ExitStack, owner: type, name: str, how: Any) -> None:
        real = owner.__dict__[name]

        def watched(subject: Any, *args: Any, **options: Any) -> Any:
            return how(real, subject, *args, **options)

        stack.enter_context(patch.object(owner, name, watched))

    def _load(self, real: Any, engine: Engine, *args: Any, **options: Any) -> Session:
        start = time.perf_counter()
        session: Session = real(engine, *args, **options)
        self.lines.append(LoadLine(seconds=round(time.perf_counter() - start, _DIGITS)))
        return session

    def _times(
        self,
        real: Any,
        subject: Subject,
        built: Mapping[str, Built],
        data: Workload,
        how: Effort,
    ) -> Race:
        race: Race = real(subject, built, data, how)
        names = (ANCHOR, *race.names)
        rounds = {n: list(race.latency(n).samples_s[:_ROUNDS]) for n in names}
        self.lines.append(
            RaceLine(rounds={n: [_short(s) for s in r] for n, r in rounds.items()})
        )
        return race

    def _of_plan(self, real: Any, executor: LocalExecutor, built: Built) -> Evaluated:
        self.digest = built.plan.digest
        return real(executor, built)

    def _evaluate(
        self, real: Any, data: Workload, session: Session, reference: Session | None
    ) -> float:
        digest = ANCHOR if reference is None else self.digest
        keep = self.logits.setdefault(digest, [])
        keep.clear()
        return real(data, _Watched(session, keep), reference)

    def margins(self) -> Iterable[SamplesLine]:
        """The margins of fp32, and of the same logits in each plan that was evaluated."""
        fp32 = _joined(self.logits.get(ANCHOR, []))
        if fp32 is None:
            return
        top = np.argsort(fp32, axis=1)[:, :-3:-1]
        for digest, arrays in self.logits.items():
            joined = _joined(arrays)
            if joined is None or joined.shape != fp32.shape:
                continue
            two = np.take_along_axis(joined, top, axis=1)[:_SAMPLES]
            margins = [_short(float(m)) for m in two[:, 0] - two[:, 1]]
            yield SamplesLine(digest=digest, margins=margins)


def _owners(base: type, name: str) -> Iterable[type]:
    """Classes below ``base`` that state ``name`` themselves."""
    for one in base.__subclasses__():
        if name in one.__dict__:
            yield one
        yield from _owners(one, name)


def _joined(arrays: Sequence[Logits]) -> Logits | None:
    same = len({a.shape[1] for a in arrays}) == 1
    return np.concatenate(arrays) if same else None


def _short(number: float) -> float:
    return float(f"{number:.{_DIGITS}g}")


def record(name: str, kind: str, model: Path, *, busy: bool, **options: Any) -> Recording:
    """Run today's search on a model in this process, and keep what it saw."""
    library = ".torch.subject" if model.suffix == ".pt2" else ".engine_subject"
    import_module(f"finecast.native{library}")  # what is not imported is not watched
    get_engine(options["engine"])
    watch = _Watch()
    with watch.on():
        result = api.tune(model, jobs=0, timing_cache=False, progress=False, **options)
    findings = result.findings
    planner, analysis = findings.planner, findings.analysis
    lines: list[Line] = [*_kernels(result), *_plans(result), *watch.lines, *watch.margins()]
    facts = environment().as_json()
    header = Header(
        version=VERSION,
        model=name,
        kind=kind,
        engine=result.engine,
        formats=[] if analysis is None else [f.label for f in analysis.rounded],
        ops=0 if planner is None else len(planner.graph.nodes),
        samples=result.conditions.get("samples") or 0,
        target=result.conditions.get("target_metric") or math.nan,
        baseline=result.baseline.metric if result.baseline else math.nan,
        busy=busy,
        date=datetime.now(UTC).date().isoformat(),
        machine={key: facts[key] for key in ("cpu", "flags", "cores", "libraries")},
        phases={name: round(s, 3) for name, s in result.phases.items()},
        seconds=round(result.seconds, 2),
        evaluations=result.evaluations,
        improved=result.verdict is Verdict.IMPROVED,
        chosen=result.plan.digest,
        speedup=_short(result.speedup),
    )
    return Recording(header=header, lines=lines)


def _kernels(result: Result) -> Iterable[KernelLine]:
    """Units of the tuned model all of whose kernels are of that unit alone."""
    findings = result.findings
    if findings.planner is None or findings.analysis is None:
        return
    planner, analysis = findings.planner, findings.analysis
    problem = build_problem(planner.graph, planner.permissions, analysis)
    labels = labels_of(planner, analysis, problem, result.plan)
    formats = (*analysis.times,)
    ids = {node.name: node.id for node in planner.graph.nodes}
    measured: dict[int, float] = {}
    mixed: set[int] = set()
    for kernel in result.kernels:
        units = {analysis.units.of.get(ids[name], -1) for name in kernel.ops if name in ids}
        if len(units) != 1:
            mixed |= units
            continue
        (unit,) = units
        measured[unit] = measured.get(unit, 0.0) + kernel.time_s
    for unit, seconds in measured.items():
        if unit < 0 or unit in mixed:
            continue
        fmt = formats[labels[unit]]
        yield KernelLine(
            ops=[planner.graph.nodes[n].op for n in analysis.units.members[unit]],
            format=fmt.label,
            fp32_s=_short(float(analysis.times[Format.FP32][unit])),
            predicted_s=_short(float(analysis.times[fmt][unit])),
            measured_s=_short(seconds),
        )


def _plans(result: Result) -> Iterable[PlanLine]:
    findings = result.findings
    for one in findings.candidates:
        known = math.isfinite(one.predicted_cost)
        yield PlanLine(
            digest=one.plan.digest,
            name=one.name,
            formats=dict(one.plan.counts),
            predicted_s=_short(one.predicted_cost) if known else None,
            predicted_error=_short(one.predicted_error),
            cost_s=one.cost,
            fp32_s=findings.fp32_cost,
            casts=one.casts,
            error=one.error,
            metric=one.metric,
            passed=one.passed,
        )


def record_main(arguments: Sequence[str]) -> None:
    """Record today's search on models."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab record")
    known = ", ".join(("digits", *_CASES))
    parser.add_argument(
        "model", nargs="+", help=f"NAME=MODEL, a task's folder of make peers, or of {known}"
    )
    parser.add_argument("--kind", default="", help="of net: cnn, transformer ...")
    parser.add_argument("--data", type=Path, help="of NAME=MODEL")
    parser.add_argument("--metric", default="cosine", help="of NAME=MODEL (default: cosine)")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--engine", default="openvino")
    parser.add_argument("--busy", action="store_true", help="other processes run beside it")
    parser.add_argument("--write", type=Path, default=Path("build/lab/recordings"))
    asked = parser.parse_args(arguments)
    failed = 0
    for text in asked.model:
        name, _, path = text.partition("=")
        options: dict[str, Any] = {"tolerance": asked.tolerance, "engine": asked.engine}
        if path:
            model = Path(path)
            options |= {"data": asked.data, "metric": asked.metric}
        elif (Path(name) / "task.json").is_file():
            model, own = _of_task(Task.read(Path(name)))
            name, options = Path(name).name, options | own
        else:
            model, own = _known(name)
            options |= own
        try:
            recording = record(name, asked.kind, model, busy=asked.busy, **options)
        except FinecastError as error:
            print(json.dumps({"failed": name, "why": str(error)}))
            failed += 1
            continue
        place = asked.write / f"{name}.{asked.engine.partition(':')[0]}.jsonl"
        recording.write(place)
        print(json.dumps({"recorded": str(place), "lines": len(recording.lines)}))
    if failed:
        raise SystemExit(f"{failed} of {len(asked.model)} could not be recorded")


def _of_task(task: Task) -> tuple[Path, dict[str, Any]]:
    """A model that other tools are compared on, judged as there."""
    calls = task.feeds("calib")

    def evaluate(run: Any) -> float:
        return task.score(lambda feed: [*run(feed).values()], "search")

    return task.model, {
        "evaluate": evaluate,
        "calib": lambda: calls,
        "criterion": "absolute",
        "tolerance": task.tolerance,
    }


def _known(name: str) -> tuple[Path, dict[str, Any]]:
    """A model that comes with its data."""
    if name == "digits":
        data, calib = (_DIGITS_NET / f"digits_{part}.npz" for part in ("eval", "calib"))
        return _DIGITS_NET / "digits.onnx", {"data": data, "calib": calib, "metric": "top1"}
    case = shared_case(name) if name in _CASES else None
    if case is None:
        raise SystemExit(f"{name!r} is no model that is here: give NAME=MODEL, or digits")
    calls = [*case.calib(8)]
    options = {"evaluate": score(case, _CASES[name], 16), "calib": lambda: calls}
    return Path(case.model()), options


# ------------------------------------------------------------------------ what follows from it


def fitted(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """The spreads that recordings tell, each with what the lab assumes."""
    spreads = [
        *_kernel_spreads(recordings),
        *_error_spreads(recordings),
        *_race_spreads(recordings),
        *_load_seconds(recordings),
        *_margin_spreads(recordings),
    ]
    return [one for one in spreads if one["count"]]


def _line(
    what: str, values: Sequence[float], unit: str, assumes: Any = None
) -> dict[str, Any]:
    return {
        "what": what,
        "count": len(values),
        "mean": round(mean(values), 4) if values else None,
        "deviation": round(pstdev(values), 4) if values else None,
        "typical": round(_typical(values), 4) if values else None,
        "largest": round(max(map(abs, values)), 4) if values else None,
        "unit": unit,
        "assumed": assumes,
    }


def _typical(values: Sequence[float]) -> float:
    """The deviation by the median distance from the median, whatever a few are."""
    return 1.4826 * float(np.median(np.abs(np.asarray(values) - np.median(values))))


def _kernel_spreads(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """ln(predicted / measured) of kernels: between kinds of kernels, and within each."""
    logs: dict[tuple[str, str, str], list[float]] = {}
    for one in recordings:
        for kernel in one.of(KernelLine):
            if kernel.predicted_s > 0 and kernel.measured_s > 0:
                ratio = math.log(kernel.predicted_s / kernel.measured_s)
                key = one.header.model, kernel.format, kernel.ops[0]
                logs.setdefault(key, []).append(ratio)
    families = [mean(values) for values in logs.values()]
    within = [v - mean(values) for values in logs.values() if len(values) > 1 for v in values]
    return [
        _line(
            "kernel families, predicted / measured", families, "ln", assumed.FAMILY_CORRECTION
        ),
        _line("kernels beside their family", within, "ln", assumed.KERNEL_CORRECTION),
    ]


def _error_spreads(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Whole plans: speed over predicted speed, and measured over predicted error in dB."""
    speeds, errors = list[float](), list[float]()
    for one in recordings:
        for plan in one.of(PlanLine):
            if plan.error and plan.predicted_error:
                errors.append(20 * math.log10(plan.error / plan.predicted_error))
        speeds += _speed_ratios(one)
    return [
        _line("plans, measured / predicted time over fp32's", speeds, "ln"),
        _line("plans, measured / predicted error", errors, "dB", "2 on average, up to 5"),
    ]


def _speed_ratios(one: Recording) -> list[float]:
    """Ln of the ratio of two plans' times, measured over predicted, of neighbours by time."""
    plans = [p for p in one.of(PlanLine) if p.predicted_s and p.cost_s]
    ordered = sorted(plans, key=lambda p: p.cost_s or 0.0)
    return [
        math.log(
            (a.cost_s or 1) / (b.cost_s or 1) * (b.predicted_s or 1) / (a.predicted_s or 1)
        )
        for a, b in pairwise(ordered)
    ]


def _race_spreads(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Ln of a call over the middle of its race; and of a model's speed from race to race."""
    rounds, races = list[float](), list[float]()
    for one in recordings:
        speeds: dict[str, list[float]] = {}
        for race in one.of(RaceLine):
            fp32 = race.rounds[ANCHOR]
            for name, times in race.rounds.items():
                rounds += [math.log(t / float(np.median(times))) for t in times]
                if name != ANCHOR and len(times) > 2:
                    both = zip(times, fp32, strict=False)
                    ratio = float(np.median([a / b for a, b in both]))
                    speeds.setdefault(name, []).append(math.log(ratio))
        races += [s - mean(of) for of in speeds.values() if len(of) > 1 for s in of]
    return [
        _line("calls within a race", rounds, "ln", assumed.ROUND_NOISE),
        _line("speeds from race to race", races, "ln", assumed.PROCESS_DEVIATION),
    ]


def _load_seconds(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """Of whole models: probes of single kernels, which are loaded too, take far less."""
    seconds: list[float] = []
    for one in recordings:
        loads = [line.seconds for line in one.of(LoadLine)]
        whole = [s for s in loads if 2 * s >= max(loads)]
        seconds += [(s - assumed.COMPILE_S) / one.header.ops for s in whole if one.header.ops]
    return [_line("compilation, beside a constant, an op", seconds, "s", assumed.COMPILE_OP_S)]


def _margin_spreads(recordings: Sequence[Recording]) -> list[dict[str, Any]]:
    """The size of shifts of margins over the plan's output error, and its spread by sample."""
    reach, sizes = list[float](), list[float]()
    for one in recordings:
        errors = {p.digest: p.error for p in one.of(PlanLine)}
        margins = {line.digest: np.array(line.margins) for line in one.of(SamplesLine)}
        fp32 = margins.pop(ANCHOR, None)
        shifts = [
            (m - fp32) / (error * float(np.median(np.abs(fp32))))
            for digest, m in margins.items()
            if fp32 is not None and (error := errors.get(digest))
        ]
        typical = [float(np.sqrt(np.mean(s**2))) for s in shifts]
        reach += [math.log(t / float(np.median(typical))) for t in typical if t]
        if len(shifts) > 2:
            own = np.sqrt(np.mean(np.square(shifts), axis=0))
            sizes += np.log(own[own > 0] / np.median(own[own > 0])).tolist()
    return [
        _line("decisions' error over the output's", reach, "ln", assumed.DECISIONS_APART),
        _line("its size from sample to sample", sizes, "ln", assumed.SPREAD_OF_SAMPLES),
    ]


def fit_main(arguments: Sequence[str]) -> None:
    """Print the spreads that recordings tell."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lab fit")
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args(arguments)
    paths = sorted(asked.folder.glob("*.jsonl"))
    if not paths:
        raise SystemExit(f"{asked.folder}: no recordings (*.jsonl)")
    recordings = [Recording.read(path) for path in paths]
    print_environment()
    busy = [one.header.model for one in recordings if one.header.busy]
    print(json.dumps({"recordings": len(recordings), "of a busy machine": busy}))
    for line in fitted(recordings):
        print(json.dumps(line))
