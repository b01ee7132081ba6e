"""SmoothQuant: divides channels of large values, and multiplies the weights that read them.

All channels of a value share one range of codes. If a few channels are large, the others get
few codes. Weights have a range for each output channel, and can take larger numbers. A channel
is divided by ``largest value ** alpha / largest weight ** (1 - alpha)``; among several alphas
the one with the least expected error of the product is used.
Source: G. Xiao et al., "SmoothQuant: accurate and efficient post-training quantization for
large language models" (2022), arXiv:2211.10438.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.rescaling import Exponents, Rescaling, rescaling, weights_read
from finecast.planning.scalable import Reader, Site, sites, sites_in_front
from finecast.rules.base import Reason
from finecast.rules.facts import ChannelFacts

RULE: Final = "smoothing"

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
    why = Reason(rule=RULE, text=text)

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
        seen, codes = self.seen, fmt.grid(constant=False)
        largest = self.largest * factors.astype(np.float32)[:, None]
        if not self.apart:
            largest = largest.max(axis=0, keepdims=True)
        span = (seen.highest / factors).max() - (seen.lowest / factors).min()
        step = span / (codes.highest - codes.lowest)
        steps = largest.astype(np.float64) / fmt.grid(constant=True).highest
        power = (seen.power / factors**2)[:, None]
        of_values = step**2 * np.sum(self.squares * factors**2)
        of_weights = self.places * np.sum(steps**2 * power)
        own = np.sum(self.squares * seen.power)
        # The variance of an error that is uniform over a step is step**2 / 12.
        return float((of_values + of_weights) / 12 / own) if own else 0.0
