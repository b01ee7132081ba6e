"""Opening models: which frontend reads a file or an object, and what it writes.

A new frontend has a ``finecast.plugin.FrontendEntry``.
"""

from __future__ import annotations

import csv
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from finecast.builtin import CORE
from finecast.engines.base import does_not_run
from finecast.errors import UsageError
from finecast.files import check_spelling
from finecast.files.staging import staging
from finecast.naming import kind_of
from finecast.native.artefact import Destination
from finecast.native.model import OpenedModel, ReadOptions, RunOptions
from finecast.planning.plan import Plan
from finecast.plugin import FrontendEntry, plugins
from finecast.rules.policy import Policy, Scope

_OTHERS: Final = frozenset(
    {".pt", ".pth", ".ckpt", ".safetensors", ".h5", ".bin", ".mlmodel", ".engine", ".plan"}
)
"""Suffixes of formats that no frontend writes."""

FRONTENDS: Final[tuple[FrontendEntry, ...]] = (
    *(entry for plugin in plugins() if plugin is not CORE for entry in plugin.frontends),
    *CORE.frontends,
)
"""Known frontends in order of preference. Those of plugins come first: they were installed for
what they read."""


def _writes(entry: FrontendEntry, path: Path) -> bool:
    """Whether a frontend writes an output of this name.

    Folders may have any suffix that no frontend reads, unless it names another format.
    """
    suffix = path.suffix.lower()
    if suffix in _OTHERS:
        return False
    if suffix in _known_suffixes():
        return suffix == entry.suffixes[0] and not entry.writes_folder
    return entry.writes_folder


def _planned(entry: FrontendEntry, plan: Plan) -> bool:
    """Whether ``plan`` may be one for a model as the frontend reads it."""
    known = {name for frontend in FRONTENDS for name in frontend.runners}
    runs = plan.engine in entry.runners or plan.engine not in known
    return runs and bool(plan.opset) == entry.opsets


