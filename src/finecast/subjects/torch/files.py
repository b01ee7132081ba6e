"""Exported programs, in memory and as ``.pt2`` files: load, export, save."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from finecast.engines.torch.session import ProgramSignature, examples
from finecast.errors import UsageError
from finecast.frontends.torch.archive import load_program
from finecast.frontends.torch.capture import quiet
from finecast.frontends.torch.containers import containers_in
from finecast.planning.plan import Plan

PLAN_FILE = "finecast.plan.json"
"""The plan's name among the extra files of a saved program."""


def load(path: str | Path, *, trust: bool = False) -> ExportedProgram:
    """Load the program in a ``.pt2`` file; no code in it is executed without ``trust``.

    Raises:
        UsageError: If there is no such file.
        ModelError: If it is no exported program, or would execute code.
    """
    with quiet():
        return load_program(Path(path), trust=trust)


def export(module: GraphModule, program: ExportedProgram) -> ExportedProgram:
    """Export a converted module for the inputs of ``program``.

    Sizes that are free in ``program`` are free in the result, within the same bounds.

    Raises:
        UsageError: If ``program`` is no exported program.
        ModelError: If the program carries no example inputs.
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
    given = shapes.dynamic_shapes(module, args, kwargs)
    with quiet():
        return torch.export.export(module, args, kwargs, dynamic_shapes=given)


def _check_program(program: object) -> None:
    """Raise UsageError for what is no exported program, as a converted module is none."""
    if not isinstance(program, ExportedProgram):
        raise UsageError(
            f"a {type(program).__name__} is no exported program",
            fix="finecast.torch.export(low, program), with the program that it was made of",
        )


def _dim(program: ExportedProgram, size: torch.SymInt) -> Any:
    """The free size with its bounds; ``export`` infers sizes computed from others."""
    bounds = program.range_constraints.get(size.node.expr)
    if bounds is None:
        return Dim.AUTO
    lower, upper = (int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))
    return Dim(str(size), min=lower, max=upper)


def save(program: ExportedProgram, path: str | Path, *, plan: Plan | None = None) -> int:
    """Write a program in one step, with its plan as an extra file; returns its bytes.

    Raises:
        UsageError: If it is no exported program, or cannot be written there.
    """
    path = Path(path)
    _check_program(program)
    if not path.parent.is_dir():
        raise UsageError("no such folder", where=str(path.parent), fix="create it first")
    extra = {PLAN_FILE: plan.to_json()} if plan is not None else {}
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".finecast-") as folder:
        staged = Path(folder) / "model.pt2"
        with quiet():
            torch.export.save(program, staged, extra_files=extra)
            # The written file has to load, without trust unless the program's own containers
            # need it.
            load_program(staged, trust=bool(containers_in(staged)))
        try:
            size = staged.stat().st_size
            staged.replace(path)
        except OSError as error:
            raise UsageError(f"cannot write: {error.strerror}", where=str(path)) from error
    return size
