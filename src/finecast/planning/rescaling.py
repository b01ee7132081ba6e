"""Rescaling: channels are divided by powers of two where made and multiplied where read.

The model computes the same, and each channel fills more of the range that all channels of a
value share in an encoding. ``equalising`` and ``smoothing`` choose the powers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, constant_at
from finecast.planning.plan import Decision, Plan
from finecast.planning.scalable import Channels, Reader, Site
from finecast.rules.base import Reason
from finecast.rules.calibration import calibrated
from finecast.rules.facts import Facts
from finecast.rules.ranges import Calibration

Exponents = NDArray[np.int32]

# The largest exponent. A channel with less than 2**-16 of the others' range hardly gets codes
# before and contributes no relevant error after; more would gain nothing.
_LARGEST_EXPONENT: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaling:
    """The channels of ``site`` are divided by 2 to the power of ``exponents``."""

    site: Site
    exponents: Exponents
    reason: Reason

    def adjustments(self, graph: Graph, coded: Collection[int]) -> list[Adjustment]:
        """The adjustments of operands that it takes.

        A site without a maker takes a multiplication in front of each reader. It is inserted
        only in front of ``coded``, the ids of the products on codes: others gain nothing.
        """
        down, site, nodes = -self.exponents, self.site, graph.nodes
        found = [_adjusted(graph, channels, down) for channels in site.divided]
        readers = [r for r in site.readers if site.maker is not None or r.node in coded]
        if site.maker is None:
            found += [
                Adjustment(
                    node=nodes[r.node].name, port=0, axis=r.axis, exponents=_numbers(down)
                )
                for r in readers
            ]
        return [*found, *(_adjusted(graph, r.weights, self.exponents) for r in readers)]

    def nodes(self, coded: Collection[int]) -> set[int]:
        """Ids of the ops with adjusted operands."""
        made = {channels.node for channels in self.site.divided}
        readers = {r.node for r in self.site.readers}
        return made | (readers if self.site.maker is not None else readers & set(coded))


def rescaling(
    graph: Graph, site: Site, factors: NDArray[np.float64], why: Reason
) -> Rescaling:
    """Division by the powers of two nearest to ``factors``, scaled to a median of 1.

    Not rescaled are channels whose factor is 0, infinite or NaN, and channels with a number
    that would leave fp32's range.
    """
    known = np.isfinite(factors) & (factors > 0)
    logs = np.log2(factors, where=known, out=np.zeros_like(factors))
    middle = np.median(logs[known]) if known.any() else 0.0
    clipped = np.clip(np.rint(logs - middle), -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    exponents = clipped.astype(np.int32)
    exponents[~(known & _exact(graph, site, exponents))] = 0
    return Rescaling(site=site, exponents=exponents, reason=why)


def _exact(graph: Graph, site: Site, exponents: Exponents) -> NDArray[np.bool_]:
    """Which channels of all constants can be scaled and restored bit for bit."""
    fine = np.ones(len(exponents), bool)
    for channels, sign in (
        *((c, -1) for c in site.divided),
        *((r.weights, 1) for r in site.readers),
    ):
        numbers = by_channel(graph, channels)
        powers = sign * np.repeat(exponents, channels.times).reshape(-1, 1)
        with np.errstate(over="ignore"):
            back = np.ldexp(np.ldexp(numbers, powers), -powers)
        same = (back == numbers).all(axis=1) | (powers[:, 0] == 0)
        fine &= same.reshape(-1, channels.times).all(axis=1)
    return fine


def by_channel(graph: Graph, channels: Channels) -> NDArray[np.float32]:
    """The constant as [channel, number of the channel]."""
    array = _array(graph, channels)
    return array.reshape(len(array), -1)


def weights_read(graph: Graph, reader: Reader) -> NDArray[np.float32]:
    """The weights as [channel read, output channel, place in the kernel].

    For a depthwise convolution the second axis has the output channels of that channel only.
    """
    array = _array(graph, reader.weights)
    places = int(np.prod(array.shape[2:]))
    return array.reshape(len(array) // reader.weights.times, -1, places)


def _array(graph: Graph, channels: Channels) -> NDArray[np.float32]:
    """The constant with its channels along the first axis."""
    value = constant_at(graph, graph.nodes[channels.node], channels.port)
    assert value is not None
    assert value.constant is not None
    return np.moveaxis(value.constant.read().astype(np.float32, copy=False), channels.axis, 0)


def _adjusted(graph: Graph, channels: Channels, exponents: Exponents) -> Adjustment:
    return Adjustment(
        node=graph.nodes[channels.node].name,
        port=channels.port,
        axis=channels.axis,
        exponents=_numbers(np.repeat(exponents, channels.times)),
    )


def _numbers(exponents: Exponents) -> tuple[int, ...]:
    return tuple(exponents.tolist())


def reasons(
    graph: Graph, rescalings: Iterable[Rescaling], coded: Collection[int]
) -> dict[str, list[Reason]]:
    """The reasons of the rescalings by name of each adjusted op."""
    found: dict[str, list[Reason]] = {}
    for one in rescalings:
        for node in one.nodes(coded):
            found.setdefault(graph.nodes[node].name, []).append(one.reason)
    return found


def re_encoded(
    plan: Plan,
    graph: Graph,
    facts: Facts,
    calibration: Calibration,
    results: Collection[Format] = (),
) -> Plan:
    """``plan`` with encodings chosen anew for a rescaled ``graph``, by its ``facts``.

    For formats in ``results`` the result of an op is encoded as well.

    Raises:
        ValueError: If an operand has no encoding in the rescaled graph.
    """
    nodes = {n.name: n for n in graph.nodes}

    def again(decision: Decision) -> Decision:
        fmt, node = decision.format, nodes[decision.node]
        if not fmt.has_scales:
            return decision
        found = calibrated(graph, node, fmt, facts, calibration, results=fmt in results)
        return replace(decision, encodings=found)

    return replace(plan, decisions=tuple(again(d) for d in plan.decisions))
