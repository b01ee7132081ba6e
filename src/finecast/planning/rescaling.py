"""Rescaling: channels are divided by powers of two where made and multiplied where read.

The model computes the same, and each channel fills more of the range that all channels of a
value share in an encoding. Smoothing chooses the powers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.numbers.encodings import group_size
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, constant_at
from finecast.planning.plan import Decision, Plan
from finecast.planning.scalable import Channels, Reader, Site, sites, sites_in_front
from finecast.rules.base import Reason
from finecast.rules.calibration import calibrated
from finecast.rules.facts import ChannelFacts, Facts
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


# SmoothQuant: divides channels of large values, and multiplies the weights that read them.
#
# All channels of a value share one range of codes. If a few channels are large, the others
# get few codes. Weights have a range for each output channel, and can take larger numbers. A
# channel is divided by ``largest value ** alpha / largest weight ** (1 - alpha)``; among
# several alphas the one with the least expected error of the product is used. Source: G.
# Xiao et al., "SmoothQuant: accurate and efficient post-training quantization for large
# language models" (2022), arXiv:2211.10438.


SMOOTHING: Final = "smoothing"

_ALPHAS: Final = tuple(np.linspace(0.0, 1.0, 11))
# A site is adjusted only if at most this share of the expected squared error remains.
_WORTH: Final = 0.9

Floats = NDArray[np.float64]


def smoothable(graph: Graph, coded: Collection[int]) -> list[Site]:
    """Sites with a reader among the products ``coded``; each product is in one site at most.

    Channels are divided in the op that makes them. For matrix products whose operand has no
    such op, or has other readers, too, a multiplication in front of the product does it.
    """
    made = [s for s in sites(graph) if any(r.node in coded for r in s.readers)]
    done = {r.node for s in made for r in s.readers}
    front: list[Site] = []
    for site in sites_in_front(graph):
        readers = tuple(r for r in site.readers if r.node in coded and r.node not in done)
        if readers:
            front.append(replace(site, readers=readers))
    return made + front


def smoothed(
    graph: Graph, found: Sequence[Site], facts: Mapping[int, ChannelFacts], fmt: Format
) -> list[Rescaling]:
    """Rescalings of the sites ``found``; ``facts`` are of the read values, by value id."""
    made = (_smoothed(graph, site, facts, fmt) for site in found)
    return [one for one in made if one is not None]


def _smoothed(
    graph: Graph, site: Site, facts: Mapping[int, ChannelFacts], fmt: Format
) -> Rescaling | None:
    products = [
        _Product.of(graph, reader, facts[reader.value])
        for reader in site.readers
        if reader.value in facts
    ]
    if not products:
        return None
    values = np.max([p.seen.largest for p in products], axis=0)
    weights = np.max([p.largest.max(axis=1) for p in products], axis=0).astype(np.float64)
    names = ", ".join(graph.nodes[r.node].name for r in site.readers)
    text = f"the channels that {names} reads are scaled so that less is lost in {fmt.label}"
    why = Reason(rule=SMOOTHING, text=text)

    def error(exponents: Exponents) -> float:
        return sum(p.error(exponents, fmt) for p in products)

    before = error(np.zeros(site.channels, np.int32))
    best: Rescaling | None = None
    least = _WORTH * before
    for alpha in _ALPHAS:
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = values**alpha / weights ** (1 - alpha)
        factors[(values == 0) | (weights == 0)] = np.nan
        one = rescaling(graph, site, factors, why)
        found = error(one.exponents)
        if found < least:
            least = found
            left = float(f"{found / before:.3g}")
            evidence = {"alpha": round(float(alpha), 1), "share of squared error": left}
            best = replace(one, reason=replace(why, evidence=evidence))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A product on codes, for the estimate of its error.

    ``largest`` are the largest magnitudes of its weights, [channel, output channel], over the
    ``places`` of the kernel; ``squares`` the sums of their squares by channel; ``apart`` is as
    in ``Reader``.
    """

    largest: NDArray[np.float32]
    squares: Floats
    places: int
    apart: bool
    seen: ChannelFacts

    @classmethod
    def of(cls, graph: Graph, reader: Reader, seen: ChannelFacts) -> _Product:
        weights = weights_read(graph, reader)
        return cls(
            largest=np.abs(weights).max(axis=2),
            squares=np.einsum("crp,crp->c", weights, weights, dtype=np.float64),
            places=weights.shape[2],
            apart=reader.apart,
            seen=seen,
        )

    def error(self, exponents: Exponents, fmt: Format) -> float:
        """Expected squared error of the result, relative to its own square.

        Assumes that rounding errors are independent and uniform over a step, and that
        channels are uncorrelated.
        """
        factors = np.exp2(exponents.astype(np.float64))
        seen = self.seen
        largest = self.largest * factors.astype(np.float32)[:, None]
        size = group_size(fmt, len(largest)) or len(largest)
        if not self.apart:
            groups = largest.reshape(-1, size, largest.shape[1]).max(axis=1)
            largest = groups.repeat(size, axis=0)
        step = 0.0
        if fmt.runs_on_codes:
            codes = fmt.grid(constant=False)
            span = (seen.highest / factors).max() - (seen.lowest / factors).min()
            step = span / (codes.highest - codes.lowest)
        steps = largest.astype(np.float64) / fmt.grid(constant=True).highest
        power = (seen.power / factors**2)[:, None]
        of_values = step**2 * np.sum(self.squares * factors**2)
        of_weights = self.places * np.sum(steps**2 * power)
        own = np.sum(self.squares * seen.power)
        # The variance of an error that is uniform over a step is step**2 / 12.
        return float((of_values + of_weights) / 12 / own) if own else 0.0
