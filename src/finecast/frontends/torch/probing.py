"""Output errors that roundings cause: from a run for each, or from backward passes for all.

The backward pass assumes that the rounding errors of single elements are independent and of
mean zero (Higham and Mary, 2019). Then the squared output error that rounding a value is
expected to cause is the sum over its elements of (error * gradient)^2, where the gradient is
that of a random +-1 combination of the outputs (Hutchinson, 1990), over the output's squared
norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from finecast.frontends.native_model import with_switches
from finecast.frontends.torch.capture import Captured
from finecast.frontends.torch.native import TorchNative, converted
from finecast.frontends.torch.reader import as_array, tensor_inputs, value_ids
from finecast.frontends.torch.runnable import Isolated, is_tensor
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.points import Point, Switch
from finecast.planning.sensitivity import counted_outputs, measure

Errors = NDArray[np.float64]
Tap = Callable[[torch.Tensor], torch.Tensor]
OnRun = Callable[[int, int], None]

# Draws of the random combination: the estimate's relative deviation is sqrt(2 / draws) for
# one element and far less for a sum over thousands.
_DRAWS: Final = 2
# Up to this many outputs each has backward runs of its own.
_EACH: Final = 4
# A larger or infinite squared error counts as this one, so that sums of errors stay finite.
_WORST: Final = 1e6


class _Tapped(Isolated):
    """Runs a graph; ``taps`` are functions that tensors pass through where they are read.

    The key of a tap is a node and the number of a tensor among those that it reads.
    """

    def __init__(self, captured: Captured, taps: Mapping[tuple[FxNode, int], Tap]) -> None:
        super().__init__(captured.module)
        self.taps = taps
        self.nodes = {node for node, _ in taps}

    def run_node(self, n: FxNode) -> Any:
        """Run one node on its tapped arguments."""
        if n not in self.nodes:
            return super().run_node(n)
        port = -1
        # A value that is several outputs is tapped as the first, and given as all of them.
        outputs: dict[FxNode, Any] = {}

        def load(arg: FxNode) -> Any:
            nonlocal port
            port += 1
            if arg in outputs:
                return outputs[arg]
            tap = self.taps.get((n, port))
            read = tap(self.env[arg]) if tap else self.env[arg]
            if n.op == "output":
                outputs[arg] = read
            return read

        args, kwargs = map_arg((n.args, n.kwargs), load)
        if n.op == "output":
            return args[0]
        return self.call_function(n.target, args, kwargs)  # type: ignore[arg-type]


def own_outputs(captured: Captured, args: Sequence[Any]) -> frozenset[int]:
    """Numbers of the float outputs that copy no input; of all if each does."""
    with torch.no_grad():
        leaves = tree_leaves(_Tapped(captured, {}).leaves(args))
    inputs = [as_array(x) for x in args if is_tensor(x) and x.layout is torch.strided]
    return counted_outputs(inputs, [as_array(y) for y in leaves if is_tensor(y)])


def probe_all(
    captured: Captured,
    points: Sequence[Point],
    low: Format,
    args: Sequence[Any],
    counted: Collection[int] | None = None,
    on_run: OnRun | None = None,
) -> Errors:
    """The squared relative output error of each point, from a run with it alone rounded.

    ``counted`` are numbers of the outputs that it is of, the worst of them; None for all.
    ``on_run`` is called with the numbers of runs done and expected.
    """
    outputs = [value.id for value in captured.graph.outputs]
    switches = [
        Switch(outputs={outputs.index(p.value): low})
        if p.reader is None
        else Switch(ports={(p.reader, p.port): low})
        for p in points
    ]
    copy = Isolated(with_switches(TorchNative.of(captured), switches).module)

    def probe(on: NDArray[np.bool_]) -> list[NDArray[np.generic]]:
        given = [*args, torch.from_numpy(on)] if switches else args
        with torch.no_grad():
            return [as_array(y) for y in tree_leaves(copy.leaves(given)) if is_tensor(y)]

    return measure(len(points), probe, counted=counted, on_probe=on_run).shares


def first_order(
    captured: Captured,
    points: Sequence[Point],
    low: Format,
    args: Sequence[Any],
    counted: Collection[int] | None = None,
    on_run: OnRun | None = None,
    *,
    draws: int = _DRAWS,
) -> Errors:
    """All points' squared relative output errors, from one forward run and a few backward.

    There are ``draws`` backward runs for each of a few outputs, and the error is that of the
    worst. Of many outputs the sum of their errors is taken, from ``draws`` runs for all: the
    worst has no more. ``counted`` are the outputs' numbers; None for all. ``on_run`` is called
    with the numbers of groups of outputs done and in all.

    Raises:
        RuntimeError: If an op of the graph has no gradient.
    """
    seen: dict[tuple[FxNode, int], torch.Tensor] = {}

    def keep(key: tuple[FxNode, int]) -> Tap:
        def tap(x: torch.Tensor) -> torch.Tensor:
            # A view of its own, so that the gradient is that of this reader alone.
            seen[key] = x.view_as(x) if x.grad_fn is not None else x.detach().requires_grad_()
            return seen[key]

        return tap

    keys = _keys(captured, points)
    with torch.enable_grad():
        leaves = tree_leaves(_Tapped(captured, {key: keep(key) for key in keys}).leaves(args))
    tensors = [y for y in leaves if is_tensor(y)]
    outputs = [
        y
        for number, y in enumerate(tensors)
        if y.is_floating_point() and y.requires_grad and (counted is None or number in counted)
    ]
    together = [outputs] if len(outputs) > _EACH else [[y] for y in outputs]
    found: list[dict[tuple[FxNode, int], float]] = []
    for some in together:
        if on_run is not None:
            on_run(len(found), len(together))
        found.append(_squared_errors(some, seen, low, draws))
    return np.array([max((of[key] for of in found), default=0.0) for key in keys])


def _keys(captured: Captured, points: Sequence[Point]) -> list[tuple[FxNode, int]]:
    """The FX node that reads at each point, and the number of the tensor among those it reads.

    Of a value that is several outputs it is the first one.
    """
    (end,) = captured.module.graph.find_nodes(op="output")
    ids = value_ids(captured.binding)
    outputs = [ids.get(node) for node in tensor_inputs(end)]
    return [
        (end, outputs.index(p.value))
        if p.reader is None
        else (captured.binding.nodes[p.reader], p.port)
        for p in points
    ]


def _squared_errors(
    outputs: Sequence[torch.Tensor],
    tensors: Mapping[tuple[FxNode, int], torch.Tensor],
    low: Format,
    draws: int,
) -> dict[tuple[FxNode, int], float]:
    """The sum over ``outputs`` of their squared relative errors, by what is rounded."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    with torch.no_grad():
        deltas = [converted(t, Rounder(format=low)) - t for t in tensors.values()]
    totals = dict.fromkeys(tensors, 0.0)
    for _ in range(draws):
        combination = torch.stack(
            [
                (y * _signs(y, generator)).sum() / y.detach().norm().clamp_min(1e-30)
                for y in outputs
            ]
        ).sum()
        # The gradient is None where no output depends on the tensor.
        gradients: Any = torch.autograd.grad(
            combination, list(tensors.values()), retain_graph=True, allow_unused=True
        )
        for key, delta, gradient in zip(tensors, deltas, gradients, strict=True):
            if gradient is not None:
                totals[key] += float(((gradient * delta) ** 2).sum()) / draws
    return {k: min(t, _WORST) if np.isfinite(t) else _WORST for k, t in totals.items()}


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    bits = torch.randint(0, 2, like.shape, generator=generator)
    return (2 * bits - 1).to(device=like.device, dtype=like.dtype)
