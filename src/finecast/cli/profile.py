"""``finecast profile``: latency, throughput, memory and per-op times of models, compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finecast.cli.common import Json, SizedSamples
from finecast.cli.output import (
    add_row,
    new_table,
    warn,
    write_json,
    write_line,
    write_table,
)
from finecast.errors import UsageError
from finecast.progress import shown

if TYPE_CHECKING:
    from finecast.engines.base import Array, Engine, KernelTime, Session
    from finecast.engines.fallen_apart import FallenApart
    from finecast.measure.memory import MemoryUse
    from finecast.measure.racing import Interval, Race
    from finecast.measure.timing import Latency
    from finecast.pipeline.sources import DataOptions
    from finecast.progress import Progress

_Runner = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME[:DEVICE]",
        help="openvino, onnxruntime, tensorflow, torch or torch-eager; with :DEVICE if not the"
        " CPU.",
    ),
]
_Trusted = Annotated[
    bool,
    typer.Option("--trust", help="Run code in a .keras file, if you know who made the file."),
]
_MOST_KERNELS = 25
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    label: str
    path: Path
    session: Session
    feeds: dict[str, Array]
    batch: int

    def run(self) -> object:
        return self.session.run(self.feeds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    model: _Loaded
    latency: Latency
    speedup: Interval
    memory: MemoryUse | None
    kernels: list[KernelTime]

    @property
    def throughput_per_s(self) -> float:
        return self.model.batch / self.latency.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """How long models are timed; in a round each model runs once."""

    runs: Annotated[int, typer.Option(min=2, help="Least number of rounds.")] = 20
    seconds: Annotated[float, typer.Option(min=0, help="Least time of all rounds.")] = 2.0


def run(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL...",
            help="ONNX files, SavedModels, .pt2 files, or what OpenVINO reads.",
        ),
    ],
    data: SizedSamples,
    rounds: Rounds,
    engine: _Runner = None,
    trust: _Trusted = False,
    ops: Annotated[
        bool, typer.Option("--ops", help="Time of each kernel and its ops.")
    ] = False,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    as_json: Json = False,
) -> None:
    """Latency (median, spread), throughput and peak memory of models, compared.

    Several models run in turns, so that their ratio to the first holds on a noisy machine.

    Examples:
      finecast profile model.onnx tuned.onnx --data val.npz

      finecast profile tuned.onnx --engine onnxruntime --ops
    """
    from finecast import api
    from finecast.engines import first_that_works

    loaders = _loaders(models, engine)
    if data.given and data.dims:
        raise UsageError(
            "--dim sizes random feeds, and data is given", where="--dim", fix="drop one"
        )
    ready = _with_feeds(data)
    with (
        _loadable(models, trust=trust) as paths,
        shown("profiling", quiet=as_json) as report,
    ):
        labels = _labels(models)

        def load_all(one: Engine) -> list[_Loaded]:
            loaded: list[_Loaded] = []
            for index, (label, path) in enumerate(zip(labels, paths, strict=True)):
                report(f"loading {label}", index, 3 * len(models))
                loaded.append(ready(label, models[index], one.load(path, profiling=ops)))
            return loaded

        def check() -> None:
            for path in paths:
                api.inspect(path)

        loader, loaded = first_that_works(loaders, load_all, check=check)
        report("running", len(models), 3 * len(models))
        spec = f"{loader.name}:{loader.device}"
        race = _raced(loaded, rounds)
        peaks = paths if memory else None
        figures = list(_figures(loaded, race, spec, report, peaks=peaks, ops=ops))
    if ops and not any(f.kernels for f in figures):
        warn(f"{spec} does not tell its kernels: --ops shows nothing")
    for note in race.notes:
        warn(note)
    if as_json:
        write_json(_json(spec, figures))
    else:
        _print(spec, figures)


def _figures(
    loaded: Sequence[_Loaded],
    race: Race,
    spec: str,
    report: Progress,
    *,
    peaks: Sequence[Path] | None,
    ops: bool,
) -> Iterator[_Figures]:
    """The figures of each model; ``peaks`` are the files whose peak memory is measured."""
    from finecast.measure.memory import peak_memory

    for index, model in enumerate(loaded):
        report(f"memory of {model.label}", 2 * len(loaded) + index, 3 * len(loaded))
        yield _Figures(
            model=model,
            latency=race.latency(_name(index)),
            speedup=race.speed(_name(index)),
            memory=None if peaks is None else peak_memory(peaks[index], spec, model.feeds),
            kernels=model.session.profile(model.feeds) if ops else [],
        )


@contextmanager
def _loadable(models: Sequence[Path], *, trust: bool) -> Generator[Sequence[Path]]:
    """The files to load; trusted Keras files are exported once, as temporary SavedModels.

    Raises:
        UsageError: If ``trust`` is given and no model is a Keras file.
    """
    from finecast.frontends.keras_models import (
        KERAS_SUFFIX,
        exported,
        import_keras,
        load_keras,
    )

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


def _loaders(models: Sequence[Path], engine: str | None) -> list[Engine]:
    """The engines that may run all ``models``, in order of preference.

    Raises:
        UsageError: If a model cannot be profiled, or the engine's time says nothing.
    """
    from finecast.engines import EMULATOR, engines_for, get_engine
    from finecast.subjects import check_engine, check_options, runs_in

    for path in models:
        check_options(path, {"profile": True})
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


def _raced(loaded: Sequence[_Loaded], rounds: Rounds) -> Race:
    """The models' times, with the first one as the anchor."""
    from finecast.measure.racing import Effort, Race

    calls = {_name(number): model.run for number, model in enumerate(loaded) if number}
    effort = Effort(min_time_s=rounds.seconds, rounds=rounds.runs)
    return Race.of(loaded[0].run, calls, effort)


