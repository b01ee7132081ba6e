"""Copies of a native model that round its values, always or where a switch is on.

A frontend implements ``Roundable``: how its library writes a rounding. Which values are
rounded, and where, is decided here for all frontends.
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
from finecast.planning.points import Switch


class Roundable(Protocol):
    """A copy of a native model in fp32, in which ops can be given other tensors to read.

    A tensor is whatever the library names one by: an object, or a string.
    """

    @property
    def library(self) -> str:
        """What messages call models of this kind."""
        ...

    @property
    def graph(self) -> Graph:
        """The graph of the model before anything was changed."""
        ...

    def tensor(self, value: int) -> Any:
        """The tensor of the value with this id."""
        ...

    def read_at(self, node: int, index: int) -> Any:
        """The tensor that input ``index`` of ``node`` reads after the changes so far."""
        ...

    def give(self, value: int, uses: Iterable[Use], tensor: Any) -> None:
        """Have ``uses`` of the value read ``tensor`` instead."""
        ...

    def constant(self, array: NDArray[np.float32]) -> Any:
        """A constant tensor of these numbers."""
        ...

    def rounded(self, tensor: Any, how: Rounder) -> Any:
        """``tensor`` rounded, in fp32: by arithmetic, or by a cast and one back."""
        ...

    def without_infinities(self, tensor: Any, top: float | None) -> Any:
        """``tensor`` with each Inf replaced by ``top`` of its sign.

        If ``top`` is None, by NaN: what a product with an identity matrix gives.
        """
        ...

    def switched(self, k: int, on: Any, off: Any) -> Any:
        """``on`` where element ``k`` of the extra input ``SWITCH`` is true, else ``off``."""
        ...

    def finish(self, switches: int = 0) -> Any:
        """The changed native model; its extra input has as many elements as ``switches``."""
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
    """The native model with roundings that an extra input switches on.

    The input ``SWITCH`` is a bool vector: where element k is true, the operands and outputs
    that ``switches[k]`` lists are rounded, each to its format and back to fp32. Law: with all
    elements false it computes what the model computes.
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
    """The value, rounded if element ``k`` of the switch is true."""
    exact = model.tensor(value)
    return model.switched(k, _rounded(model, value, exact, encoding), exact)


def _rounded(model: Roundable, value: int, tensor: Any, encoding: Encoding) -> Any:
    """``tensor``, which holds ``value`` after earlier roundings, rounded.

    A constant is rounded here, not when the model runs.
    """
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
    """The native model in fp32 with the numbers of the model that ``edits`` make.

    Sums may differ in their order. The results of low ops are rounded where they are stored,
    and values that are cast where they are read.
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
