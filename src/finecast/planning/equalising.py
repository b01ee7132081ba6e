"""Cross-layer equalisation: scales channels so that both layers' weights have equal ranges.

A channel whose weights are small in the layer that produces it mostly has small values, and
loses most digits where all channels share one range. Only weights are used, no data. Source:
M. Nagel et al., "Data-free quantization through weight equalization and bias correction"
(2019), arXiv:1906.04721.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph
from finecast.planning.rescaling import Rescaling, by_channel, rescaling, weights_read
from finecast.planning.scalable import LINEAR, Site, sites
from finecast.rules.base import Reason

RULE: Final = "equalisation"

_MOST_PASSES: Final = 30
# Binary digits. Factors are rounded to powers of two, so smaller changes do not matter.
_SETTLED: Final = 0.01

Floats = NDArray[Any]


def equalised(graph: Graph) -> list[Rescaling]:
    """Rescalings of the channels between linear ops.

    A product between two sites shares its weights with both, so the passes over all sites are
    repeated until the factors settle.
    """
    pairs = [
        s for s in sites(graph) if s.maker is not None and graph.nodes[s.maker].op in LINEAR
    ]
    sizes = _Sizes(graph, pairs)
    factors = [np.ones(s.channels, np.float32) for s in pairs]
    for _ in range(_MOST_PASSES):
        changed = 0.0
        for number, site in enumerate(pairs):
            step = sizes.step(site)
            factors[number] = factors[number] * step
            changed = max(changed, float(np.abs(np.log2(step)).max()))
        if changed < _SETTLED:
            break
    return [
        rescaling(graph, site, by.astype(np.float64), _why(graph, site))
        for site, by in zip(pairs, factors, strict=True)
    ]


def _why(graph: Graph, site: Site) -> Reason:
    readers = ", ".join(graph.nodes[r.node].name for r in site.readers)
    maker = graph.nodes[site.divided[0].node].name
    text = f"channels between {maker} and {readers} are scaled to weights of one size"
    return Reason(rule=RULE, text=text)


class _Sizes:
    """For each product the largest magnitudes of its weights, [input channel, output channel].

    A product that reads no site's channels has one row, the maximum over its inputs.
    """

    def __init__(self, graph: Graph, pairs: Sequence[Site]) -> None:
        self.of: dict[int, Floats] = {}
        for site in pairs:
            first = site.divided[0]
            self.of.setdefault(first.node, np.abs(by_channel(graph, first)).max(axis=1)[None])
        readers = [r for s in pairs for r in s.readers]
        for reader in readers:
            self.of[reader.node] = np.abs(weights_read(graph, reader)).max(axis=2)
        self.apart = {r.node for r in readers if r.apart}

    def step(self, site: Site) -> Floats:
        """Scale the channels so that both layers' sizes are equal; return the divisors."""
        maker = site.divided[0].node
        own = self.of[maker]
        made = own.reshape(-1) if maker in self.apart else own.max(axis=0)
        read = np.max([self.of[r.node].max(axis=1) for r in site.readers], axis=0)
        known = (made > 0) & (read > 0)
        step = np.sqrt(np.divide(made, read, where=known, out=np.ones_like(made)))
        self.of[maker] = own / (step.reshape(own.shape) if maker in self.apart else step)
        for reader in site.readers:
            self.of[reader.node] = self.of[reader.node] * step[:, None]
        return step
