"""ONNX ops that OpenVINO reads without a word and computes wrongly.

A model with one of them is not given to OpenVINO: the next engine is tried. Old opsets' ops
are in ``opset``, products that OpenVINO confuses in ``frontends/openvino/confused.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import onnx_ir as ir

from finecast.devices.faults import is_here, known_faults

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miscomputed:
    """Ops of these kinds that are wrong where ``when`` holds."""

    fault: str
    ops: frozenset[str]
    when: Callable[[ir.Node], bool]


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


_RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})
_PEEPHOLES: Final = 7
"""The input of LSTM that is its peepholes."""

_MISCOMPUTED: Final[Sequence[_Miscomputed]] = (
    _Miscomputed(
        fault="openvino-attention-windows",
        ops=frozenset({"Attention"}),
        when=lambda node: any(
            _stated(node, f"{side}_window_size", -1) >= 0 for side in ("left", "right")
        ),
    ),
    _Miscomputed(
        fault="openvino-dft-onesided",
        ops=frozenset({"DFT"}),
        when=_has("onesided"),
    ),
    _Miscomputed(
        fault="openvino-recurrent-layout",
        ops=_RECURRENT,
        when=_has("layout"),
    ),
    _Miscomputed(
        fault="openvino-lstm-peepholes",
        ops=frozenset({"LSTM"}),
        when=lambda node: any(value is not None for value in node.inputs[_PEEPHOLES:]),
    ),
    _Miscomputed(
        fault="openvino-lstm-input-forget",
        ops=frozenset({"LSTM"}),
        when=_has("input_forget"),
    ),
    _Miscomputed(
        fault="openvino-resize-antialias",
        ops=frozenset({"Resize"}),
        when=_has("antialias"),
    ),
    _Miscomputed(
        fault="openvino-resize-exclude-outside",
        ops=frozenset({"Resize"}),
        when=_has("exclude_outside"),
    ),
    _Miscomputed(
        fault="openvino-resize-aspect-ratio",
        ops=frozenset({"Resize"}),
        when=lambda node: _stated(node, "keep_aspect_ratio_policy", "stretch") != "stretch",
    ),
    _Miscomputed(
        fault="openvino-max-pool-ceil", ops=frozenset({"MaxPool"}), when=_starts_in_padding
    ),
)


def miscomputed(graph: onnx.GraphProto | ir.Graph) -> str:
    """What OpenVINO computes wrongly in a model and its bodies; empty if nothing is known."""
    for op, fault in miscomputed_ops(graph):
        what = known_faults()[fault].fault
        return f"it computes {op} wrongly, a known fault ({fault}): {what}"
    return ""


def miscomputed_ops(graph: onnx.GraphProto | ir.Graph) -> Iterator[tuple[str, str]]:
    """The ops that OpenVINO computes wrongly, bodies included, each with the fault's name."""
    nodes = graph.all_nodes() if isinstance(graph, ir.Graph) else _nodes(graph)
    for node in (node for node in nodes if not node.domain):
        for row in _MISCOMPUTED:
            if node.op_type in row.ops and row.when(node) and is_here(row.fault):
                yield f"{node.op_type} {node.name!r}", row.fault


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
        for attribute in node.attribute:
            body = [attribute.g] if attribute.HasField("g") else ()
            for inner in (*body, *attribute.graphs):
                yield from _nodes(inner)
