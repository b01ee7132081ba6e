"""Copies of a native model that round its values, for good or at the turn of a switch.

A frontend says how its library states a rounding (``Roundable``); where one stands is said
here, once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.numbers.encodings import Encoding
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder
from finecast.planning.edits import (
    ConvertConstant,
    Edit,
    InsertCast,
    RoundTrip,
    SetFormat,
    SetPort,
    Use,
)
from finecast.planning.switches import Switch


class Roundable(Protocol):
    """A copy of a native model in fp32, whose readers can be given other tensors.

    Tensors are what the library takes for one: an object, or a name.
    """

    @property
    def library(self) -> str:
        """What messages call the kind of the model."""
        ...

    @property
    def graph(self) -> Graph:
        """The graph of the model as it was copied."""
        ...

    def tensor(self, value: int) -> Any:
        """The tensor that a value of the graph is."""
        ...

    def read_at(self, node: int, index: int) -> Any:
        """The tensor that input ``index`` of ``node`` reads by now."""
        ...

    def give(self, value: int, uses: Iterable[Use], tensor: Any) -> None:
        """Have ``uses`` of a value read ``tensor`` in its place."""
        ...

    def constant(self, array: NDArray[np.float32]) -> Any:
        """A tensor of these numbers."""
        ...

    def rounded(self, tensor: Any, how: Rounder) -> Any:
        """``tensor`` rounded by arithmetic, or to a type and back to fp32."""
        ...

    def without_infinities(self, tensor: Any, top: float | None) -> Any:
        """Inf as ``top`` of its sign; None for what a product by the identity makes of it."""
        ...

    def switched(self, k: int, on: Any, off: Any) -> Any:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        ...

    def finish(self, switches: int = 0) -> Any:
        """The native model; it takes that many switches."""
        ...


def uses_of(graph: Graph, value: int) -> Iterator[Use]:
    """Everything that reads a value: inputs of nodes, and the model's output."""
    found = graph.values[value]
    for node in found.uses:
        for index, source in enumerate(graph.nodes[node].inputs):
            if source == value:
                yield Use(node=node, index=index)
    if found.is_output:
        yield Use(node=None)


def with_switches(model: Roundable, switches: Sequence[Switch]) -> Any:
    """The native model that rounds what its extra input switches on.

    The input ``SWITCH`` is a bool vector: element k rounds what ``switches[k]`` has, each to
    its format and back to fp32. Law: with all of them off it is the model.
    """
    graph = model.graph
    made: dict[tuple[int, Encoding, int], Any] = {}
    for k, switch in enumerate(switches):
        for (node, index), encoding in switch.ports.items():
            value = graph.nodes[node].inputs[index]
            if value is None:
                continue
            key = (value, encoding, k)
            if key not in made:
                made[key] = _switched(model, value, encoding, k)
            model.give(value, [Use(node=node, index=index)], made[key])
        for number, encoding in switch.outputs.items():
            value = graph.outputs[number].id
            model.give(value, [Use(node=None)], _switched(model, value, encoding, k))
    return model.finish(len(switches))


def _switched(model: Roundable, value: int, encoding: Encoding, k: int) -> Any:
    """A value, rounded where element ``k`` is on."""
    exact = model.tensor(value)
    return model.switched(k, _rounded(model, value, exact, encoding), exact)


def _rounded(model: Roundable, value: int, tensor: Any, encoding: Encoding) -> Any:
    """``tensor``, which a value is by now, rounded; a constant ahead of time."""
    stats = model.graph.values[value].constant
    if stats is None:
        return model.rounded(tensor, _rounder(encoding))
    array = stats.read().astype(np.float32)
    return model.constant(encoding.decode(encoding.encode(array)))


def _rounder(encoding: Encoding) -> Rounder:
    if isinstance(encoding, Format):
        return Rounder(format=encoding)
    return Rounder(format=encoding.format, encoding=encoding)


def with_roundings(model: Roundable, edits: Iterable[Edit]) -> Any:
    """The native model in fp32 whose values are those that ``edits`` give, up to sums' order.

    What an op computes low is rounded where it is stored, and so is what is cast for it.
    """
    graph = model.graph
    current: dict[int, Any] = {}

    def round_for(value: int, to: Encoding, uses: Iterable[Use]) -> Any:
        low = _rounded(model, value, current.get(value, model.tensor(value)), to)
        model.give(value, uses, low)
        return low

    def stored(value: int, to: Format) -> None:
        if to is not Format.FP32:
            current[value] = round_for(value, to, uses_of(graph, value))

    for edit in edits:
        match edit:
            case SetFormat():
                for value in graph.following_outputs(graph.nodes[edit.node]):
                    stored(value.id, edit.to)
            case SetPort() if graph.values[edit.value].is_input:
                stored(edit.value, edit.to)
            case InsertCast() | ConvertConstant() | RoundTrip():
                if edit.to is not Format.FP32:
                    round_for(edit.value, edit.to, edit.uses)
            case _:
                pass
    return model.finish()
