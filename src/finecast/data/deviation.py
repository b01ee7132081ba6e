"""How far a model's outputs are from fp32's, and how much of that its formats explain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from finecast.engines.base import Array
from finecast.graph import Graph, Node
from finecast.graph.structure import READS_SHAPE_ONLY
from finecast.numbers.formats import Format
from finecast.numbers.rounding import widened
from finecast.numbers.thresholds import ENGINE_FACTOR, LIMIT
from finecast.ops import OpKind, by_name
from finecast.planning.free_rows import holds_floats
from finecast.planning.slices import WHOLE, Slice, slices_of

ROUNDINGS_PER_OP: Final = 3
"""An op in a low format rounds its operand, its weight and its result."""


def chance_share(wanted: Array) -> float:
    """The share of decisions that change if they are drawn by their frequencies in fp32."""
    _, counts = np.unique(wanted, return_counts=True)
    return 1.0 - float(np.sum((counts / max(wanted.size, 1)) ** 2))


# Ops whose result depends on which of two numbers is larger: a rounding may change all of it.
_DECIDES: Final = frozenset({OpKind.COMPARISON, OpKind.INDEX, OpKind.QUANTIZE})
_STEPS: Final = frozenset({"floor", "ceil", "round", "trunc"})
"""Ops that move a number by one at most."""
_JUMPS: Final = frozenset({"sign", "mod", "floor_divide"})
_MOVES: Final = {
    "identity",
    "flatten",
    "reshape",
    "slice",
    "squeeze",
    "transpose",
    "unsqueeze",
}
_KEEPS_STEPS: Final = _STEPS | _MOVES | {"cast", "clip", "relu"}
"""Ops of which the result is as far off as what they read."""
_CHOOSES: Final = frozenset({"arg_max", "arg_min", "bucketize", "hardmax", "top_k"})
_KEEPS_CHOICES: Final = _MOVES | {"cast", "logical"}
"""Ops of which an element is another one only where one that they read is."""


def fp32_error(ops: int) -> float:
    """The relative error that two programs of so many ops in fp32 may have between them.

    Engines and exporters fuse ops, fold constants and reorder sums: all of these round anew.
    """
    one = ENGINE_FACTOR * Format.FP32.unit_roundoff
    return one * math.sqrt(ROUNDINGS_PER_OP * ops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The difference of an output y from fp32's, r.

    ``largest`` is the largest |y - r|; ``relative`` is ||y - r|| / ||r||, or ||y - r|| if r is
    0; of what holds no floats the share of elements that differ. ``comparable`` is False where
    the shapes differ; ``nonfinite`` says that y has a NaN or Inf where r is finite.

    ``counted`` says that ``relative`` is a share of elements; ``as_numbers`` is
    ||y - r|| / ||r|| of such integers, and of bools and text that share. ``beyond_step`` is
    that of floats and integers if each number may be off by one.
    """

    largest: float = 0.0
    relative: float = 0.0
    nonfinite: bool = False
    comparable: bool = True
    counted: bool = False
    as_numbers: float = 0.0
    beyond_step: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The errors that rounding explains, by the id of the value.

    ``relative`` has relative errors. Values in ``decided`` follow from a comparison, a rank or
    a step of rounded numbers: their errors have no bound. Those in ``stepped`` are among them:
    they are steps, such as casts to integers, and off by one more than what was rounded.

    So are those in ``choices``: classes, masks and places that are chosen by rounded numbers
    alone, and by no earlier decision, so that each element changes by a chance of its own.
    They are given with the number of the node that chooses.
    """

    relative: Mapping[int, float]
    decided: frozenset[int]
    stepped: frozenset[int]
    choices: Mapping[int, int]

    def is_beyond(self, value: int | None, one: Deviation, limit: float) -> bool:
        """Whether no rounding explains a deviation of the value.

        Integers are exact: a single one that differs is wrong, unless they are decided by
        rounded numbers. Then ranks may differ, but not by all digits, and steps by one.

        Args:
            value: The id of the value.
            one: Its deviation.
            limit: The relative error of floats that rounding explains.
        """
        if not one.comparable or one.nonfinite:
            return True
        if value in self.stepped:
            return one.beyond_step > limit
        if value in self.decided:
            return max(one.as_numbers, 0.0 if one.counted else one.relative) > LIMIT
        return one.relative > (0.0 if one.counted else limit)


def deviation(got: Array, wanted: Array) -> Deviation:
    """The deviation of the worst slice of ``got`` from ``wanted``, where that is finite."""
    return max(deviations(got, wanted).values(), key=lambda one: one.relative)


def deviations(got: Array, wanted: Array, axis: int | None = None) -> dict[Slice, Deviation]:
    """The deviation of each slice of ``got`` whose numbers have a unit of their own.

    ``axis`` is that of the slices; None to find them.
    """
    if got.shape != wanted.shape:
        return {WHOLE: Deviation(comparable=False)}
    if wanted.dtype.kind in "biuOSU":
        return {WHOLE: _counted(got, wanted)}
    return {
        part: _deviation(part.of(got), part.of(wanted)) for part in slices_of(wanted, axis)
    }


def _counted(got: Array, wanted: Array) -> Deviation:
    share = differing(got, wanted) / max(wanted.size, 1)
    counted = Deviation(relative=share, counted=True, as_numbers=share, beyond_step=share)
    if not share or {got.dtype.kind, wanted.dtype.kind} - {"i", "u"}:
        return counted
    off = _deviation(got, wanted)
    return replace(
        counted, largest=off.largest, as_numbers=off.relative, beyond_step=off.beyond_step
    )


def _deviation(got: Array, wanted: Array) -> Deviation:
    y, r = widened(got), widened(wanted)
    finite = np.isfinite(r)
    y, r = y[finite], r[finite]
    if not np.isfinite(y).all():
        lost = math.inf
        return Deviation(nonfinite=True, largest=lost, relative=lost, beyond_step=lost)
    difference = np.abs(y - r)
    norm = math.sqrt(float(np.sum(r**2))) or 1.0
    return Deviation(
        largest=float(difference.max(initial=0.0)),
        relative=math.sqrt(float(np.sum(difference**2))) / norm,
        beyond_step=math.sqrt(float(np.sum(np.maximum(difference - 1, 0) ** 2))) / norm,
    )


def differing(got: Array, wanted: Array) -> int:
    """How many elements differ, of two arrays of integers, bools or text of one shape."""
    return int(np.sum(got != wanted))


def expected(graph: Graph, formats: Mapping[int, Format]) -> Expected:
    """The error of each value if nodes compute in ``formats``, by node id.

    Nodes that are not in ``formats`` compute in their own. Law: roundings are independent, so
    squared errors add up along a path; a value has the sum of its worst path.
    """
    squared: dict[int, float] = {}
    decided, stepped = set[int](), set[int]()
    choices: dict[int, int] = {}
    for node in graph.nodes:
        before = node.input_ids
        worst = max((squared.get(i, 0.0) for i in before), default=0.0)
        own = formats.get(node.id, node.format)
        if own is not None and own is not Format.FP32:
            rounding = ROUNDINGS_PER_OP * own.unit_roundoff**2
            worst = max(worst, rounding) if by_name(node.op).exact else worst + rounding
        hinging = [i for i in before if i in decided]
        hinges = bool(hinging) or (worst > 0 and _decides(graph, node))
        steps = hinges and node.op in (_KEEPS_STEPS if hinging else {*_STEPS, "cast"})
        steps = steps and stepped.issuperset(hinging) and not _gives_truth(graph, node)
        chooser = _chooser(node, hinging, choices) if hinges else None
        for index in node.outputs:
            if index is not None:
                squared[index] = worst
                if hinges:
                    decided.add(index)
                if steps:
                    stepped.add(index)
                if chooser is not None:
                    choices[index] = chooser
    relative = {i: math.sqrt(s) for i, s in squared.items()}
    return Expected(
        relative=relative,
        decided=frozenset(decided),
        stepped=frozenset(stepped),
        choices=choices,
    )


def _chooser(node: Node, hinging: Sequence[int], choices: Mapping[int, int]) -> int | None:
    """The number of the node that chooses the results of ``node``; None if they are derived.

    ``hinging`` are the values that it reads and that were decided before.
    """
    if not hinging:
        chooses = node.op in _CHOOSES or by_name(node.op).kind is OpKind.COMPARISON
        return node.id if chooses else None
    kept = node.op in _KEEPS_CHOICES and all(i in choices for i in hinging)
    return choices[hinging[0]] if kept else None


def _decides(graph: Graph, node: Node) -> bool:
    """Whether a rounding of what the node reads may change its result by any amount."""
    if node.op in READS_SHAPE_ONLY:
        return False
    if by_name(node.op).kind in _DECIDES or node.op in _STEPS | _JUMPS:
        return True
    if node.op != "cast":
        return False
    read, made = (
        [graph.values[i] for i in ports if i is not None]
        for ports in (node.inputs, node.outputs)
    )
    return any(map(holds_floats, read)) and not any(map(holds_floats, made))


def _gives_truth(graph: Graph, node: Node) -> bool:
    return any(graph.values[i].dtype == "bool" for i in node.output_ids)