@cache
def foreign() -> Mapping[str, tuple[str, str]]:
    """Files that no frontend reads, by the end of their names: what they are, what to give.

    The first that fits counts. The rows are those of ``foreign.csv``.
    """
    lines = (files("finecast.native") / "foreign.csv").read_text(encoding="utf-8")
    return {
        end: (row["what"], row["instead"])
        for row in csv.DictReader(lines.splitlines())
        for end in row["ends"].split()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What is written for a model's output.

    Attributes:
        beside: Files that may be written beside the output.
        folder: The file that marks an output folder as a model; empty if it is a file.
    """

    beside: tuple[Path, ...] = ()
    folder: str = ""


def check_output_name(model: Path, output: Path) -> None:
    """Raise UsageError unless a frontend that reads ``model`` writes ``output``."""
    _check_kind(model)
    check_spelling(output)
    readers = _readers(model)
    # What is wrong with a missing model is said as it is read, and not of its output's name.
    if not model.exists() or any(_writes(entry, output) for entry in readers):
        return
    kind = "SavedModel" if model.is_dir() else model.suffix or readers[0].suffixes[0]
    named = [
        str(output.with_suffix("" if e.writes_folder else e.suffixes[0])) for e in readers
    ]
    raise UsageError(
        f"a model of the kind {kind} gives {' or '.join(e.kind for e in readers)}",
        where=str(output),
        fix=f"name it {' or '.join(named)}",
    )


def engine_of(output: Path) -> str:
    """The name of the engine that runs a model written to ``output``."""
    return next(entry.runners[0] for entry in FRONTENDS if _writes(entry, output))


def check_written(module: str, output: Path) -> None:
    """Raise UsageError unless the frontend of that ``module`` writes ``output``.

    A path is opened by the frontend that writes the output; a model that was opened before
    may be of another frontend.
    """
    entry = next((e for e in FRONTENDS if e.module == module), None)
    if entry is None or _writes(entry, output):
        return
    named = output.with_suffix("" if entry.writes_folder else entry.suffixes[0])
    elsewhere = (
        ", or give finecast.convert or tune the model's path, or the object of its library,"
        " with this output"
    )
    known = any(_writes(one, output) for one in FRONTENDS)
    raise UsageError(
        f"what is written of this model are {entry.kind}",
        where=str(output),
        fix=f"name it {named}{elsewhere if known else ''}",
    )


@contextmanager
def file_of(model: Any, how: ReadOptions) -> Generator[tuple[str, Path]]:
    """A model's name, and its file or folder: of one in memory a temporary one.

    Raises:
        FinecastError: As ``opened``; or if a model in memory cannot be written.
    """
    if isinstance(model, str | Path):
        yield str(model), Path(model)
        return
    opened_model = opened(model, how)
    if opened_model.path.exists():
        yield opened_model.name, opened_model.path
        return
    entry = next(e for e in FRONTENDS if e.module == type(opened_model).__module__)
    with staging() as folder:
        path = folder / f"model{'' if entry.writes_folder else entry.suffixes[0]}"
        nothing = Policy(scope=Scope.NONE)
        opened_model.convert(Destination(path=path), nothing, RunOptions(verify=False))
        yield opened_model.name, path


def check_options(
    model: Path, given: Mapping[str, object], *, output: Path | None = None
) -> None:
    """Raise UsageError for an option or verb that does not apply to a model of this kind.

    Only the model's name is needed: no library is imported.

    Args:
        model: The file or folder of the model.
        given: The value of each option; a false one was not given.
        output: Where the result goes, if there is one.
    """
    entry = _entry_of(model, output)
    for option, fix in entry.lacks.items():
        if given.get(option):
            raise UsageError(f"{option} does not apply to {entry.kind}", fix=fix)


def check_engine(model: Path, engine: str) -> None:
    """Raise UsageError unless ``engine`` loads files of the kind of ``model``."""
    _check_kind(model)
    if not runs_in(model, engine):
        names = dict.fromkeys(name for entry in _readers(model) for name in entry.runners)
        kind = "SavedModels" if model.is_dir() else f"{model.suffix.lower()} files"
        more = "and only models that it runs"
        raise does_not_run(engine, kind, names, where=str(model), more=more)


def runs_in(model: Path, engine: str) -> bool:
    """Whether ``engine`` loads files of the kind of ``model``."""
    return any(engine in entry.runners for entry in _readers(model))


def written_with(model: Path, output: Destination) -> Written:
    """What is written for ``output`` by the frontend that converts ``model``."""
    if output.path is None:
        return Written()
    entry = _entry_of(model, output.path)
    if entry.writes_folder:
        return Written(folder=entry.folders[0])
    if output.external_data is False:
        return Written()
    names = (n.format(name=output.path.name, stem=output.path.stem) for n in entry.beside)
    beside = (output.path.parent / name for name in names)
    # An output with the name of its own companion is refused elsewhere, for its suffix.
    return Written(beside=tuple(path for path in beside if path != output.path))


PLAN: Final = ".plan.json"
STUDY: Final = ".study.db"
LOCK: Final = ".lock.json"
"""How the names of files end that ``tune`` writes beside a model: plan, study and lock."""


def plan_beside(output: Path) -> Path:
    """Where the plan of a model is written: beside it, with ``.plan.json``.

    Law: ``m.onnx`` has ``m.plan.json``. Any other file keeps its suffix in the name, such as
    ``m.pt2.plan.json``, and the folder ``m`` has ``m.saved_model.plan.json``, so that models
    of one stem have plans of their own.
    """
    return _beside(output, PLAN)


def study_beside(output: Path) -> Path:
    """Where the study of a model is written: beside it, with ``.study.db``, as its plan."""
    return _beside(output, STUDY)


def lock_beside(output: Path) -> Path:
    """Where the lock of a model is written: beside it, with ``.lock.json``, as its plan."""
    return _beside(output, LOCK)


def _beside(output: Path, suffix: str) -> Path:
    kind = output.suffix.lower()
    name = output.stem if kind == CORE.frontends[0].suffixes[0] else output.name
    if kind not in _known_suffixes():
        name += ".saved_model"
    return output.parent / f"{name}{suffix}"


def _known_suffixes() -> set[str]:
    """Suffixes of the files that frontends read."""
    return {suffix for entry in FRONTENDS for suffix in entry.suffixes}


def _check_kind(model: Path) -> None:
    """Raise UsageError for a file or folder that no frontend reads; tells what it is."""
    check_spelling(model)
    if model.exists() and not (model.is_file() or model.is_dir()):
        raise UsageError(
            "the model is no ordinary file",
            where=str(model),
            fix="give a file: models are read several times, and not from pipes or devices",
        )
    if model.is_dir() and not any(entry.reads(model) for entry in FRONTENDS):
        raise UsageError(
            "the model is a directory, and no SavedModel",
            where=str(model),
            fix="give a file, or a folder with saved_model.pb",
        )
    if any(model.name in entry.folders for entry in FRONTENDS) and model.is_file():
        raise UsageError(
            "the graph of a SavedModel without its variables",
            where=str(model),
            fix=f"give the folder: {model.parent}",
        )
    if model.suffix.lower() in foreign() and model.is_file():
        name = model.name.lower()
        what, fix = next(advice for end, advice in foreign().items() if name.endswith(end))
        raise UsageError(f"a {model.suffix} file is {what}", where=str(model), fix=fix)


def _readers(model: Path) -> list[FrontendEntry]:
    """The frontends that read ``model``; that of ONNX if none knows it."""
    return [e for e in FRONTENDS if e.reads(model)] or [CORE.frontends[0]]


def _entry_of(
    model: Path, output: Path | None = None, plan: Plan | None = None
) -> FrontendEntry:
    """The frontend of a model: of those that read it, the one that writes ``output``.

    Without an output it is the one that ``plan`` was made with, or else the first whose
    library is installed.
    """
    readers = _readers(model)
    if plan is not None:
        readers = [e for e in readers if _planned(e, plan)] or readers
    if output is not None:
        return next((e for e in readers if _writes(e, output)), readers[0])
    return next((e for e in readers if e.installed), readers[0])


def opened(
    model: Any,
    how: ReadOptions = ReadOptions(),  # noqa: B008 - frozen
    *,
    output: Path | None = None,
    plan: Plan | None = None,
) -> OpenedModel:
    """Open a model.

    Args:
        model: A path, an object of its library, or a model that is open already.
        how: How it is read; ``from_type`` is the caller's.
        output: Where a result goes: its name decides among frontends that read the model.
        plan: The plan whose nodes are looked up where nothing is written: it decides then.

    Raises:
        UsageError: If no frontend opens it.
        ModelError: If it cannot be read.
    """
    opened_model = _opened(model, how, output, plan)
    if how.freeze_inputs is None:
        return opened_model
    return opened_model.with_inputs(frozen=how.freeze_inputs)


def _opened(
    model: Any,
    how: ReadOptions,
    output: Path | None,
    plan: Plan | None,
) -> OpenedModel:
    if isinstance(model, str | Path):
        path = Path(model)
        entry = _entry_of(path, output, plan)
        _check_kind(path)
        _check_examples(how, path)
        opened_model: OpenedModel = entry.load().read(path, trust=how.trust)
        return opened_model
    if isinstance(model, OpenedModel):
        _check_examples(how, model.name)
        return model
    homes = [base.__module__ for base in type(model).__mro__]
    takers = [entry for entry in FRONTENDS if any(map(entry.opens, homes))]
    if takers:
        entry = takers[0]
        if output is not None:
            entry = next((e for e in takers if _writes(e, output)), entry)
        if not entry.captures:
            _check_examples(how, type(model).__name__)
        take = entry.load().take
        taken: OpenedModel = take(model, how) if entry.captures else take(model)
        return taken
    if hasattr(model, "plan"):
        raise UsageError(
            f"{kind_of(model)} is not a model",
            fix="give the model it was made of, with plan=result.plan, or result.model",
        )
    raise UsageError(
        f"{kind_of(model)} is not a model",
        fix="give a path, an onnx.ModelProto, an onnx_ir.Model, an openvino.Model, a Keras"
        " model, a PyTorch module or an exported program",
    )


def _check_examples(how: ReadOptions, model: object) -> None:
    """Raise UsageError for inputs to capture ``model`` with, which nothing is captured of."""
    for name in ("example_inputs", "example_kwargs", "dynamic_shapes"):
        if getattr(how, name) is not None:
            raise UsageError(
                f"{name} captures a PyTorch module, and none is given",
                where=str(model),
                fix="leave it out",
            )
