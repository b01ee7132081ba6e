"""Bias correction: the mean error of a product on codes, taken off what is added to it.

Rounding the weights and operands of a product shifts the mean of its result, channel by
channel. What calibration data showed of that is taken off its bias. Source: M. Nagel et al.,
"Data-free quantization through weight equalization and bias correction" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, addable, constant_at
from finecast.planning.plan import Plan
from finecast.rules.reason import Reason

RULE: Final = "bias correction"

# The input at which products take a bias, and the axis of the channels in their results.
_OWN_BIAS: Final = 2
_CHANNELS: Final[Mapping[str, int]] = {"conv": 1, "gemm": -1, "linear": -1, "matmul": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The constant that is added to a product's result: ``node`` reads it at ``port``.

    ``channels`` are those of the result, along ``axis`` of it; its rank is 0 where it is not
    known, and the axis the last one.
    """

    product: int
    node: int
    port: int
    channels: int
    axis: int
    rank: int = 0


def biases(graph: Graph, formats: Mapping[int, Format]) -> tuple[Bias, ...]:
    """Those of the products on codes whose bias nothing else reads, outside of bodies."""
    coded = (n for n in graph.nodes if n.id in formats and formats[n.id].scaled)
    found = (_bias(graph, n) for n in coded if n.op in _CHANNELS and not n.region)
    return tuple(b for b in found if b is not None)


def _bias(graph: Graph, product: Node) -> Bias | None:
    """At the product itself, or at the addition that alone reads its result."""
    weights = constant_at(graph, product, 1)
    if weights is None or not weights.shape or product.attributes.get("beta", 1) != 1:
        return None
    by_row = product.op in ("conv", "linear") or product.attributes.get("transB", 0)
    channels = weights.shape[0 if by_row else -1]
    axis = _CHANNELS[product.op]
    for node, port in _additions(graph, product, axis):
        value = constant_at(graph, node, port)
        if value is not None and isinstance(channels, int) and addable(value, channels):
            return Bias(
                product=product.id,
                node=node.id,
                port=port,
                channels=channels,
                axis=axis,
                rank=0 if axis == -1 else len(weights.shape),
            )
    return None


def _additions(graph: Graph, product: Node, axis: int) -> list[tuple[Node, int]]:
    """The inputs at which something is added to the product's result, along its last axis."""
    found = [(product, _OWN_BIAS)]
    (result,) = graph.following_outputs(product)
    if len(result.uses) == 1 and not result.is_output and axis == -1:
        after = graph.nodes[result.uses[0]]
        if after.op == "add" and after.region == product.region:
            found += [(after, port) for port in range(2)]
    return found


def corrected(
    plan: Plan,
    graph: Graph,
    places: Sequence[Bias],
    errors: Sequence[NDArray[np.float64]],
) -> Plan:
    """``plan`` with the mean ``errors`` of the products taken off the biases of ``places``.

    Four digits of them are kept: they are known to fewer.
    """
    adjustments: list[Adjustment] = []
    reasons: dict[str, list[Reason]] = {}
    for place, error in zip(places, errors, strict=True):
        product, node = graph.nodes[place.product].name, graph.nodes[place.node].name
        add = tuple(float(f"{-e:.4g}") for e in error.tolist())
        adjustments.append(Adjustment(node=node, port=place.port, add=add))
        largest = float(np.abs(error).max(initial=0.0))
        text = f"the mean error of {product}, by channel, is taken off its bias"
        reason = Reason(rule=RULE, text=text, evidence={"largest mean error": largest})
        for name in {product, node}:
            reasons.setdefault(name, []).append(reason)
    return plan.adjusted(adjustments, reasons)
