"""Checks models whose inputs or outputs have no declared shape, which onnx's checker refuses.

ONNX asks for a shape. Engines run such models without, and none can be made up, as not even
the number of dimensions is known. So a copy without these ports is checked.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import onnx
import onnx_ir as ir

_DOMAIN: Final = "finecast.ports"
"""The domain of ops that the checker does not know: it checks nothing of their results."""


def shapeless_ports(model: ir.Model) -> frozenset[str]:
    """Names of inputs and outputs that are declared without a shape."""
    ports = (*model.graph.inputs, *model.graph.outputs)
    return frozenset(v.name for v in ports if v.name and v.shape is None)


@contextmanager
def checkable(path: Path, ports: Collection[str]) -> Generator[Path]:
    """The model at ``path``, or a copy beside it in which no port lacks a shape.

    In the copy, those of ``ports`` that lack a shape are no ports any more: inputs are results
    of ops in ``_DOMAIN``, and outputs are left out. It is deleted afterwards.
    """
    proto = onnx.load(path, load_external_data=False) if ports else None
    if proto is None or not _take_out(proto, ports):
        yield path
        return
    beside = path.with_name(f"{path.name}.checked")
    try:
        beside.write_bytes(proto.SerializeToString())
        yield beside
    finally:
        beside.unlink(missing_ok=True)


def _take_out(proto: onnx.ModelProto, ports: Collection[str]) -> bool:
    graph = proto.graph
    inputs, outputs = (
        [v for v in values if v.name in ports and _lacks_shape(v)]
        for values in (graph.input, graph.output)
    )
    for value in inputs:
        graph.value_info.append(value)
        graph.input.remove(value)
        made = onnx.helper.make_node("Given", [], [value.name], domain=_DOMAIN)
        graph.node.insert(0, made)
    for value in outputs:
        graph.output.remove(value)
    if inputs:
        proto.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))
    return bool(inputs or outputs)


def _lacks_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type
    return kind.HasField("tensor_type") and not kind.tensor_type.HasField("shape")
