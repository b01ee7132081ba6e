"""Parameters of encodings, from what was observed: an op without them keeps fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finecast.graph import Graph, Node
from finecast.numbers.encodings import SCALED, Encodings
from finecast.numbers.formats import Format
from finecast.numbers.scaled import Scaled
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.facts import Facts, ValueFacts

# Channels of results along the axes of an op's weights, its second input: each has a scale.
_CHANNELS: Final[Mapping[str, int]] = {"conv": 0, "matmul": -1}


def calibrated(graph: Graph, node: Node, fmt: Format, facts: Facts) -> Encodings:
    """The encodings of what ``node`` reads in ``fmt``, which has parameters.

    Law: they cover what was observed of values, and all of constants.

    Raises:
        ValueError: If nothing, or NaN or Inf, was observed of a value; names it.
    """
    operands: dict[int, Scaled] = {}
    constants: dict[int, Scaled] = {}
    for index, (source, follows) in enumerate(zip(node.inputs, node.follows_in, strict=True)):
        if source is None or not follows:
            continue
        value = graph.values[source]
        try:
            if value.constant is None:
                operands[index] = _of_value(facts.get(source), fmt)
            else:
                axis = _CHANNELS.get(node.op) if index == 1 else None
                constants[index] = _of_constant(value.constant.read(), fmt, axis)
        except ValueError as error:
            raise ValueError(f"{value.name} has no {fmt.label} scale: {error}") from error
    return Encodings(operands=operands, constants=constants)


def _of_value(seen: ValueFacts | None, fmt: Format) -> Scaled:
    if seen is None or not seen.count:
        raise ValueError("nothing was observed of it")
    if seen.nans or seen.infs:
        raise ValueError("NaN or Inf was observed")
    ends = np.asarray(seen.lowest), np.asarray(seen.highest)
    return Scaled.fitted(fmt, SCALED[fmt].values, *ends)


def _of_constant(array: NDArray[np.generic], fmt: Format, axis: int | None) -> Scaled:
    array = array.astype(np.float32, copy=False)
    if not array.size:
        raise ValueError("it is empty")
    own = axis % array.ndim if axis is not None and array.ndim > 1 else None
    others = tuple(i for i in range(array.ndim) if i != own)
    ends = array.min(axis=others), array.max(axis=others)
    return Scaled.fitted(fmt, SCALED[fmt].constants, *ends, axis=own)


def _judge(node: Node, context: Context) -> Ruling | None:
    if context.low not in SCALED or node.format is not Format.FP32:
        return None
    try:
        calibrated(context.graph, node, context.low, context.facts)
    except ValueError as error:
        return Ruling(permits=KEEP, text=str(error))
    return None


CALIBRATION: Final = Rule(name="calibration", judge=_judge, hard=True)
