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
from finecast.pipeline.model import OpenedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendEntry:
    """Which models a frontend reads.

    Attributes:
        suffixes: Of its files; the first frontend also takes files of no other's suffix.
        packages: Those whose objects it takes: of libraries, and its own.
        module: Where ``read`` and ``take`` are: an opened model of a path, of an object.
        requires: The library that it needs.
        install: How to get that.
        lacks: Options that say nothing of its models, and what to do instead.
        marker: The file in a folder that says that the folder is one of its models; empty
            where models are files.
    """

    suffixes: tuple[str, ...]
    packages: tuple[str, ...]
    module: str
    requires: str
    install: str
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    marker: str = ""

    @property
    def kind(self) -> str:
        """What its models are called: ``.onnx files``."""
        return "SavedModels" if self.marker else f"{self.suffixes[0]} files"

    def load(self) -> ModuleType:
        """Its module.

        Raises:
            EngineError: If its library is not installed.
        """
        if importlib.util.find_spec(self.requires) is None:
            raise EngineError(f"{self.kind} need {self.requires}", fix=self.install)
        return importlib.import_module(self.module)


FRONTENDS: Final[tuple[FrontendEntry, ...]] = (
    FrontendEntry(
        suffixes=(".onnx",),
        packages=("onnx", "onnx_ir", "finecast.frontends.onnx"),
        module="finecast.subjects.onnx.model",
        requires="onnx",
        install="pip install finecast",
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
    FrontendEntry(
        suffixes=(".keras",),
        packages=("keras", "tensorflow", "finecast.frontends.tensorflow"),
        module="finecast.subjects.tensorflow.model",
        requires="tensorflow",
        install="pip install 'finecast[tensorflow]'",
        lacks={
            "--external-data/--one-file": "leave it out",
            "--from-type": "save the model in fp32 first",
        },
        marker="saved_model.pb",
    ),
)


_SUFFIXES: Final = frozenset(s for entry in FRONTENDS for s in entry.suffixes)


def check_output_name(model: Path, output: Path) -> None:
    """Raise UsageError unless the frontend that writes ``output`` is the one that reads it.

    Args:
        model: The file of the model that is converted.
        output: Where the result goes.
    """
    writer = _entry_of(model)
    if writer.marker:
        if output.suffix in _SUFFIXES:
            raise UsageError(
                "a model of TensorFlow's gives a SavedModel, which is a folder",
                where=str(output),
                fix=f"name it {output.with_suffix('')}",
            )
        return
    if _entry_of(output) is not writer:
        suffix = writer.suffixes[0]
        raise UsageError(
            f"a model of the kind {suffix} gives a file of that kind",
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
            raise UsageError(f"{option} does not apply to {entry.kind}", fix=fix)


def folder_marker(model: Path) -> str:
    """The file by which what is written of a model is told; empty where it is one file."""
    return _entry_of(model).marker


def _entry_of(path: Path) -> FrontendEntry:
    """The frontend of a model: of a folder by what is in it, of a file by its name.

    Letters of names may be in any case.
    """
    for entry in FRONTENDS:
        if entry.marker and (path / entry.marker).is_file():
            return entry
    suffix = path.suffix.lower()
    return next((e for e in FRONTENDS if suffix in e.suffixes), FRONTENDS[0])


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
        if path.is_dir() and not entry.marker:
            raise UsageError(
                "the model is a directory, and no SavedModel",
                where=str(path),
                fix="give a file, or a folder with saved_model.pb",
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
        fix="give a path, an onnx.ModelProto, an onnx_ir.Model or a Keras model;"
        " PyTorch's: finecast.torch",
    )
