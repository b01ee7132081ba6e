"""ONNX ops that OpenVINO reads without a word and computes wrongly.

A model with one of them is not given to OpenVINO: the next engine is tried. Old opsets' ops
are in ``opset``, products that OpenVINO confuses in ``frontends/openvino/confused.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import onnx_ir as ir

from finecast.devices.faults import is_here, known_faults

if TYPE_CHECKING:
    import onnx


_Kept: TypeAlias = "int | str | tuple[int, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """A node of ONNX's own domain: its attributes of some kinds, and which inputs it has."""

    name: str
    kind: str
    attributes: Mapping[str, _Kept]
    inputs: Sequence[bool]

    def integer(self, name: str, default: int = 0) -> int:
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def integers(self, name: str, default: int) -> Sequence[int]:
        """A list of integers; numbers that are not stated are ``default``."""
        value = self.attributes.get(name, ())
        return value if isinstance(value, tuple) and value else (default,) * _MOST_AXES


_MOST_AXES: Final = 3
"""The most axes that engines pool over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miscomputed:
    """Ops of these kinds that are wrong where ``when`` holds."""

    fault: str
    ops: frozenset[str]
    when: Callable[[_Op], bool]


def _starts_in_padding(op: _Op) -> bool:
    """Whether the last window of a pooling may begin behind the input, and so not count.

    That is where ceil((n + p + q - k) / s) * s, where the last one begins, can reach n + p.
    """
    if not op.integer("ceil_mode"):
        return False
    kernel, strides = op.integers("kernel_shape", 0), op.integers("strides", 1)
    ends = op.integers("pads", 0)[-len(kernel) :]
    return any(k <= s + end - 1 for k, s, end in zip(kernel, strides, ends, strict=False))


_RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})
_PEEPHOLES: Final = 7
"""The input of LSTM that is its peepholes."""

_MISCOMPUTED: Final[Sequence[_Miscomputed]] = (
    _Miscomputed(
        fault="openvino-attention-windows",
        ops=frozenset({"Attention"}),
        when=lambda op: (
            op.integer("left_window_size", -1) >= 0 or op.integer("right_window_size", -1) >= 0
        ),
    ),
    _Miscomputed(
        fault="openvino-dft-onesided",
        ops=frozenset({"DFT"}),
        when=lambda op: op.integer("onesided") == 1,
    ),
    _Miscomputed(
        fault="openvino-recurrent-layout",
        ops=_RECURRENT,
        when=lambda op: op.integer("layout") == 1,
    ),
    _Miscomputed(
        fault="openvino-lstm-peepholes",
        ops=frozenset({"LSTM"}),
        when=lambda op: any(op.inputs[_PEEPHOLES:]),
    ),
    _Miscomputed(
        fault="openvino-lstm-input-forget",
        ops=frozenset({"LSTM"}),
        when=lambda op: op.integer("input_forget") == 1,
    ),
    _Miscomputed(
        fault="openvino-resize-antialias",
        ops=frozenset({"Resize"}),
        when=lambda op: op.integer("antialias") == 1,
    ),
    _Miscomputed(
        fault="openvino-resize-exclude-outside",
        ops=frozenset({"Resize"}),
        when=lambda op: op.integer("exclude_outside") == 1,
    ),
    _Miscomputed(
        fault="openvino-resize-aspect-ratio",
        ops=frozenset({"Resize"}),
        when=lambda op: op.attributes.get("keep_aspect_ratio_policy", "stretch") != "stretch",
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
    for op in _of_file(graph) if isinstance(graph, ir.Graph) else _of_message(graph):
        for row in _MISCOMPUTED:
            if op.kind in row.ops and row.when(op) and is_here(row.fault):
                yield f"{op.kind} {op.name!r}", row.fault


_ASKED: Final = frozenset().union(*(row.ops for row in _MISCOMPUTED))


def _of_message(graph: onnx.GraphProto) -> Iterator[_Op]:
    for node in graph.node:
        if node.op_type in _ASKED and node.domain in ("", "ai.onnx"):
            stated: dict[str, _Kept] = {}
            for found in node.attribute:
                if found.type == found.INT:
                    stated[found.name] = found.i
                elif found.type == found.INTS:
                    stated[found.name] = tuple(found.ints)
                elif found.type == found.STRING:
                    stated[found.name] = found.s.decode(errors="replace")
            yield _Op(
                name=node.name or (node.output[0] if node.output else ""),
                kind=node.op_type,
                attributes=stated,
                inputs=[bool(value) for value in node.input],
            )
        for attribute in node.attribute:
            for body in (
                *([attribute.g] if attribute.HasField("g") else ()),
                *attribute.graphs,
            ):
                yield from _of_message(body)


def _of_file(graph: ir.Graph) -> Iterator[_Op]:
    kinds = (ir.AttributeType.INT, ir.AttributeType.INTS, ir.AttributeType.STRING)
    for node in graph.all_nodes():
        if node.op_type in _ASKED and not node.domain:
            kept = (a for a in node.attributes.values() if a.type in kinds)
            stated = {
                a.name: tuple(v) if isinstance(v := a.value, list | tuple) else v for a in kept
            }
            inputs = [value is not None for value in node.inputs]
            yield _Op(
                name=node.name or "", kind=node.op_type, attributes=stated, inputs=inputs
            )
