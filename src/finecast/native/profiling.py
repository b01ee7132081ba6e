"""Latency, throughput, memory and times of kernels of models, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from finecast.data.feeds import synthetic_feeds
from finecast.data.options import DataOptions
from finecast.data.sources import calibration_batches, given_samples
from finecast.engines import (
    EMULATOR,
    ENGINES,
    engines_for,
    first_that_works,
    get_engine,
    name_of,
)
from finecast.engines.base import Array, Engine, KernelTime, Session
from finecast.engines.fallen_apart import FallenApart, fallen_apart
from finecast.errors import UsageError, in_shell
from finecast.frontends.keras_models import KERAS_SUFFIX, exported, import_keras, load_keras
from finecast.measure.environment import environment
from finecast.measure.memory import MemoryUse, peak_memory
from finecast.measure.racing import ANCHOR, Effort, Interval, Race
from finecast.measure.timing import Latency
from finecast.naming import Option, convert_options, left_out
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.opening import check_engine, check_options, file_of, opened, runs_in
from finecast.numbers.formats import Format
from finecast.plugin import title_of
from finecast.progress import Progress
from finecast.reports.base import Report, TextTable

_MOST_KERNELS: Final = 25
"""Kernels in a table."""
_MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How models are timed; in a round each model runs once.

    Attributes:
        runs: The least number of rounds.
        seconds: The least time of all rounds.
        ops: Whether the time of each kernel is measured, too.
        memory: Whether peak memory is measured, too.
    """

    runs: int = Option(help="Least number of rounds.", kind=int, least=2).field(20)
    seconds: float = Option(help="Least time of all rounds.", kind=float, least=0).field(2.0)
    ops: bool = Option(help="Time of each kernel and its ops.", kind=bool).field(False)
    memory: bool = Option(help="Measure peak memory too.", kind=bool).field(True)

    def __post_init__(self) -> None:
        """Check the options."""
        convert_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in an engine, with the feeds that it is timed on."""

    label: str
    path: Path
    session: Session
    feeds: dict[str, Array]
    batch: int

    def run(self) -> object:
        """Run it once."""
        return self.session.run(self.feeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured of a model; ``speedup`` is over the first one."""

    model: LoadedModel
    latency: Latency
    speedup: Interval
    memory: MemoryUse | None
    kernels: list[KernelTime]

    @property
    def throughput_per_s(self) -> float:
        """Samples a second."""
        return self.model.batch / self.latency.median_s


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProfileReport(Report):
    """Figures of models, the first of which the others are compared with.

    Attributes:
        engine: The engine that ran them, with its device.
        figures: What was measured of each.
        warnings: What makes the figures weak.
    """

    engine: str
    figures: Sequence[Figures]
    warnings: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """A line for each model."""
        lines = [f"{title_of(self.engine)}, batch {self.figures[0].model.batch}"]
        lines += [
            f"{f.model.label}: {f.latency.median_s * 1e3:.3f} ms a call,"
            f" {f.throughput_per_s:.1f} samples/s, x{f.speedup.median:.2f}"
            for f in self.figures
        ]
        return lines + [f"warning: {text}" for text in in_shell(self.warnings)]

    @property
    def tables(self) -> Sequence[TextTable]:
        """The models' figures, and the kernels of each."""
        spread = ("median\nms", "p10 to p90\nms")
        models = TextTable(
            left=("model",),
            right=(*spread, "samples\nper s", "peak\nMiB", "speedup"),
            rows=[_row(f) for f in self.figures],
            fold=("model",),
        )
        return [models, *(self._kernels(f) for f in self.figures if f.kernels)]

    def _kernels(self, f: Figures) -> TextTable:
        """The kernels of a model that take the most time."""
        total = sum(k.time_s for k in f.kernels)
        more = left_out(len(f.kernels), _MOST_KERNELS, ", faster ones: --json lists all")
        beside = f"beside {self.figures[0].model.label}: "
        return TextTable(
            title=f"{f.model.label}: kernels, {total * 1e3:.3f} ms",
            left=("ops", "kernel kind", "format"),
            right=("ms", "share"),
            rows=[
                (
                    " ".join(k.ops) or "(added by the engine)",
                    # A layer and its implementation, each of which fits into a line.
                    k.kind.replace("/", " "),
                    k.format,
                    f"{k.time_s * 1e3:.3f}",
                    f"{k.time_s / total:.1%}",
                )
                for k in f.kernels[:_MOST_KERNELS]
            ],
            fold=("ops", "kernel kind"),
            notes=(*more, *(beside + one.text for one in self.apart(f)[:_MOST_KERNELS])),
        )

    def apart(self, other: Figures) -> tuple[FallenApart, ...]:
        """What the first model runs in one kernel and ``other`` in several."""
        kernels = ([k.ops for k in f.kernels] for f in (self.figures[0], other))
        return fallen_apart(*kernels)

    def _content(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "models": [
                {**_model_json(f), "fallen_apart": [one.parts for one in self.apart(f)]}
                for f in self.figures
            ],
            "environment": environment().as_json(),
        }


