"""Exporting a module as a program that takes inputs of other sizes than the example's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves, tree_map

from finecast.engines.torch.session import ProgramSignature, examples, runnable
from finecast.errors import ModelError
from finecast.frontends import torch as frontend
from finecast.frontends.torch.capture import quiet


def export_freely(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ExportedProgram:
    """Export ``module`` with all sizes of its inputs free, except those that its code fixes.

    Law: the first size of every input is free, and on the example the program gives outputs of
    the module's own shapes. An example of a single sample is doubled: ``torch.export`` takes a
    size of 1 for a constant.

    Raises:
        ModelError: If the module cannot be exported in this way; says why.
    """
    leaves = tree_leaves((args, kwargs))
    single = all(x.shape[0] == 1 for x in leaves if isinstance(x, torch.Tensor) and x.ndim)
    given: tuple[Any, ...] = tree_map(_doubled, args) if single else args
    named: dict[str, Any] = tree_map(_doubled, dict(kwargs)) if single else dict(kwargs)
    free = _all_free(module, given, named)
    program = frontend.capture(module, given, named, dynamic_shapes=free).program
    for spec in ProgramSignature.of(program).inputs:
        if spec.shape and isinstance(spec.shape[0], int):
            raise ModelError(f"the first size of its input {spec.name} cannot vary")
    if _shapes(runnable(program), args, kwargs) != _shapes(module, args, kwargs):
        raise ModelError("the shape of its outputs depends on the size of the batch")
    return program


def export_like(module: GraphModule, program: ExportedProgram) -> ExportedProgram:
    """Export a converted module as a program with the same free sizes as ``program``."""
    args, kwargs = examples(program)
    with quiet():
        return torch.export.export(
            module, args, kwargs, dynamic_shapes=_all_free(module, args, kwargs)
        )


def _all_free(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``dynamic_shapes`` of ``torch.export``: every size free that the code does not fix."""
    shapes = ShapesCollection()
    for one in tree_leaves((args, kwargs)):
        if isinstance(one, torch.Tensor):
            shapes[one] = dict.fromkeys(range(one.ndim), Dim.AUTO)
    return shapes.dynamic_shapes(module, args, kwargs)


def _doubled(x: Any) -> Any:
    return torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.ndim else x


def _shapes(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[int, ...]]:
    """Shapes of the outputs, in evaluation mode; the module's own modes are put back."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            leaves = tree_leaves(module(*args, **kwargs))
    finally:
        for one, training in modes:
            one.training = training
    return [tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)]
