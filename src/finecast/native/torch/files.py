"""Exported programs, in memory and as ``.pt2`` files: load, export, save."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from finecast.calls import checks
from finecast.engines.torch.session import ProgramSignature, examples
from finecast.errors import ModelError, UsageError
from finecast.files import writing
from finecast.files.staging import staging
from finecast.frontends.torch.archive import containers_in, load_program
from finecast.frontends.torch.capture import quiet
from finecast.naming import kind_of
from finecast.planning.plan import Plan
from finecast.planning.provenance import Provenance

_UNNAMED: Final = re.compile(r"No registered serialization name for <class '([^']+)'>")
PLAN_FILE = "finecast.plan.json"
"""The plan's name among the extra files of a saved program."""
NOTES_FILE = "finecast.json"
"""The name there of the notes on the conversion, as in ``Provenance``."""


@checks
def load(path: str | Path, *, trust: bool = False) -> ExportedProgram:
    """Load the program in a ``.pt2`` file; no code in it is executed without ``trust``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute code.
    """
    with quiet():
        return load_program(Path(path), trust=trust)


def converted(path: Path) -> Provenance | None:
    """The conversion that made the program in a ``.pt2`` file; None if finecast did not.

    Without an effect on programs of other tools, whatever they write under that name.
    """
    with zipfile.ZipFile(path) as archive:
        name = next((n for n in archive.namelist() if n.endswith(f"/extra/{NOTES_FILE}")), "")
        text = archive.read(name) if name else b"{}"
    try:
        notes: Any = json.loads(text)
        return Provenance.read({str(key): str(value) for key, value in notes.items()})
    except (ValueError, AttributeError):
        return None


@checks
def export(module: GraphModule, program: ExportedProgram) -> ExportedProgram:
    """Export a converted module for the inputs of ``program``.

    Sizes that are free in ``program`` are free in the result, within the same bounds.

    Raises:
        UsageError: If ``program`` is no exported program.
        ModelError: If the program has no example inputs.
    """
    _check_program(program)
    args, kwargs = examples(program)
    shapes = ShapesCollection()
    signature = ProgramSignature.of(program)
    tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    fakes = {n.name: n.meta.get("val") for n in program.graph.nodes}
    for spec, tensor in zip(signature.inputs, tensors, strict=True):
        free = {
            axis: _dim(program, dim)
            for axis, dim in enumerate(fakes[spec.name].shape)
            if not isinstance(dim, int)
        }
        if free:
            shapes[tensor] = free
    dynamic_shapes = shapes.dynamic_shapes(module, args, kwargs)
    with quiet():
        return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes)


def _check_program(program: object) -> None:
    """Raise UsageError for what is no exported program, as a converted module is none."""
    if not isinstance(program, ExportedProgram):
        raise UsageError(
            f"{kind_of(program)} is no exported program",
            fix="finecast.torch.export(low, program), with the program that it was made of",
        )


def _check_dense(program: ExportedProgram) -> None:
    """Raise ModelError for a tensor of a layout that torch does not write."""
    tensors = {**program.state_dict, **program.constants}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.strided:
            raise ModelError(
                f"torch.export.save does not write {name!r}, which is {tensor.layout}",
                fix="save the module by torch.save, or make the tensor dense",
            )


def _dim(program: ExportedProgram, size: torch.SymInt) -> Any:
    """The free size with its bounds; ``export`` infers sizes computed from others."""
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return Dim.AUTO
    lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
    return Dim(str(size), min=lower, max=upper)


class _File(io.FileIO):
    """A file that keeps its first failure to write: torch's writer would end the process."""

    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all of ``data``, unless a write failed before."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while self.failure is None and rest:
                rest = rest[super().write(rest) :]
        except OSError as error:  # the disk is full
            self.failure = error
        return size


def _write(program: ExportedProgram, path: Path, extra: dict[str, Any]) -> None:
    """Save; a ModelError where torch has no name in files for a container.

    Raises:
        OSError: If it cannot be written.
    """
    try:
        with _File(path, "w") as file:
            torch.export.save(program, file, extra_files=extra)
        if file.failure is not None:
            raise file.failure
    except NotImplementedError as error:
        named = _UNNAMED.search(str(error))
        if named is None:
            raise
        raise ModelError(
            f"torch.export.save cannot write a program that takes or gives {named[1]}",
            fix="give plain tuples and dicts, or register the class with a name:"
            " torch.export.register_dataclass(cls, serialized_type_name=...)",
        ) from error


@checks
def save(
    program: ExportedProgram,
    path: str | Path,
    *,
    plan: Plan | None = None,
    original: str = "",
) -> int:
    """Write a program in one step; returns its bytes.

    The plan is added as an extra file, without measured figures, and notes on the conversion
    of the module or file that is called ``original``.

    Raises:
        UsageError: If it is no exported program, or cannot be written there.
        ModelError: If torch does not save what it takes or gives.
    """
    path = Path(path)
    _check_program(program)
    _check_dense(program)
    if not path.parent.is_dir():
        raise UsageError("no such folder", where=str(path.parent), fix="create it first")
    extra = {} if plan is None else {PLAN_FILE: plan.without_figures().to_json()}
    if plan is not None and plan.lowers:
        extra[NOTES_FILE] = json.dumps(Provenance.of(plan, original).notes)
    with (
        writing(path),
        staging(path.parent) as folder,
    ):
        staged = folder / "model.pt2"
        with quiet():
            _write(program, staged, extra)
            # The written file has to load, without trust unless the program's own
            # containers need it.
            load_program(staged, trust=bool(containers_in(staged)))
        size = staged.stat().st_size
        staged.replace(path)
    return size