def profile(
    models: Sequence[Any],
    engine: str | None,
    data: DataOptions,
    rounds: Rounds,
    *,
    read: ReadOptions,
    report: Progress,
) -> ProfileReport:
    """Time models in turns, so that their ratio to the first holds on a noisy machine.

    Args:
        models: The models: paths, or objects, which are written to temporary files.
        engine: ``NAME[:DEVICE]``; None for the first that runs all of them.
        data: The feeds.
        rounds: How long they are timed.
        read: How models in memory are read, and whether code in a Keras file is run.
        report: Told of each step.

    Raises:
        EngineError: If no engine runs them.
        UsageError: If no feeds can be made.
    """
    if data.given and data.dims:
        raise UsageError(
            "--dim sizes random feeds, and data is given", where="--dim", fix="drop one"
        )
    with ExitStack() as written:
        named = [written.enter_context(file_of(model, read)) for model in models]
        names, files = [Path(name) for name, _ in named], [file for _, file in named]
        engines = _timers(files, engine)
        with _loadable(files, trust=read.trust) as loadable:
            return _profiled(names, loadable, engines, data, rounds, report)


def _profiled(
    models: Sequence[Path],
    files: Sequence[Path],
    engines: Sequence[Engine],
    data: DataOptions,
    rounds: Rounds,
    report: Progress,
) -> ProfileReport:
    labels = _labels(models)

    def load_all(one: Engine) -> list[LoadedModel]:
        loaded: list[LoadedModel] = []
        for index, (label, path) in enumerate(zip(labels, files, strict=True)):
            report(f"loading {label}", index, 3 * len(models))
            session = one.load(path, profiling=rounds.ops)
            feeds, rows = _drawn(session, data)
            loaded.append(
                LoadedModel(
                    label=label, path=models[index], session=session, feeds=feeds, batch=rows
                )
            )
        return loaded

    def check() -> None:
        """Raise what is wrong with a model itself, which engines say in words of their own."""
        for path in files:
            opened(path).census(RunOptions(), Format.BF16)

    engine, loaded = first_that_works(engines, load_all, check=check)
    report("running", len(models), 3 * len(models))
    spec = engine.spec
    race = _raced(loaded, rounds)
    peaks = files if rounds.memory else None
    figures = list(_figures(loaded, race, spec, report, peaks=peaks, ops=rounds.ops))
    silent = rounds.ops and not any(f.kernels for f in figures)
    notes = [f"{spec} does not report its kernels: --ops shows nothing"] if silent else []
    return ProfileReport(engine=spec, figures=figures, warnings=(*notes, *race.notes))


@contextmanager
def _loadable(models: Sequence[Path], *, trust: bool) -> Generator[list[Path]]:
    """The files to load; trusted Keras files are exported once, as temporary SavedModels.

    Raises:
        UsageError: If ``trust`` is given and no model is a Keras file.
    """
    keras_files = [m.suffix.lower() == KERAS_SUFFIX for m in models]
    if trust and not any(keras_files):
        raise UsageError(
            "--trust does not apply: no code in these files is executed",
            where=", ".join(map(str, models)),
            fix="leave it out",
        )
    with ExitStack() as stack:
        paths = list(models)
        for index, path in enumerate(models):
            if trust and keras_files[index]:
                keras = import_keras(str(path))
                model = load_keras(keras, path, trust=True)
                paths[index] = stack.enter_context(exported(keras, model, path))
        yield paths


