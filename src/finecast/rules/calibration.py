"""Parameters of encodings from observed values; an op that lacks them keeps fp32."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final

import numpy as np

from finecast.graph import Graph, Node, Value
from finecast.naming import left_out
from finecast.numbers.encodings import Dynamic, Encodings, Scaled, Stored, stored_as
from finecast.numbers.formats import Format, Grid
from finecast.numbers.gptq import compensated
from finecast.rules.base import KEEP, Context, Rule, Ruling
from finecast.rules.facts import Facts, ValueFacts
from finecast.rules.ranges import Calibration, covered
from finecast.rules.scaled_operands import (
    coded_result,
    factors,
    origin,
    rounded_operands,
    scaled_operands,
    summed,
)


def calibrated(
    graph: Graph,
    node: Node,
    fmt: Format,
    facts: Facts,
    calibration: Calibration = Calibration.MINMAX,
    *,
    results: bool = False,
    signed: bool = False,
) -> Encodings:
    """The encodings of the operands of ``node`` in ``fmt``, a format with parameters.

    Laws: the encoding of a constant covers all of its numbers, or those that the calibration
    ``mse`` leaves in a group's range, and its codes are the nearest, or those of ``gptq``;
    that of a value covers the part of its observed range
    that ``calibration`` chooses. Operands that the model came with
    encodings for keep those. Values that are only moved from one another have the same
    encoding. With ``results`` the result is encoded as well, where ``coded_result`` has one.
    Without, kernels of products of two values take no zero points: what they read has signed
    codes, but for first operands without negative numbers. With ``signed`` all values have.

    Raises:
        ValueError: If the op cannot run in ``fmt``, or an operand was not observed or had NaN
            or Inf; names the operand.
    """
    group = fmt.dynamic_group or 0
    operands: dict[int, Scaled | Dynamic] = {
        index: Dynamic(format=fmt, group=group) for index in rounded_operands(graph, node, fmt)
    }
    constants: dict[int, Stored] = {}

    def encoded(value: Value) -> Scaled:
        return _encoded(graph, value, facts, fmt, calibration, results=results, signed=signed)

    for index, axes in scaled_operands(graph, node, fmt).items():
        source = node.inputs[index]
        assert source is not None
        value = graph.values[source]
        try:
            if value.constant is None:
                operands[index] = encoded(value)
            else:
                constants[index] = _stored(graph, node, index, axes, fmt, facts, calibration)
        except ValueError as error:
            raise ValueError(f"{value.name} has no {fmt.label} scale: {error}") from error
    result_value = coded_result(graph, node) if results else None
    if result_value is None:
        return Encodings(operands=operands, constants=constants, result=fmt.result)
    try:
        result = encoded(result_value)
    except ValueError as error:
        raise ValueError(f"{result_value.name} has no {fmt.label} scale: {error}") from error
    return Encodings(operands=operands, constants=constants, result=result)


def _stored(
    graph: Graph,
    node: Node,
    index: int,
    axes: tuple[int, ...],
    fmt: Format,
    facts: Facts,
    calibration: Calibration,
) -> Stored:
    """How the constant that ``node`` reads at ``index``, with channels ``axes``, is stored."""
    value = graph.read(node, index)
    assert value is not None
    assert value.constant is not None
    least = calibration is Calibration.MSE
    encoding = stored_as(fmt, value.constant.read(), axes, least_error=least)
    if not isinstance(encoding, Scaled):
        return encoding
    came = _came_as(value, fmt, fmt.grid(constant=True), calibration)
    if came is not None and (came.axis is None or (came.axis,) == axes):
        return came
    if calibration is Calibration.GPTQ:
        return _compensated(graph, node, index, encoding, facts)
    return encoding


def _compensated(graph: Graph, node: Node, index: int, found: Scaled, facts: Facts) -> Scaled:
    """``found`` with the codes of GPTQ, by the moments of what the weights meet.

    Unchanged without groups, and where no moments were observed, as of a table's rows.
    """
    count = summed(graph, node) if index == 1 and not node.attributes.get("transA") else None
    value, weights = (graph.read(node, i) for i in (0, index))
    seen = None if count is None or value is None else facts.get(value.id)
    if seen is None or seen.moments is None or weights is None or found.group is None:
        return found
    key, constant = (weights.name, found.group), weights.constant
    if key not in seen.moments.chosen:
        assert constant is not None
        numbers = constant.read().astype(np.float32, copy=False)
        gptq_encoding = compensated(found, numbers, *seen.moments.read())
        seen.moments.chosen[key] = gptq_encoding.shifts
    return replace(found, shifts=seen.moments.chosen[key])


def encodings_in(context: Context, node: Node) -> Encodings:
    """The encodings of ``node`` in the low format of ``context``, for its engine; cached.

    Raises:
        ValueError: As ``calibrated`` does.
    """
    known, fmt = context.encodings, context.low
    if node.id not in known:
        how, results = context.policy.calibration, fmt in context.coded_results
        known[node.id] = calibrated(
            context.graph,
            node,
            fmt,
            context.facts,
            how,
            results=results,
            signed=context.signed_codes,
        )
    return known[node.id]


def uncalibrated(graph: Graph, formats: Collection[Format], facts: Facts) -> list[str]:
    """A note on the values whose observed numbers do not allow a scale in ``formats``.

    None without observations, which are refused elsewhere.
    """
    scaled = [f for f in formats if f.has_scales]
    every = (
        text for f in scaled for n in graph.float_nodes for text in _lack(graph, n, f, facts)
    )
    lacks = list(dict.fromkeys(every))
    if not lacks:
        return []
    more = left_out(len(lacks), 1, " of the kind")
    return ["; ".join([f"{lacks[0]}: ops that read it keep fp32", *more])]


def _lack(graph: Graph, node: Node, fmt: Format, facts: Facts) -> Iterator[str]:
    """A text for each operand of ``node`` whose observations do not allow a scale."""
    with suppress(ValueError):  # the op cannot run in the format, whatever was observed
        sources = (node.inputs[i] for i in scaled_operands(graph, node, fmt))
        values = [graph.values[i] for i in sources if i is not None]
        for value in (v for v in values if v.constant is None):
            try:
                _encoded(graph, value, facts, fmt, Calibration.MINMAX)
            except ValueError as error:
                if _seen(graph, value, facts) is not None:
                    yield f"{value.name} has no {fmt.label} scale, {error}"


def calibrated_nodes(
    graph: Graph, fmt: Format, facts: Facts, *, signed: bool = False
) -> dict[int, Encodings]:
    """The encodings of every fp32 op that can run in ``fmt``, by node id.

    ``signed`` is as for ``calibrated``.
    """
    encodings: dict[int, Encodings] = {}
    for node in graph.float_nodes:
        if node.format is Format.FP32:
            with suppress(ValueError):
                encodings[node.id] = calibrated(graph, node, fmt, facts, signed=signed)
    return encodings


def _seen(graph: Graph, value: Value, facts: Facts) -> ValueFacts | None:
    """The facts of the value's origin, or else of the value itself."""
    return facts.get(origin(graph, value).id) or facts.get(value.id)


