"""Ops that onnx's converter is kept from while the opset is raised.

Before opset 13 Softmax, LogSoftmax and Hardmax flatten what they read into a matrix, and
onnx's converter writes that out: Flatten, the op, Reshape. Over the last axis both definitions
give the same numbers, and engines recognise an attention only by a Softmax directly between
its two products. The converter refuses a batch norm in its old training form, which
``redefined.py`` states.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import onnx_ir as ir

from finecast.frontends.onnx.definitions import FLATTENING_AXIS, SOFTMAX_FLATTENS_BELOW
from finecast.frontends.onnx.ranks import ranks_of
from finecast.frontends.onnx.redefined import TRAINING_STATED_FROM, trains
from finecast.frontends.onnx.types import every_node

_FLATTENING: Final = frozenset({"Softmax", "LogSoftmax", "Hardmax"})
# A domain that onnx's converter does not know: it leaves its ops alone.
_ASIDE: Final = "finecast.aside"


@contextmanager
def set_aside(model: ir.Model, opset: int) -> Generator[None]:
    """Hide such ops of ``model``, which is at ``opset``, from the converter for a while."""
    nodes = [*over_last_axis(model, opset), *_training(model, opset)]
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
    """Give the ops of a converted model that were hidden their own domain again.

    Those over the last axis say so: by both definitions.
    """
    if model.opset_imports.pop(_ASIDE, None) is None:
        return
    for node in every_node(model.graph):
        if node.domain == _ASIDE:
            node.domain = ""
            if node.op_type in _FLATTENING:
                node.attributes["axis"] = ir.AttrInt64("axis", -1)


def _training(model: ir.Model, opset: int) -> list[ir.Node]:
    if opset >= TRAINING_STATED_FROM:
        return []
    return [n for n in every_node(model.graph) if trains(n)]


def over_last_axis(model: ir.Model, opset: int) -> list[ir.Node]:
    """Softmax and its like, before opset 13, over the last axis: by both definitions."""
    if opset >= SOFTMAX_FLATTENS_BELOW:
        return []
    nodes = every_node(model.graph)
    found = [n for n in nodes if not n.domain and n.op_type in _FLATTENING]
    positive = any(_axis(n) != -1 for n in found)
    ranks = ranks_of(model) if positive else {}
    return [n for n in found if _axis(n) == -1 or _axis(n) + 1 == ranks.get(_source(n))]


def _axis(node: ir.Node) -> int:
    return node.attributes.get_int("axis", FLATTENING_AXIS)


def _source(node: ir.Node) -> str:
    return (node.inputs[0].name or "") if node.inputs and node.inputs[0] else ""
