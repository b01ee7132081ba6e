"""Values that If, Loop and Scan force to share one type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import onnx_ir as ir

CONTROL: Final = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A place that reads a value: an input of an ONNX node, or an output of a body."""

    owner: ir.Node | ir.Graph
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Values of one type by control flow: what ``inputs`` read comes out as ``outputs``."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[ir.Value, ...]


def merges_of(node: ir.Node, inner: list[ir.Graph], opset: int) -> Iterator[Merge]:
    """Values that ``node`` forces to share one type, by ONNX's definition of the op.

    Args:
        node: An If, Loop or Scan.
        inner: Its bodies.
        opset: The model's opset.
    """
    if node.op_type == "If":
        for i, out in enumerate(node.outputs):
            ends = tuple(Port(owner=b, index=i) for b in inner)
            yield Merge(name=f"out{i}", inputs=ends, outputs=(out,))
    elif node.op_type == "Loop":
        body, state = inner[0], len(node.inputs) - 2
        yield from _carried(node, body, range(state), input_offset=2, body_in=2, body_out=1)
        for i in range(state, len(node.outputs)):
            end = Port(owner=body, index=i + 1)
            yield Merge(name=f"scan{i}", inputs=(end,), outputs=(node.outputs[i],))
    else:
        body, first = inner[0], int(opset < _SCAN_WITHOUT_LENGTHS)
        scanned = int(node.attributes["num_scan_inputs"].as_int())
        state = len(node.inputs) - first - scanned
        yield from _carried(
            node, body, range(state), input_offset=first, body_in=0, body_out=0
        )
        for i in range(state, state + scanned):
            start = Port(owner=node, index=i + first)
            yield Merge(name=f"in{i}", inputs=(start,), outputs=(body.inputs[i],))
        for i in range(state, len(node.outputs)):
            end = Port(owner=body, index=i)
            yield Merge(name=f"scan{i}", inputs=(end,), outputs=(node.outputs[i],))


# Scan-8's first input was the lengths of the sequences.
_SCAN_WITHOUT_LENGTHS: Final = 9


def _carried(
    node: ir.Node,
    body: ir.Graph,
    indices: range,
    *,
    input_offset: int,
    body_in: int,
    body_out: int,
) -> Iterator[Merge]:
    for i in indices:
        start = Port(owner=node, index=i + input_offset)
        end = Port(owner=body, index=i + body_out)
        given = (start,) if node.inputs[start.index] is not None else ()
        yield Merge(
            name=f"state{i}",
            inputs=(*given, end),
            outputs=(body.inputs[i + body_in], node.outputs[i]),
        )


def port_value(port: Port) -> ir.Value:
    """The value that is read there."""
    if isinstance(port.owner, ir.Node):
        value = port.owner.inputs[port.index]
        assert value is not None
        return value
    return port.owner.outputs[port.index]
