"""Example inputs at the upper bounds of a program's free sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten

from finecast.data.lengths import MOST_LENGTH, MOST_PRODUCTS
from finecast.engines.torch.session import ProgramSignature

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def longest(program: ExportedProgram, inputs: Inputs) -> tuple[Inputs, dict[str, int]] | None:
    """``inputs`` as large as the program's bounds allow, and their sizes by INPUT.AXIS.

    Law: larger inputs repeat the example; integers that count up by 1 along an axis, such as
    positions, go on counting. None if no bound is above the example's size. Sizes are smaller
    if a run at the bounds would take too long.
    """
    leaves, tree = tree_flatten(inputs)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fakes = {n.name: n.meta.get("val") for n in program.graph.nodes}
    specs = ProgramSignature.of(program).inputs
    shapes = [fakes[spec.name].shape for spec in specs]
    have: dict[Any, int] = {}
    names: dict[Any, str] = {}
    for number, spec, shape in zip(tensors, specs, shapes, strict=True):
        for axis, dim in enumerate(shape):
            if not isinstance(dim, int) and dim.node.expr.is_Symbol:
                have[dim.node.expr] = leaves[number].shape[axis]
                names.setdefault(dim.node.expr, f"{spec.name}.{axis}")
    sizes = _affordable(_bounds(program, have), have, program)
    if sizes == have:
        return None
    for number, shape in zip(tensors, shapes, strict=True):
        for axis, dim in enumerate(shape):
            if not isinstance(dim, int):
                size = int(dim.node.expr.subs(sizes))
                leaves[number] = _grown(leaves[number], axis, size)
    return tree_unflatten(leaves, tree), {names[s]: size for s, size in sizes.items()}


def _bounds(program: ExportedProgram, have: Mapping[Any, int]) -> dict[Any, int]:
    """The upper bound of each free size; its size in the example if there is no bound."""
    found = dict(have)
    for name, size in have.items():
        bounds = program.range_constraints.get(name)
        if bounds is not None and bounds.upper.is_Integer:
            found[name] = max(size, min(int(bounds.upper), MOST_LENGTH))
    return found


def _affordable(
    sizes: dict[Any, int], have: Mapping[Any, int], program: ExportedProgram
) -> dict[Any, int]:
    """``sizes``, the largest halved until weights times all sizes are few enough."""
    weights = sum(p.numel() for p in program.parameters()) or 1
    while math.prod(sizes.values()) * weights > MOST_PRODUCTS:
        larger = [name for name in sizes if sizes[name] > have[name]]
        if not larger:
            break
        most = max(larger, key=lambda name: sizes[name])
        sizes[most] = max(sizes[most] // 2, have[most])
    return sizes


def _grown(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """``tensor`` repeated, or counted on, along ``axis`` up to ``size``."""
    old = tensor.shape[axis]
    if size == old or not old:
        return tensor
    index = torch.arange(size, device=tensor.device)
    repeated = tensor.index_select(axis, index % old)
    whole = not tensor.dtype.is_floating_point and tensor.dtype is not torch.bool
    if not whole or old == 1 or bool((tensor.diff(dim=axis) != 1).any()):
        return repeated
    steps = (index - index % old).to(tensor.dtype)
    return repeated + steps.reshape([-1] + [1] * (tensor.ndim - axis - 1))
