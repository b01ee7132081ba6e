"""Bias correction: the mean error of a product on integer codes is subtracted from its bias.

Rounding the weights and operands of a product shifts the mean of each channel of its result.
The shift observed on calibration data is subtracted from the bias. Source: M. Nagel et al.,
"Data-free quantization through weight equalization and bias correction" (2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Dim, Graph, Node
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment, addable, constant_at
from finecast.planning.plan import Plan
from finecast.planning.products import CONVOLUTIONS, LINEAR, channel_axis
from finecast.rules.base import Reason

RULE: Final = "bias correction"

_OWN_BIAS: Final = 2
"""The input at which products take a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The constant that is added to a product's result: ``node`` reads it at ``port``.

    The result has ``channels`` along its (negative) ``axis``, the constant has them along
    ``added_along``. ``rank`` is the result's; 0 where it is not known.
    """

    product: int
    node: int
    port: int
    channels: int
    axis: int
    rank: int = 0
    added_along: int = -1


def biases(graph: Graph, formats: Mapping[int, Format]) -> tuple[Bias, ...]:
    """The biases of products on codes that no other op reads, outside control-flow bodies."""
    coded = (n for n in graph.nodes if n.id in formats and formats[n.id].has_scales)
    found = (_bias(graph, n) for n in coded if n.op in LINEAR and not n.region)
    return tuple(b for b in found if b is not None)


def _bias(graph: Graph, product: Node) -> Bias | None:
    """The bias of the product itself, or of the addition that is its result's only reader."""
    weights = constant_at(graph, product, 1)
    if weights is None or not weights.shape or product.attributes.get("beta", 1) != 1:
        return None
    convolves = product.op in CONVOLUTIONS
    axis = channel_axis(product, weights.shape) if convolves else -1
    channels = _result_channels(product, weights.shape)
    for node, port, along in _additions(graph, product, axis):
        value = constant_at(graph, node, port)
        if value is not None and channels is not None and addable(value, channels, along):
            return Bias(
                product=product.id,
                node=node.id,
                port=port,
                channels=channels,
                axis=axis,
                rank=1 - axis if convolves else 0,
                added_along=along,
            )
    return None


def _result_channels(product: Node, weights: Sequence[Dim]) -> int | None:
    """Number of channels of the result; None if that dimension of the weights is symbolic."""
    by_row = product.op in (*CONVOLUTIONS, "linear") or product.attributes.get("transB", 0)
    sizes = weights[:2] if product.op == "group_conv" else weights[:1]
    known = [d for d in (sizes if by_row else weights[-1:]) if isinstance(d, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def _additions(graph: Graph, product: Node, axis: int) -> list[tuple[Node, int, int]]:
    """Node and input at which a constant may be added to the result, and its channel axis."""
    found = [(product, _OWN_BIAS, -1)]
    (result,) = graph.following_outputs(product)
    if len(result.uses) == 1 and not result.is_output:
        after = graph.nodes[result.uses[0]]
        if after.op == "add" and after.region == product.region:
            found += [(after, port, axis) for port in range(2)]
    return found


def corrected(
    plan: Plan,
    graph: Graph,
    places: Sequence[Bias],
    errors: Sequence[NDArray[np.float64]],
) -> Plan:
    """``plan`` with the products' mean ``errors`` subtracted from the biases at ``places``.

    They are rounded to four significant digits: the measurement is less accurate than that.
    """
    adjustments: list[Adjustment] = []
    reasons: dict[str, list[Reason]] = {}
    for place, error in zip(places, errors, strict=True):
        product, node = graph.nodes[place.product].name, graph.nodes[place.node].name
        add = tuple(float(f"{-e:.4g}") for e in error.tolist())
        adjustments.append(
            Adjustment(node=node, port=place.port, axis=place.added_along, add=add)
        )
        largest = float(np.abs(error).max(initial=0.0))
        text = f"the mean error of {product}, by channel, is taken off its bias"
        reason = Reason(rule=RULE, text=text, evidence={"largest mean error": largest})
        for name in {product, node}:
            reasons.setdefault(name, []).append(reason)
    return plan.adjusted(adjustments, reasons)
