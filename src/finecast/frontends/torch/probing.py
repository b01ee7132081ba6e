"""Output errors that roundings cause, from backward passes for all of them.

A backward pass assumes that the rounding errors of single elements are independent and of
mean zero (Higham and Mary, 2019). Then the squared output error that rounding a value is
expected to cause is the sum over its elements of (error * gradient)^2, where the gradient is
that of a random +-1 combination of the outputs (Hutchinson, 1990), over the output's squared
norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from finecast.frontends.torch.native import TorchNative, rounded_to
from finecast.frontends.torch.runnable import Isolated
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import Use
from finecast.planning.points import Place, RoundingPoints
from finecast.planning.sensitivity import Sensitivity
from finecast.planning.slices import slices_of
from finecast.progress import Progress, silent

# Draws of the random combination: the estimate's relative deviation is sqrt(2 / draws) for
# one element and far less for a sum over thousands.
_DRAWS: Final = 2
# Up to this many outputs each has backward runs of its own.
_EACH: Final = 4
# Places that read one value.
Places: TypeAlias = tuple[Place, ...]
# A larger or infinite squared error counts as this one, so that sums of errors stay finite.
_WORST: Final = 1e6


def first_order(
    copy: TorchNative,
    points: Mapping[Format, RoundingPoints],
    args: Sequence[Any],
    counted: Collection[int] | None = None,
    axis: int | None = None,
    *,
    draws: int = _DRAWS,
    progress: Progress = silent,
) -> dict[Format, Sensitivity]:
    """All points' squared relative output errors, from one forward run and a few backward.

    There are ``draws`` backward runs for each of a few outputs, and the error is that of the
    worst. Of many outputs the sum of their errors is taken, from ``draws`` runs for all: the
    worst has no more.

    Args:
        copy: A copy of the module, which is changed.
        points: Where plans round, by format.
        args: Flattened inputs.
        counted: Numbers of the outputs that errors are of; None for all.
        axis: The axis of their slices; None to find them.
        draws: Random combinations of the outputs.
        progress: Told of each group of outputs that is done.

    Raises:
        RuntimeError: If an op of the graph has no gradient.
    """
    read, leaves = _tapped(copy, points.values(), args)
    outputs = [
        piece
        for number, y in enumerate(y for y in leaves if torch.is_tensor(y))
        if y.is_floating_point() and y.requires_grad and (counted is None or number in counted)
        for piece in _pieces(y, axis)
    ]
    together = [outputs] if len(outputs) > _EACH else [[y] for y in outputs]
    groups = {fmt: _shared(copy.graph, where) for fmt, where in points.items()}
    rounded: list[Places] = [(place,) for place in read]
    rounded += dict.fromkeys(some for of in groups.values() for unit in of for some in unit)
    rounders = {fmt: _rounder(fmt, where) for fmt, where in points.items()}
    errors: dict[Format, dict[Places, float]] = {fmt: {} for fmt in points}
    for done, some in enumerate(together):
        progress("sensitivity", done, len(together))
        kept = done + 1 < len(together)
        squared = _squared_errors(some, read, rounded, rounders, draws, retain_graph=kept)
        for fmt, squares in squared.items():
            worst = errors[fmt]
            worst |= {places: max(e, worst.get(places, 0.0)) for places, e in squares.items()}
    return {
        fmt: Sensitivity(
            values=np.array([_sum(errors[fmt], p.places) for p in where.points]),
            weights=np.array([_sum(errors[fmt], places) for places in _constants(where)]),
            shared=np.array(
                # The error of one rounding that all places read, less those of one for each.
                [
                    sum(errors[fmt].get(some, 0.0) - _sum(errors[fmt], some) for some in unit)
                    for unit in groups[fmt]
                ]
            ),
        )
        for fmt, where in points.items()
    }


def _rounder(fmt: Format, points: RoundingPoints) -> Callable[[Place], Rounder | None]:
    """How what is read at a place is rounded; None if it is not in a format with scales."""
    if not fmt.has_scales:
        return lambda place: Rounder(format=fmt)
    rounders = {
        place: Rounder(format=fmt, encoding=point.encoding)
        for point in points.points
        for place in point.places
        if not isinstance(point.encoding, Format | None)
    }
    return rounders.get


def _pieces(y: torch.Tensor, axis: int | None) -> list[torch.Tensor]:
    """The slices of an output that have different units."""
    parts = slices_of(y.detach().float().cpu().numpy(), axis)
    return [
        y if one.indices is None else y[(slice(None),) * one.axis + (list(one.indices),)]
        for one in parts
    ]


def _shared(graph: Graph, points: RoundingPoints) -> list[list[Places]]:
    """For each unit whose rounded result has several readers, the places by value read."""
    units: list[list[Places]] = []
    for _, numbers in points.shared:
        by_value: dict[int, list[Place]] = {}
        for number in numbers:
            for place in points.points[number].places:
                by_value.setdefault(_read(graph, place), []).append(place)
        units.append([tuple(places) for places in by_value.values()])
    return units


def _constants(points: RoundingPoints) -> list[list[Place]]:
    """Where the ops of each unit read constants."""
    return [[(n, i) for n, ports in unit.items() for i in ports] for unit in points.weights]


def _sum(errors: Mapping[Places, float], places: Sequence[Place]) -> float:
    return sum(errors.get((place,), 0.0) for place in places)


def _read(graph: Graph, place: Place) -> int:
    """The id of the value that is read at a place."""
    node, index = place
    value = graph.outputs[index].id if node is None else graph.nodes[node].inputs[index]
    assert value is not None
    return value


def _tapped(
    copy: TorchNative, points: Collection[RoundingPoints], args: Sequence[Any]
) -> tuple[dict[Place, torch.Tensor], list[Any]]:
    """The tensors that are read at all places of ``points``, and the outputs of them."""
    graph = copy.graph
    seen: dict[Place, torch.Tensor] = {}

    def keep(x: torch.Tensor, *, place: Place) -> torch.Tensor:
        # A view of its own, so that the gradient is that of this reader alone.
        seen[place] = x.view_as(x) if x.grad_fn is not None else x.detach().requires_grad_()
        return seen[place]

    of_all = [[*(p.places for p in where.points), *_constants(where)] for where in points]
    for place in dict.fromkeys(place for group in of_all for some in group for place in some):
        node, index = place
        value = _read(graph, place)
        read = copy.tensor(value) if node is None else copy.read_at(node, index)
        tap = copy.call(keep, (read,), {"place": place})
        copy.give(value, [Use(node=node, index=index)], tap)
    with torch.enable_grad():
        return seen, tree_leaves(Isolated(copy.changed()).leaves(args))


def _squared_errors(
    outputs: Sequence[torch.Tensor],
    tensors: Mapping[Place, torch.Tensor],
    rounded: Sequence[Places],
    rounders: Mapping[Format, Callable[[Place], Rounder | None]],
    draws: int,
    *,
    retain_graph: bool,
) -> dict[Format, dict[Places, float]]:
    """The sum over ``outputs`` of their squared relative errors, by what is rounded.

    The places of each of ``rounded`` read one value, and so the same rounding of it.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    totals = {fmt: dict.fromkeys(rounded, 0.0) for fmt in rounders}
    for left in reversed(range(draws)):
        combination = torch.stack(
            [
                (y * _signs(y, generator)).sum() / y.detach().norm().clamp_min(1e-30)
                for y in outputs
            ]
        ).sum()
        # The gradient is None where no output depends on the tensor.
        gradients: Any = torch.autograd.grad(
            combination,
            list(tensors.values()),
            retain_graph=retain_graph or left > 0,  # else its memory is freed on the way
            allow_unused=True,
        )
        by_place = dict(zip(tensors, gradients, strict=True))
        for places in rounded:
            terms = [g for place in places if (g := by_place[place]) is not None]
            if not terms:
                continue
            x, gradient = tensors[places[0]], reduce(torch.add, terms)
            for fmt, rounder in rounders.items():
                how = rounder(places[0])
                if how is None:
                    continue
                with torch.no_grad():
                    moved = (rounded_to(x, how) - x).mul_(gradient)
                totals[fmt][places] += float(torch.linalg.vector_norm(moved)) ** 2 / draws
    return {
        fmt: {k: min(t, _WORST) if np.isfinite(t) else _WORST for k, t in errors.items()}
        for fmt, errors in totals.items()
    }


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator)
    return (2 * bits - 1).to(device=like.device, dtype=like.dtype)
