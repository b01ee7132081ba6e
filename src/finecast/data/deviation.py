"""How far outputs may be from fp32's: what the formats explain, and what nothing does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from finecast.engines.base import Array
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.ops import OpKind, by_name

ROUNDINGS_PER_OP: Final = 3
"""An op in a low format rounds its operand, its weight and its result."""

LIMIT: Final = 0.5
"""A relative error from which on not one binary digit of an output is right."""

USELESS: Final = 1.0
"""A relative error at which zeros would be as near: no format's coarseness excuses it."""

ENGINE_FACTOR: Final = 16.0
"""Times by which an engine may miss what its types predict: four binary digits. Engines fuse,
order sums and approximate functions otherwise, which costs a digit or two; an op that they
compute wrongly (a bias left out) costs all that the format has."""

NOTICED: Final = 0.02
"""A relative error below which engines are not suspected: where numbers cancel (a flow is the
difference of coordinates) they may lose digits in other places, and the error is told."""

# What they give turns on which of two numbers is larger, so that one rounding may change all.
_DECIDES: Final = frozenset({OpKind.COMPARISON, OpKind.INDEX, OpKind.QUANTIZE})
_STEPS: Final = frozenset({"floor", "ceil", "round", "trunc", "sign", "mod", "floor_divide"})
_SHOWS_NO_FLOAT: Final = frozenset({"shape", "size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One output against fp32's. ``relative`` is ||y - r|| / ||r||, absolute where r is 0.

    ``comparable`` is False where the shapes differ; ``nonfinite`` says that there is a NaN or
    Inf where fp32 has none.
    """

    largest: float = 0.0
    relative: float = 0.0
    nonfinite: bool = False
    comparable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What rounding does to each value, by its id.

    ``relative`` is the relative error that the formats explain. Values that are ``decided``
    follow from a comparison, a rank or a step of rounded numbers: no error of theirs is bound.
    """

    relative: Mapping[int, float]
    decided: frozenset[int]


def deviation(got: Array, wanted: Array) -> Deviation:
    """How far ``got`` is from ``wanted`` where that is finite; nothing for integers."""
    if wanted.dtype.kind in "biuOSU":
        return Deviation()
    if got.shape != wanted.shape:
        return Deviation(comparable=False)
    y, r = got.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(r)
    y, r = y[finite], r[finite]
    if not np.isfinite(y).all():
        return Deviation(nonfinite=True, largest=math.inf, relative=math.inf)
    difference = np.abs(y - r)
    norm = math.sqrt(float(np.sum(r**2)))
    error = math.sqrt(float(np.sum(difference**2)))
    return Deviation(
        largest=float(difference.max(initial=0.0)), relative=error / norm if norm else error
    )


def expected(graph: Graph, formats: Mapping[int, Format]) -> Expected:
    """What rounding in ``formats`` (by node id; others keep theirs) does to each value.

    Law: roundings are independent, so squared errors add up along a path (``sensitivity``);
    a value has those of its worst path.
    """
    squared: dict[int, float] = {}
    decided: set[int] = set()
    for node in graph.nodes:
        before = [i for i in node.inputs if i is not None]
        worst = max((squared.get(i, 0.0) for i in before), default=0.0)
        own = formats.get(node.id, node.format)
        if own is not None and own is not Format.FP32:
            rounding = ROUNDINGS_PER_OP * own.unit_roundoff**2
            worst = max(worst, rounding) if by_name(node.op).exact else worst + rounding
        hinges = any(i in decided for i in before) or (worst > 0 and _decides(graph, node))
        for index in node.outputs:
            if index is not None:
                squared[index] = worst
                if hinges:
                    decided.add(index)
    relative = {i: math.sqrt(s) for i, s in squared.items()}
    return Expected(relative=relative, decided=frozenset(decided))


def _decides(graph: Graph, node: Node) -> bool:
    if node.op in _SHOWS_NO_FLOAT:
        return False
    if by_name(node.op).kind in _DECIDES or node.op in _STEPS:
        return True
    if node.op != "cast":
        return False
    read, made = (
        [graph.values[i] for i in ports if i is not None]
        for ports in (node.inputs, node.outputs)
    )
    return any(map(_is_float, read)) and not any(map(_is_float, made))


def _is_float(value: Value) -> bool:
    return value.format is not None or value.dtype == "fp64"