def _timers(models: Sequence[Path], engine: str | None) -> list[Engine]:
    """The engines that may run all ``models``, in order of preference.

    Raises:
        UsageError: If a model cannot be profiled, or the engine's time says nothing.
    """
    for path in models:
        check_options(path, {"profile": True})
        if engine and name_of(engine) in ENGINES:
            check_engine(path, name_of(engine))
    loaders = [get_engine(engine)] if engine else engines_for(models)
    if loaders[0].name == EMULATOR:
        raise UsageError(
            "the emulator's time says nothing of the device",
            where="--engine",
            fix="finecast ladder and finecast tune --target model the time of one",
        )
    for path in models:
        check_engine(path, loaders[0].name)
    return [one for one in loaders if all(runs_in(path, one.name) for path in models)]


def _figures(
    loaded: Sequence[LoadedModel],
    race: Race,
    spec: str,
    report: Progress,
    *,
    peaks: Sequence[Path] | None,
    ops: bool,
) -> Iterator[Figures]:
    """The figures of each model; ``peaks`` are the files whose peak memory is measured."""
    for index, model in enumerate(loaded):
        report(f"memory of {model.label}", 2 * len(loaded) + index, 3 * len(loaded))
        yield Figures(
            model=model,
            latency=race.latency(_name(index)),
            speedup=race.speed(_name(index)),
            memory=None if peaks is None else peak_memory(peaks[index], spec, model.feeds),
            kernels=model.session.profile(model.feeds) if ops else [],
        )


def _raced(loaded: Sequence[LoadedModel], rounds: Rounds) -> Race:
    """The models' times, with the first one as the anchor."""
    calls = {_name(number): model.run for number, model in enumerate(loaded) if number}
    effort = Effort(min_time_s=rounds.seconds, rounds=rounds.runs)
    return Race.of(loaded[0].run, calls, effort)


def _name(number: int) -> str:
    """The name of a model in the race: two labels could be equal to the anchor's."""
    return str(number) if number else ANCHOR


def _drawn(session: Session, data: DataOptions) -> tuple[dict[str, Array], int]:
    """The feeds that a model is timed on, and their number of samples."""
    options = data.if_given(sizes_feeds=True)
    if options is None:
        feeds = synthetic_feeds(session.inputs, batch=data.batch or 1, dims=data.dims)
    elif options.data is not None and data.calib is None and not data.decode_steps:
        samples = given_samples(options.data, options, session, labels=data.labels)
        first = next(iter(samples.batches(options.samples)))
        return first.feeds, first.rows
    else:
        feeds = dict(calibration_batches(session, options, limit=1)[0])
    return feeds, next((a.shape[0] for a in feeds.values() if a.ndim), 1)


def _labels(models: Sequence[Path]) -> list[str]:
    """A label for each model: its name, or its path, or that and its number.

    Each is the first of these that no other model has.
    """
    names = Counter(path.name for path in models)
    labels = [path.name if names[path.name] == 1 else str(path) for path in models]
    alike = Counter(labels)
    return [
        label if alike[label] == 1 else f"{label} ({number})"
        for number, label in enumerate(labels, 1)
    ]


def _row(f: Figures) -> tuple[str, ...]:
    time = f.latency
    return (
        f.model.label,
        f"{time.median_s * 1e3:.3f}",
        f"{time.p10_s * 1e3:.3f} to {time.p90_s * 1e3:.3f}",
        f"{f.throughput_per_s:.1f}",
        "" if f.memory is None else f"{f.memory.peak_bytes / _MIB:.0f}",
        f"x{f.speedup.median:.2f}",
    )


def _model_json(f: Figures) -> dict[str, Any]:
    return {
        "model": str(f.model.path),
        "batch": f.model.batch,
        "latency_ms": {
            "median": f.latency.median_s * 1e3,
            "p10": f.latency.p10_s * 1e3,
            "p90": f.latency.p90_s * 1e3,
            "iqr": f.latency.iqr_s * 1e3,
            "runs": f.latency.runs,
        },
        "throughput_per_s": f.throughput_per_s,
        "speedup": {"median": f.speedup.median, "low": f.speedup.low, "high": f.speedup.high},
        "memory_bytes": None
        if f.memory is None
        else {"peak": f.memory.peak_bytes, "model": f.memory.model_bytes},
        "ops": [
            {
                "kernel": k.kernel,
                "kind": k.kind,
                "ops": list(k.ops),
                "format": k.format,
                "time_ms": k.time_s * 1e3,
            }
            for k in f.kernels
        ],
    }