def _name(number: int) -> str:
    """The name of a model in the race: two labels could be equal to the anchor's."""
    from finecast.measure.racing import ANCHOR

    return str(number) if number else ANCHOR


def _with_feeds(data: DataOptions) -> Callable[[str, Path, Session], _Loaded]:
    """A function that joins a loaded model with the feeds that it is timed on."""
    from finecast.data.datasets import load_npz
    from finecast.data.feeds import synthetic_feeds
    from finecast.pipeline.sources import calibration_batches

    def ready(label: str, path: Path, session: Session) -> _Loaded:
        feeds, rows = drawn(session)
        return _Loaded(label=label, path=path, session=session, feeds=feeds, batch=rows)

    def drawn(session: Session) -> tuple[dict[str, Array], int]:
        options = data.if_given(sizes_feeds=True)
        if options is None:
            feeds = synthetic_feeds(session.inputs, batch=data.batch or 1, dims=data.dims)
        elif isinstance(data.data, Path) and data.calib is None:
            axes = options.sample_axes
            found = load_npz(data.data, session.inputs, labels=data.labels, sample_axes=axes)
            first = next(found.batches(options.samples))
            return first.feeds, first.rows
        else:
            feeds = dict(calibration_batches(session, options, limit=1)[0])
        rows = next((a.shape[0] for a in feeds.values() if a.ndim), 1)
        return feeds, rows

    return ready


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


def _json(engine: str, figures: Sequence[_Figures]) -> dict[str, Any]:
    from finecast.measure.environment import environment

    return {
        "engine": engine,
        "models": [
            {**_model_json(f), "fallen_apart": [one.parts for one in _apart(figures[0], f)]}
            for f in figures
        ],
        "environment": environment().as_json(),
    }


def _model_json(f: _Figures) -> dict[str, Any]:
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


def _print(engine: str, figures: Sequence[_Figures]) -> None:
    table = new_table(
        f"{engine}, batch {figures[0].model.batch}",
        ("model",),
        ("median\nms", "p10 to p90\nms", "spread", "samples/s", "peak\nMiB", "speedup"),
        fold="model",
    )
    for f in figures:
        time = f.latency
        peak = "" if f.memory is None else f"{f.memory.peak_bytes / _MIB:.0f}"
        add_row(
            table,
            f.model.label,
            f"{time.median_s * 1e3:.3f}",
            f"{time.p10_s * 1e3:.3f} to {time.p90_s * 1e3:.3f}",
            f"{time.spread:.0%}",
            f"{f.throughput_per_s:.1f}",
            peak,
            f"x{f.speedup.median:.2f}",
        )
    write_table(table)
    for f in figures:
        if f.kernels:
            _print_kernels(f)
            lines = [one.text for one in _apart(figures[0], f)]
            for line in lines[:_MOST_KERNELS]:
                write_line(f"beside {figures[0].model.label}: {line}")


def _apart(first: _Figures, other: _Figures) -> tuple[FallenApart, ...]:
    """What the first model runs in one kernel and ``other`` in several."""
    from finecast.engines.fallen_apart import fallen_apart

    return fallen_apart(*([k.ops for k in f.kernels] for f in (first, other)))


def _print_kernels(f: _Figures) -> None:
    total = sum(k.time_s for k in f.kernels)
    table = new_table(
        f"{f.model.label}: kernels, {total * 1e3:.3f} ms",
        ("ops", "kernel kind", "format"),
        ("ms", "share"),
        fold=("ops", "kernel kind"),
    )
    for k in f.kernels[:_MOST_KERNELS]:
        names = " ".join(k.ops) or "(added by the engine)"
        share = f"{k.time_s / total:.1%}"
        add_row(table, names, k.kind, k.format, f"{k.time_s * 1e3:.3f}", share)
    rest = len(f.kernels) - _MOST_KERNELS
    more = [f"and {rest} faster ones: --json lists all"] if rest > 0 else []
    write_table(table, *more)
