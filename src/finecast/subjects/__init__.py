"""Models joined with what runs them: what the pipeline is given.

A new frontend has its row here: which files and objects are its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from finecast.errors import EngineError, UsageError
from finecast.files import DATA_SUFFIX
from finecast.pipeline.artefact import Destination
from finecast.pipeline.model import OpenedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendEntry:
    """Which models a frontend reads.

    Attributes:
        suffixes: Of its files, the first that of files it writes; the first frontend also
            takes files of no other's suffix.
        folders: Files by which a folder is known as one of its models.
        beside: Names of what may be written with a model's file, with ``{name}`` for its name
            and ``{stem}`` for that without its suffix.
        packages: Those whose objects it takes: of libraries, and its own.
        module: Where ``read`` and ``take`` are: an opened model of a path, of an object.
        requires: The library that it needs.
        install: How to get that.
        lacks: Options that say nothing of its models, and what to do instead.
    """

    suffixes: tuple[str, ...]
    packages: tuple[str, ...]
    module: str
    requires: str
    install: str
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    folders: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def load(self) -> ModuleType:
        """Its module.

        Raises:
            EngineError: If its library is not installed.
        """
        if importlib.util.find_spec(self.requires) is None:
            raise EngineError(
                f"{self.suffixes[0]} files need {self.requires}", fix=self.install
            )
        return importlib.import_module(self.module)


FRONTENDS: Final[tuple[FrontendEntry, ...]] = (
    FrontendEntry(
        suffixes=(".onnx",),
        packages=("onnx", "onnx_ir", "finecast.frontends.onnx"),
        module="finecast.subjects.onnx.model",
        requires="onnx",
        install="pip install finecast",
        beside=(f"{{name}}{DATA_SUFFIX}",),
    ),
    FrontendEntry(
        suffixes=(".xml", ".keras", ".tflite", ".pb", ".pdmodel"),
        packages=("openvino", "finecast.frontends.openvino"),
        module="finecast.subjects.openvino.model",
        requires="openvino",
        install="pip install openvino",
        lacks={
            "--external-data/--one-file": "leave it out: constants are in the .bin beside it",
            "--from-type": "convert the model in fp32",
        },
        folders=("saved_model.pb",),
        beside=("{stem}.bin",),
    ),
    FrontendEntry(
        suffixes=(".pt2",),
        packages=("torch",),
        module="finecast.subjects.torch.model",
        requires="torch",
        install="pip install 'finecast[torch]'",
        lacks={
            **dict.fromkeys(("--engine", "--data", "--dim", "--batch"), "leave it out"),
            "--external-data/--one-file": "leave it out",
            "--from-type": "export the module in fp32: copy.deepcopy(module).float()",
        },
    ),
)


def check_output_name(model: Path, output: Path) -> None:
    """Raise UsageError unless the frontend that writes ``output`` is the one that reads it.

    Args:
        model: The file of the model that is converted.
        output: Where the result goes.
    """
    writer = _entry_of(model)
    suffix = writer.suffixes[0]
    others = {s for e in FRONTENDS for s in e.suffixes} - {suffix}
    if _entry_of(output) is not writer or output.suffix.lower() in others:
        kind = "SavedModel" if model.is_dir() else model.suffix or suffix
        raise UsageError(
            f"a model of the kind {kind} gives a file of the kind {suffix}",
            where=str(output),
            fix=f"name it {output.with_suffix(suffix)}",
        )


def check_options(model: Path, given: Mapping[str, object]) -> None:
    """Raise UsageError for an option that says nothing of a model of this kind.

    It needs the model's name alone: no library is loaded to say so.

    Args:
        model: The file of the model.
        given: What was given for options; what counts as false was not.
    """
    entry = _entry_of(model)
    for option, fix in entry.lacks.items():
        if given.get(option):
            raise UsageError(f"{option} does not apply to {entry.suffixes[0]} files", fix=fix)


def _entry_of(path: Path) -> FrontendEntry:
    """The frontend of a file, by its name; letters in any case. Of a folder, by its files."""
    if path.is_dir():
        entries = (e for e in FRONTENDS for name in e.folders if (path / name).is_file())
        return next(entries, FRONTENDS[0])
    suffix = path.suffix.lower()
    return next((e for e in FRONTENDS if suffix in e.suffixes), FRONTENDS[0])


def written_beside(output: Destination) -> tuple[Path, ...]:
    """Files that may be written with a model, by the frontend of its name."""
    path = output.path
    if path is None or output.external_data is False:
        return ()
    names = (n.format(name=path.name, stem=path.stem) for n in _entry_of(path).beside)
    return tuple(path.with_name(name) for name in names)


def opened(model: Any, *, trust: bool = False) -> OpenedModel:
    """A model by its path, or as an object of its library; an opened one stays as it is.

    Args:
        model: The model.
        trust: Whether what its file would execute may be executed.

    Raises:
        UsageError: If it is no model of any frontend.
        ModelError: If it cannot be read.
    """
    if isinstance(model, str | Path):
        path = Path(model)
        entry = _entry_of(path)
        if path.is_dir() and not entry.folders:
            raise UsageError(
                "the model is a directory",
                where=str(path),
                fix="give a file, or the folder of a SavedModel, with its saved_model.pb",
            )
        found: OpenedModel = entry.load().read(path, trust=trust)
        return found
    if hasattr(model, "graph_for"):
        given: OpenedModel = model
        return given
    homes = [f"{base.__module__}." for base in type(model).__mro__]
    for entry in FRONTENDS:
        if any(home.startswith(f"{p}.") for home in homes for p in entry.packages):
            taken: OpenedModel = entry.load().take(model)
            return taken
    raise UsageError(
        f"a {type(model).__name__} is not a model",
        fix="give a path, an onnx.ModelProto, an onnx_ir.Model or an openvino.Model;"
        " PyTorch's: finecast.torch",
    )
