"""ONNX ops that OpenVINO reads without a word and computes wrongly, in every type.

A model with one of them is not given to OpenVINO: the next engine is tried. What can be
restated so that the engine is right is not here, but in ``tied_weights`` and ``redefined``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import onnx_ir as ir

from finecast.devices.faults import is_here, known_faults

if TYPE_CHECKING:
    import onnx

_Integers: TypeAlias = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miscomputed:
    """Ops of ONNX's own domain that are wrong where ``when`` holds of their attributes."""

    fault: str
    op: str
    when: Callable[[_Integers], bool]


def _has_a_window(attributes: _Integers) -> bool:
    sides = ("left_window_size", "right_window_size")
    return any(attributes.get(side, -1) >= 0 for side in sides)


def _is_onesided(attributes: _Integers) -> bool:
    return bool(attributes.get("onesided", 0))


_MISCOMPUTED: Final[Sequence[_Miscomputed]] = (
    _Miscomputed(fault="openvino-attention-windows", op="Attention", when=_has_a_window),
    _Miscomputed(fault="openvino-dft-onesided", op="DFT", when=_is_onesided),
)


def miscomputed(graph: onnx.GraphProto | ir.Graph) -> str:
    """What OpenVINO computes wrongly in a model and its bodies; empty if nothing is known."""
    nodes = _of_file(graph) if isinstance(graph, ir.Graph) else _of_message(graph)
    for name, op, attributes in nodes:
        for row in _MISCOMPUTED:
            if row.op == op and row.when(attributes) and is_here(row.fault):
                what = known_faults()[row.fault].fault
                return (
                    f"it computes {op} {name!r} wrongly, a known fault ({row.fault}): {what}"
                )
    return ""


def _of_message(graph: onnx.GraphProto) -> Iterator[tuple[str, str, _Integers]]:
    for node in graph.node:
        if node.domain in ("", "ai.onnx"):
            integers = {a.name: a.i for a in node.attribute if a.type == a.INT}
            yield node.name or node.output[0], node.op_type, integers
        for attribute in node.attribute:
            for body in (
                *([attribute.g] if attribute.HasField("g") else ()),
                *attribute.graphs,
            ):
                yield from _of_message(body)


def _of_file(graph: ir.Graph) -> Iterator[tuple[str, str, _Integers]]:
    for node in graph.all_nodes():
        if not node.domain:
            kept = (a for a in node.attributes.values() if a.type == ir.AttributeType.INT)
            yield node.name or "", node.op_type, {a.name: a.as_int() for a in kept}
