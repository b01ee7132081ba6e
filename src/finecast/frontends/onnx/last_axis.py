"""Softmax over the last axis, kept whole while the opset is raised.

Before opset 13 Softmax, LogSoftmax and Hardmax flatten what they read into a matrix, and
onnx's converter writes that out: Flatten, the op, Reshape. Over the last axis both definitions
give the same numbers, and engines know an attention only by a Softmax right between its
products.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import onnx_ir as ir

from finecast.frontends.onnx.definitions import normal_domain
from finecast.frontends.onnx.ranks import ranks_of
from finecast.frontends.onnx.types import every_node

_FLATTENING: Final = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
_FLATTENS_BELOW: Final = 13
# Where the axis is not stated.
_OLD_AXIS: Final = 1
# onnx's converter leaves the ops of a domain alone that it does not know.
_ASIDE: Final = "finecast.aside"


@contextmanager
def set_aside(model: ir.Model, opset: int) -> Generator[None]:
    """While it lasts, such ops of ``model``, at ``opset``, are not the converter's."""
    nodes = _over_last_axis(model) if opset < _FLATTENS_BELOW else []
    domains = [n.domain for n in nodes]
    for node in nodes:
        node.domain = _ASIDE
    if nodes:
        model.opset_imports[_ASIDE] = 1
    try:
        yield
    finally:
        model.opset_imports.pop(_ASIDE, None)
        for node, domain in zip(nodes, domains, strict=True):
            node.domain = domain


def bring_back(model: ir.Model) -> None:
    """Let what was set aside be an op of the default domain again, at its opset."""
    if model.opset_imports.pop(_ASIDE, None) is None:
        return
    for node in every_node(model.graph):
        if node.domain == _ASIDE:
            node.domain = ""
            node.attributes["axis"] = ir.AttrInt64("axis", -1)


def _over_last_axis(model: ir.Model) -> list[ir.Node]:
    found = [
        n
        for n in every_node(model.graph)
        if normal_domain(n.domain) == "" and n.op_type in _FLATTENING
    ]
    positive = any(_axis(n) != -1 for n in found)
    ranks = ranks_of(model) if positive else {}
    return [n for n in found if _axis(n) == -1 or _axis(n) + 1 == ranks.get(_source(n))]


def _axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis")
    return _OLD_AXIS if attribute is None else attribute.as_int()


def _source(node: ir.Node) -> str:
    return (node.inputs[0].name or "") if node.inputs and node.inputs[0] else ""
