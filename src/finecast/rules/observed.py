"""Observed values have to fit the format's range, unless what leaves it changes no result.

What a body gives that no sample runs was not observed: where it is read, the data shows the
numbers of another branch alone, and those of its own may be any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from finecast.graph import PHI, SCALARS, Graph, Node, Value
from finecast.graph.worklist import Worklist
from finecast.numbers.formats import Format
from finecast.numbers.rounding import overflow_limit
from finecast.ops import MOVES, by_name
from finecast.rules.base import ANY, KEEP, Context, Rule, Ruling
from finecast.rules.constants import DIVISORS, scalars
from finecast.rules.facts import Facts
from finecast.rules.scaled_operands import origin
from finecast.rules.unseen import is_unseen

# If more than half of the nonzero numbers become 0, the relative error of most of the value
# is no longer bounded by the format's epsilon.
_UNDERFLOW_SHARE = 0.5
# Later data may be larger than the calibration data. Formats with fp32's exponent range need
# no headroom: fp32 itself would overflow as early.
_HEADROOM = 2.0


def range_limit(fmt: Format) -> float:
    """The magnitude from which on a value is too large to be stored in ``fmt``."""
    return fmt.max / _HEADROOM if fmt.has_less_range else overflow_limit(fmt)


def divided_by(graph: Graph, value: Value) -> Node | None:
    """An op that divides by ``value``, or by a value that is only moved from it; else None."""
    moved = Worklist([value.id])
    for at in moved:
        for node in graph.readers(graph.values[at]):
            port = DIVISORS.get(node.op)
            if port is not None and port < len(node.inputs) and node.inputs[port] == at:
                return node
            if by_name(node.op).exact and graph.values[at] in graph.following_inputs(node):
                moved.add(v.id for v in graph.following_outputs(node))
    return None


def _judge(node: Node, context: Context) -> Ruling | None:
    graph, low = context.graph, context.low
    if low.has_less_range and not is_unseen(graph, node, context.facts):
        for value in graph.following_inputs(node):
            source = _unseen_source(graph, value, context.facts)
            if source is not None:
                text = (
                    f"{source.name} may give {value.name}, and no sample of the data runs it"
                )
                return Ruling(permits=KEEP, text=text)
    harmless: Ruling | None = None
    for value in (*graph.following_inputs(node), *graph.following_outputs(node)):
        facts = context.facts.get(value.id)
        if facts is None:
            continue
        if facts.largest >= range_limit(low):
            absorbs = absorbing(graph, context.facts, value, low)
            evidence = {"largest": facts.largest, "limit": range_limit(low)}
            if absorbs is not None:
                text = (
                    f"{value.name} may overflow in {low.label}: {absorbs.name} saturates first"
                )
                harmless = Ruling(permits=ANY, text=text, evidence=evidence)
                continue
            return Ruling(
                permits=KEEP,
                text=f"{value.name} comes too close to the largest {low.label}",
                evidence=evidence,
            )
        share = facts.flushed_share(low)
        divides = divided_by(graph, value) if share else None
        if divides is not None:
            return Ruling(
                permits=KEEP,
                text=f"some of {value.name} becomes 0 in {low.label}, and {divides.name} "
                "divides by it",
                evidence={"share": share, "limit": low.smallest_subnormal},
            )
        nonzero = facts.count - facts.zeros
        lost = share * facts.count
        if nonzero and lost / nonzero > _UNDERFLOW_SHARE:
            return Ruling(
                permits=KEEP,
                text=f"most of {value.name} vanishes in {low.label}",
                evidence={"share": lost / nonzero, "limit": low.smallest_subnormal},
            )
    return harmless


def _unseen_source(graph: Graph, value: Value, facts: Facts) -> Node | None:
    """An op of a body that no sample runs, whose result a branch or loop gives as a value."""
    sources = Worklist([origin(graph, value).id])
    for source in sources:
        maker = graph.maker(source)
        if maker is not None and source in facts and not facts[source].count:
            return maker
        if maker is not None and maker.op == PHI:
            sources.add(origin(graph, v).id for v in graph.following_inputs(maker))
    return None


OBSERVED = Rule(name="observed_range", judge=_judge)


# --------------------------------- overflows that change no result, as readers saturate before
#
# A value beyond the range of fp16 becomes Inf there, or the largest number. A tanh gives 1 for
# both as it does for the value itself. So the ops between may be in fp16, and nothing has to
# be clamped. Law: from the least magnitude that overflows on, every reader gives the number
# that it gives for the value; the least magnitude is followed through ops that keep the sign
# of an Inf.

# From these magnitudes on fp32 gives -1, 0 or 1. 1 - tanh(x) is about 2 exp(-2x), half of a
# unit in the last place at 9.01. 1 - erf(x) is below that from 3.92 on. A sigmoid of a
# negative number is half of the least number of fp32 at -103.97.
_SATURATES: Final[Mapping[str, float]] = {"tanh": 9.02, "erf": 3.93, "sigmoid": 104.0}
# Names that the op table joins with these functions and that are other ones.
_OTHERS: Final = ("ScaledTanh", "erfc", "erfinv", "Erfc", "Erfinv")
_KEEPS: Final = frozenset({"identity", "dropout", "neg", "relu"})
_ADDS: Final = frozenset({"add", "bias_add", "sub"})
_SCALES: Final = frozenset({"mul", "div"})
# Ops between a value and those that saturate; those of a GELU that is written out are four.
_MOST_OPS: Final = 32
# A constant of more elements is not read for this.
_MOST_READ: Final = 1 << 14


def absorbing(graph: Graph, facts: Facts, value: Value, low: Format) -> Node | None:
    """An op that absorbs overflows of ``value``; None if one of its readers does not.

    The op that makes the value is taken to add in fp32: of sums in fp16 an Inf less an Inf
    would be no number.
    """
    return _Search(graph=graph, facts=facts, low=low).of(value, low.max)


@dataclass(slots=True, kw_only=True)
class _Search:
    graph: Graph
    facts: Facts
    low: Format
    left: int = _MOST_OPS

    def of(self, value: Value, least: float) -> Node | None:
        """The last op that absorbs a value, of which what overflowed is at least ``least``."""
        absorber: Node | None = None
        readers = {node.id: node for node in self.graph.readers(value)}
        if value.is_output:
            return None
        for node in readers.values():
            self.left -= 1
            absorber = None if self.left < 0 else self._at(node, value, least)
            if absorber is None:
                return None
        return absorber

    def _at(self, node: Node, value: Value, least: float) -> Node | None:
        if node.region or node.inputs.count(value.id) != 1:
            return None
        limit = _limit(self.graph, node, value)
        if limit is not None:
            return node if least >= limit else None
        after = self._after(node, value, least)
        results = list(self.graph.following_outputs(node))
        if after is None or not results or not math.isfinite(after):
            return None
        absorbers = [self.of(result, after) for result in results if result.uses]
        ends = any(result.is_output for result in results)
        return None if ends or not absorbers or not all(absorbers) else absorbers[-1]

    def _after(self, node: Node, value: Value, least: float) -> float | None:
        """The least magnitude of the results of what overflowed; None if Infs get lost."""
        info = by_name(node.op)
        if node.op in _KEEPS or (info.kind in MOVES and info.exact):
            return least
        if node.op in _SCALES:
            return self._scaled(node, value, least)
        if node.op in _ADDS and "alpha" not in node.attributes:
            other = self._largest_beside(node, value)
            return None if other is None or other >= self.low.max else least - other
        return None

    def _scaled(self, node: Node, value: Value, least: float) -> float | None:
        """After a multiplication by numbers other than 0, or a division by such numbers."""
        if node.op == "div" and (
            node.inputs[0] != value.id or "rounding_mode" in node.attributes
        ):
            return None
        numbers = [abs(n) for n in scalars(node)]
        for index in node.inputs:
            other = None if index is None else self.graph.values[index]
            if other is None or other.id == value.id:
                continue
            if other.constant is None or other.constant.size > _MOST_READ:
                return None
            numbers += np.abs(other.constant.read().astype(np.float64)).reshape(-1).tolist()
        if not numbers or min(numbers) == 0:
            return None
        return least / max(numbers) if node.op == "div" else least * min(numbers)

    def _largest_beside(self, node: Node, value: Value) -> float | None:
        largest = max(map(abs, scalars(node)), default=0.0)
        for index in node.inputs:
            other = None if index is None else self.graph.values[index]
            if other is None or other.id == value.id:
                continue
            seen = self.facts.get(other.id)
            if other.constant is not None:
                largest = max(largest, other.constant.largest)
            elif seen is not None:
                largest = max(largest, seen.largest)
            else:
                return None
        return largest


def _limit(graph: Graph, node: Node, value: Value) -> float | None:
    """The magnitude from which on ``node`` gives the same; None if it does not saturate."""
    if node.native.endswith(_OTHERS):
        return None
    if node.op != "clip":
        return _SATURATES.get(node.op)
    if node.native.endswith("elu6"):
        return 6.0  # relu6 states no bounds
    numbers = [*scalars(node)] if SCALARS in node.attributes else []
    for index in node.inputs[1:]:
        constant = None if index is None else graph.values[index].constant
        if constant is not None and constant.size == 1:
            numbers.append(float(constant.read().reshape(-1)[0]))
    bounds = len(numbers) == 2 and node.inputs[0] == value.id
    return max(map(abs, numbers)) if bounds else None