def _encoded(
    graph: Graph,
    value: Value,
    facts: Facts,
    fmt: Format,
    calibration: Calibration,
    *,
    results: bool = False,
    signed: bool = False,
) -> Scaled:
    """The encoding that the value's origin came with, else one that covers the facts.

    ``results`` and ``signed`` are as for ``calibrated``.
    """
    source, seen = origin(graph, value), _seen(graph, value, facts)
    first, second = (source.id in graph.once(factors, index) for index in (0, 1))
    negative = seen is not None and seen.lowest < 0
    signed = signed or (not results and (second or (first and negative)))
    grid = fmt.grid(constant=False, signed=signed)
    came = _came_as(source, fmt, grid, calibration)
    if came is not None:
        return came
    return Scaled.of_value(fmt, *_range(seen, fmt, calibration), signed=signed)


def _came_as(value: Value, fmt: Format, grid: Grid, calibration: Calibration) -> Scaled | None:
    """The encoding that the value came with, unless another calibration is asked for."""
    came = value.came_as
    if came is None or came.grid != grid or calibration is not Calibration.MINMAX:
        return None
    return replace(came, format=fmt)


def _range(
    seen: ValueFacts | None, fmt: Format, calibration: Calibration
) -> tuple[float, float]:
    """The range that the encoding of a value shall cover.

    Raises:
        ValueError: If what was seen of the value shows none.
    """
    if seen is None or not seen.count:
        raise ValueError("nothing was observed of it")
    if seen.nans or seen.infs:
        raise ValueError("NaN or Inf was observed")
    if seen.lowest == seen.highest and seen.count > 1:
        raise ValueError("the data has the same number everywhere, which shows no range")
    return covered(seen, fmt.grid(constant=False), calibration)


def _judge(node: Node, context: Context) -> Ruling | None:
    if not context.low.has_scales or node.format is not Format.FP32:
        return None
    try:
        encodings_in(context, node)
    except ValueError as error:
        return Ruling(permits=KEEP, text=str(error))
    return None


CALIBRATION: Final = Rule(name="calibration", judge=_judge, hard=True)
