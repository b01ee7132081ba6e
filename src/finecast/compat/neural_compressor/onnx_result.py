"""The ONNX model that ``fit`` is given and the one that it returns, in memory and on disk."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx.external_data_helper import uses_external_data

from finecast.errors import FinecastError, UsageError
from finecast.files import writing
from finecast.files.staging import Stage, staging
from finecast.frontends import onnx as frontend
from finecast.frontends.onnx import OnnxFile
from finecast.frontends.onnx.model import EXTERNAL_ABOVE_BYTES
from finecast.frontends.onnx.versions import stated_for_engines
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.rules.policy import Policy, Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenModel:
    """A model as a file, and the temporary folder that it was written to, if it was."""

    file: OnnxFile
    folder: Stage | None = None


@dataclass(frozen=True, kw_only=True)
class OnnxResult:
    """A converted model.

    ``lowered`` counts nodes in a low format, ``products`` the matrix products and convolutions
    among them. Methods with INC's names give parts of ``model``.
    """

    source: GivenModel
    converted: ir.Model
    lowered: int
    products: int

    @cached_property
    def model(self) -> Any:
        """The ModelProto with its tensors; over 2 GB the path of a file, deleted with this."""
        if frontend.fits_one_message(self.converted):
            return frontend.to_proto(self.converted)
        path = self._folder.folder / "model.onnx"
        frontend.save(self.converted, path)
        return str(path)

    @cached_property
    def _folder(self) -> Stage:
        return Stage()

    def save(self, root: str | Path) -> None:
        """Write the ONNX file ``root``; in a folder, ``best_model.onnx``.

        An existing file is replaced. Tensors are stored as the given model had them, in the
        file or beside it in ``NAME.data``; over 2 GB always beside it.

        Raises:
            UsageError: If the file cannot be written, or is the one that was converted.
        """
        is_folder = str(root).endswith(("/", os.sep)) or Path(root).is_dir()
        path = Path(root) / "best_model.onnx" if is_folder else Path(root)
        if path.resolve() == self.source.file.path.resolve():
            raise UsageError(
                "would replace the model that was converted",
                where=str(path),
                fix="give another name",
            )
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        frontend.save(self.converted, path, force=True)

    def nodes(self) -> Any:
        """The nodes of the graph."""
        return self.graph().node

    def graph(self) -> onnx.GraphProto:
        """The graph."""
        proto = self.model
        loaded = (
            onnx.load(proto, load_external_data=False) if isinstance(proto, str) else proto
        )
        return loaded.graph

    def initializer(self) -> Any:
        """The constants of the graph."""
        return self.graph().initializer

    def input(self) -> list[str]:
        """Names of the inputs."""
        constants = {t.name for t in self.initializer()}
        return [p.name for p in self.graph().input if p.name not in constants]

    def output(self) -> list[str]:
        """Names of the outputs."""
        return [p.name for p in self.graph().output]


@contextmanager
def given_form(model: ir.Model) -> Generator[Any]:
    """A model as evaluations take it: a ModelProto; over 2 GB the path of a file."""
    if frontend.fits_one_message(model):
        yield frontend.to_proto(model)
        return
    with staging() as folder:
        path = folder / "model.onnx"
        frontend.save(model, path)
        yield str(path)


def load_model(path: Path) -> OnnxResult:
    """A model that ``OnnxResult.save`` wrote.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is not a valid model.
    """
    file = frontend.load(path)
    graph = frontend.prepare(file, Policy(scope=Scope.NONE)).graph
    low = [n.op for n in graph.float_nodes if n.format is not Format.FP32]
    products = sum(by_name(op).matmul_engine for op in low)
    return OnnxResult(
        source=GivenModel(file=file), converted=file.model, lowered=len(low), products=products
    )


def given_model(model: onnx.ModelProto | str | Path) -> GivenModel:
    """The model as a file; one in memory is written to a temporary folder.

    Raises:
        UsageError: If a ModelProto's tensors are in other files, whose folder is unknown.
        ModelError: If it is not a valid model.
    """
    if not isinstance(model, onnx.ModelProto):
        return GivenModel(file=stated_for_engines(frontend.load(Path(model))))
    folder = Stage()
    path = folder.folder / "model.onnx"
    try:
        if any(uses_external_data(t) for t in model.graph.initializer):
            raise UsageError(
                "tensors of the ModelProto are in other files, whose folder it does not say",
                fix="give the path of the model, or load it with its external data",
            )
        if model.ByteSize() < EXTERNAL_ABOVE_BYTES:
            path.write_bytes(model.SerializeToString())
        else:
            frontend.save(ir.from_proto(model), path)
        return GivenModel(file=stated_for_engines(frontend.load(path)), folder=folder)
    except FinecastError as error:  # the user knows nothing of the temporary folder
        error.__init__(error.what, where="the given ModelProto", fix=error.fix)
        raise
