"""ONNX ops that OpenVINO reads without a word and computes wrongly.

A model with one of them is not given to OpenVINO: the next engine is tried. What shows in
OpenVINO's own ops once it has read a model is in ``frontends/openvino/refused.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import onnx_ir as ir

from finecast.devices.faults import is_here, known_faults
from finecast.frontends.onnx.definitions import (
    FLATTENING_AXIS,
    SOFTMAX_FLATTENS_BELOW,
    opset_of,
)
from finecast.frontends.onnx.types import bodies_in, ranks_of

if TYPE_CHECKING:
    import onnx

_EVERY: Final = range(1, 1 << 16)
"""All opsets."""
FLATTENING: Final = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
"""Ops that read a matrix before opset 13, whose columns are the axes from ``axis`` on."""


class _Miscomputed(NamedTuple):
    """Ops of these kinds that are wrong where ``when`` holds, at the opsets ``at``."""

    fault: str
    ops: AbstractSet[str]
    when: Callable[[ir.Node], bool]
    at: range = _EVERY


def _stated(node: ir.Node, name: str, default: Any) -> Any:
    """An attribute of the type of ``default``; a malformed node may have it in another one."""
    attribute = node.attributes.get(name)
    value = default if attribute is None else attribute.value
    value = tuple(value) if isinstance(value, list) else value
    return value if isinstance(value, type(default)) else default


def _has(flag: str) -> Callable[[ir.Node], bool]:
    return lambda node: _stated(node, flag, 0) == 1


def _starts_in_padding(node: ir.Node) -> bool:
    """Whether the last window of a pooling may begin behind the input, and so not count.

    That is where ceil((n + p + q - k) / s) * s, where the last one begins, can reach n + p.
    """
    kernel = _stated(node, "kernel_shape", ())
    strides = _stated(node, "strides", ()) or (1,) * len(kernel)
    ends = (_stated(node, "pads", ()) or (0,) * len(kernel))[-len(kernel) :]
    behind = (k <= s + end - 1 for k, s, end in zip(kernel, strides, ends, strict=False))
    return _has("ceil_mode")(node) and any(behind)


_PEEPHOLES: Final = 7
"""The input of LSTM that is its peepholes."""

_MISCOMPUTED: Final[Sequence[_Miscomputed]] = (
    _Miscomputed(
        "openvino-attention-windows",
        {"Attention"},
        lambda node: any(
            _stated(node, f"{side}_window_size", -1) >= 0 for side in ("left", "right")
        ),
    ),
    _Miscomputed("openvino-dft-onesided", {"DFT"}, _has("onesided")),
    _Miscomputed("openvino-recurrent-layout", {"LSTM", "GRU", "RNN"}, _has("layout")),
    _Miscomputed(
        "openvino-lstm-peepholes",
        {"LSTM"},
        lambda node: any(value is not None for value in node.inputs[_PEEPHOLES:]),
    ),
    _Miscomputed("openvino-lstm-input-forget", {"LSTM"}, _has("input_forget")),
    _Miscomputed("openvino-resize-antialias", {"Resize"}, _has("antialias")),
    _Miscomputed("openvino-resize-exclude-outside", {"Resize"}, _has("exclude_outside")),
    _Miscomputed(
        "openvino-resize-aspect-ratio",
        {"Resize"},
        lambda node: _stated(node, "keep_aspect_ratio_policy", "stretch") != "stretch",
    ),
    _Miscomputed("openvino-max-pool-ceil", {"MaxPool"}, _starts_in_padding),
    _Miscomputed(
        "openvino-reduce-axes",
        {"ReduceL1", "ReduceLogSum", "ReduceLogSumExp"},
        lambda node: "axes" in node.attributes,
        range(13, 18),
    ),
    _Miscomputed(
        "openvino-softmax-11",
        FLATTENING,
        lambda node: _stated(node, "axis", FLATTENING_AXIS) != -1,
        range(11, SOFTMAX_FLATTENS_BELOW),
    ),
)


def miscomputed(model: onnx.ModelProto | ir.Model, whole: Callable[[], ir.Model]) -> str:
    """What OpenVINO computes wrongly in a model and its bodies; empty if nothing is known.

    Args:
        model: The model; its weights may be left out.
        whole: Gives the model with its weights, from which ranks are told. It is asked only
            where they decide.
    """
    for op, fault in miscomputed_ops(model, whole):
        what = known_faults()[fault].fault
        return f"it computes {op} wrongly, a known fault ({fault}): {what}"
    return ""


def miscomputed_ops(
    model: onnx.ModelProto | ir.Model, whole: Callable[[], ir.Model]
) -> Iterator[tuple[str, str]]:
    """The ops that OpenVINO computes wrongly, bodies included, each with the fault's name."""
    if isinstance(model, ir.Model):
        nodes, opset = model.graph.all_nodes(), opset_of(model)
    else:
        stated = (o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        nodes, opset = _nodes(model.graph), next(stated, 1)
    for node, row in _wrong(nodes, opset):
        if node.op_type in FLATTENING:
            same = {_source(n) for n in over_last_axis(whole(), opset)}
            if _source(node) in same:
                continue
        yield f"{node.op_type} {node.name!r}", row.fault


def read_from(model: ir.Model, version: int) -> int:
    """The first opset from ``version`` on at which engines read every op right."""
    for row in _MISCOMPUTED:
        if row.at is _EVERY or version not in row.at or not is_here(row.fault):
            continue
        nodes = (n for n in model.graph.all_nodes() if not n.domain)
        if any(n.op_type in row.ops and row.when(n) for n in nodes):
            version = row.at.stop
    return version


def over_last_axis(model: ir.Model, opset: int) -> list[ir.Node]:
    """Softmax and its like, before opset 13, over the last axis: by both definitions."""
    if opset >= SOFTMAX_FLATTENS_BELOW:
        return []
    nodes = (n for n in model.graph.all_nodes() if not n.domain)
    axes = {
        n: n.attributes.get_int("axis", FLATTENING_AXIS)
        for n in nodes
        if n.op_type in FLATTENING
    }
    ranks = ranks_of(model) if any(axis != -1 for axis in axes.values()) else {}
    return [n for n, axis in axes.items() if axis == -1 or axis + 1 == ranks.get(_source(n))]


def _source(node: ir.Node) -> str:
    return (node.inputs[0].name or "") if node.inputs and node.inputs[0] else ""


def _wrong(nodes: Iterable[ir.Node], opset: int) -> Iterator[tuple[ir.Node, _Miscomputed]]:
    """Nodes that a row of the table is of, at this opset, in the engine that is here."""
    for node in (node for node in nodes if not node.domain):
        for row in _MISCOMPUTED:
            stated = opset in row.at and node.op_type in row.ops and row.when(node)
            if stated and is_here(row.fault):
                yield node, row


_ASKED: Final = frozenset().union(*(row.ops for row in _MISCOMPUTED))
_KINDS: Final = (ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.STRING)


def _nodes(graph: onnx.GraphProto) -> Iterator[ir.Node]:
    """The nodes of these kinds in a message and its bodies, without other attributes."""
    for node in graph.node:
        if node.op_type in _ASKED and node.domain in ("", "ai.onnx"):
            kept = (a for a in node.attribute if a.type in _KINDS)
            attributes = [ir.serde.deserialize_attribute(a) for a in kept]
            inputs = [ir.Value(name=name) if name else None for name in node.input]
            name = node.name or "".join(node.output[:1])
            yield ir.Node("", node.op_type, inputs, attributes, name=name)
        for body in bodies_in(node):
            yield from _nodes(body)
