"""Engines: software that runs a model here. ``get_engine`` finds one by its name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from finecast.calls import checks
from finecast.engines.base import Engine, Loadable, Session, does_not_run
from finecast.engines.known import ENGINES as ENGINES
from finecast.engines.known import name_of as name_of
from finecast.errors import EngineError, UsageError
from finecast.frontends.dry_run import CrashedError
from finecast.naming import unknown_name
from finecast.plugin import ONNX, PROGRAMS, SAVED_MODELS, imported_on_use, load, title_of

if TYPE_CHECKING:
    # Names of this room for others, as plugins: imported on first use.
    from finecast.engines.attribution import Kernel as Kernel
    from finecast.engines.attribution import attribute as attribute
    from finecast.engines.base import DTYPES as DTYPES
    from finecast.engines.base import Array as Array
    from finecast.engines.base import Feeds as Feeds
    from finecast.engines.base import KernelFormats as KernelFormats
    from finecast.engines.base import KernelTime as KernelTime
    from finecast.engines.base import TensorSpec as TensorSpec
    from finecast.engines.base import cpus as cpus
    from finecast.engines.base import ordered_feeds as ordered_feeds
    from finecast.engines.exact import CachedSession as CachedSession
    from finecast.engines.numerics import TENSORFLOW as TENSORFLOW
    from finecast.engines.numerics import TENSORFLOW_REWRITES as TENSORFLOW_REWRITES
    from finecast.engines.onnxruntime import explain as explain
    from finecast.engines.onnxruntime import lacks_kernel as lacks_kernel
    from finecast.engines.probe import Speed as Speed
    from finecast.engines.probe import drop_slow_formats as drop_slow_formats
    from finecast.engines.probe import speed_of as speed_of
    from finecast.engines.probe_models import Probe as Probe
    from finecast.engines.source import ModelSource as ModelSource
    from finecast.engines.source import ModelStep as ModelStep
    from finecast.engines.source import read_source as read_source
else:
    __getattr__ = imported_on_use(__name__)

T = TypeVar("T")

EMULATOR = "emulator"
"""``emulator:TARGET`` computes as TARGET would. It runs models in other engines."""

PROGRAM_SUFFIX = ".pt2"


def installed(name: str) -> bool:
    """Whether the library that the engine needs is installed; imports nothing."""
    return importlib.util.find_spec(library_of(name)) is not None


def library_of(name: str) -> str:
    """The library that an engine needs."""
    return ENGINES[name].requires


@checks
def get_engine(spec: str) -> Engine:
    """The engine that ``NAME`` or ``NAME:DEVICE`` names, such as ``openvino:GPU``.

    ``emulator:TARGET`` runs a model as TARGET would if its compiler added no casts.

    Raises:
        UsageError: If there is no engine of that name, or no such target.
        EngineError: If it is not installed, or does not have the device.
    """
    name, device = name_of(spec), spec.partition(":")[2].strip()
    if name == EMULATOR:
        return _emulator(device)
    if name not in ENGINES:
        raise unknown_name(
            name, (*ENGINES, f"{EMULATOR}:TARGET"), what="engine", where="--engine"
        )
    entry = ENGINES[name]
    if not installed(name):
        present = ", ".join(n for n in ENGINES if installed(n)) or "none"
        raise EngineError(
            f"engine {name!r} is not installed",
            fix=f"{entry.install} (installed here: {present})",
        )
    engine: Engine = load(f"{entry.module}:{entry.factory}")(device or entry.device)
    if not hasattr(engine, "name"):
        raise EngineError(
            f"the engine {name!r} has no name",
            where=f"{entry.module}:{entry.factory}",
            fix="its class needs `name`, that of its EngineEntry",
        )
    return engine


def check_runs(spec: str, names: Collection[str], kind: str) -> None:
    """Raise UsageError if ``spec`` names another engine than ``names``, which run a ``kind``.

    A name that no engine has is left to ``get_engine``.
    """
    name = name_of(spec)
    if name in (*ENGINES, EMULATOR) and name not in names:
        own = [one for one in names if one != EMULATOR]
        raise does_not_run(name, kind, own, where="--engine", more="or leave it out")


def _emulator(target: str) -> Engine:
    from finecast.devices.emulation import explicit_casts
    from finecast.engines.emulator import EmulatorEngine

    if not target:
        raise UsageError(
            "the emulator needs a device",
            where="--engine",
            fix=f"write {EMULATOR}:TARGET; finecast targets lists them",
        )
    return EmulatorEngine(emulation=explicit_casts(target))


def devices(name: str) -> tuple[str, ...]:
    """The devices that an installed engine finds here."""
    entry = ENGINES[name]
    device_names: tuple[str, ...] = importlib.import_module(entry.module).devices()
    return device_names


def reading(kind: str) -> tuple[str, ...]:
    """Names of the engines that load files of one kind."""
    return tuple(name for name, entry in ENGINES.items() if kind in entry.reads)


@checks
def default_engine() -> Engine:
    """The first of ``ENGINES`` that is installed and reads ONNX files.

    Raises:
        EngineError: If none is.
    """
    names = reading(ONNX)
    for name in names:
        if installed(name):
            return get_engine(name)
    advice = " or ".join(ENGINES[name].install for name in names)
    raise EngineError("no engine is installed", fix=advice)


def engines_for(models: Sequence[Path]) -> list[Engine]:
    """The engines that may run all of ``models``, in order of preference.

    For SavedModels, which are folders, and Keras files TensorFlow, for ``.pt2`` files PyTorch;
    if it is not installed, or one of them is another file, those that read ONNX files.
    """
    from finecast.frontends.keras_models import KERAS_SUFFIX

    kinds = {
        PROGRAMS: all(m.suffix.lower() == PROGRAM_SUFFIX for m in models),
        SAVED_MODELS: all(m.is_dir() or m.suffix.lower() == KERAS_SUFFIX for m in models),
    }
    for kind in (k for k, fits in kinds.items() if fits):
        own = [name for name in reading(kind) if installed(name)]
        if own:
            return [get_engine(own[0])]
    return candidates(None)


def candidates(spec: str | None) -> list[Engine]:
    """The engine that ``spec`` names, else all installed ones that read ONNX files.

    They are in order of preference.
    """
    if spec:
        check_runs(spec, (*reading(ONNX), EMULATOR), ".onnx files")
        return [get_engine(spec)]
    names = (name for name in reading(ONNX) if installed(name))
    return [get_engine(name) for name in names] or [default_engine()]


def first_that_loads(
    engines: Sequence[Engine],
    model: Loadable,
    notes: list[str] | None = None,
    *,
    check: Callable[[], object] | None = None,
) -> tuple[Engine, Session]:
    """The first of ``engines`` that loads ``model``; raises EngineError if none does.

    A text on each engine that the model crashes is added to ``notes``. ``check`` is as for
    ``first_that_works``.
    """
    return first_that_works(engines, lambda engine: engine.load(model), notes, check=check)


def first_that_works(
    engines: Sequence[Engine],
    work: Callable[[Engine], T],
    notes: list[str] | None = None,
    *,
    check: Callable[[], object] | None = None,
) -> tuple[Engine, T]:
    """The first of ``engines`` in which ``work`` raises no EngineError, and what it gives.

    A text on each engine that crashed before is added to ``notes``. ``check`` is called if no
    engine works. It raises what is wrong with the model itself, which engines say in words of
    their own, or crash at.

    Raises:
        EngineError: If it does in all of them; gives each one's reason.
    """
    failures: dict[str, EngineError] = {}
    for engine in engines:
        try:
            done = work(engine)
        except EngineError as error:
            if len(engines) == 1 and check is None:
                raise
            failures[engine.name] = error
        else:
            crash_notes = [
                f"{text}: {engine.title} takes its place" for text in crashes(failures)
            ]
            if notes is not None:
                notes += crash_notes
            return engine, done
    if check is not None:
        check()
    if len(failures) == 1:
        raise next(iter(failures.values()))
    raise EngineError(
        "no engine here can run the model",
        where="; ".join(f"{title_of(name)}: {error.what}" for name, error in failures.items()),
        fix=what_loads_it(failures),
    )


def crashes(failures: Mapping[str, EngineError]) -> list[str]:
    """What the crashes among ``failures`` were; other failures need no note."""
    return [
        error.what
        for error in failures.values()
        if isinstance(error, CrashedError) or isinstance(error.__cause__, CrashedError)
    ]


def other_engines(name: str) -> str:
    """What to do about a model that the engine ``name`` does not load: take another one."""
    others = [f"--engine {other}" for other in reading(ONNX) if other != name]
    return f"an ONNX model: try {' or '.join(others)}"


def what_loads_it(failures: Mapping[str, EngineError]) -> str:
    """What to do about a model that no engine of ``failures`` loads, by the engines' names."""
    if len(failures) == 1:
        return next(iter(failures.values())).fix
    own = [error.fix for name, error in failures.items() if error.fix != other_engines(name)]
    return (
        "; or ".join(filter(None, dict.fromkeys(own)))
        or "export it with ops that one of them has"
    )


def led_by_one_that_loads(
    engines: Sequence[Engine], model: Loadable, notes: list[str] | None = None
) -> Sequence[Engine]:
    """``engines``, and before all others the first that loads ``model``, if one does.

    A single engine is not tried, nor where the first one reads the model: to load it takes
    many times as long, and hardly ever fails then.
    """
    if len(engines) < 2 or engines[0].reads(model):
        return engines
    try:
        first, _ = first_that_loads(engines, model, notes)
    except EngineError:
        return engines
    return [first, *(one for one in engines if one is not first)]
