"""Merges the casts that edits insert with one another and with the model's own.

Laws: no inserted cast is to the type that a value has, repeats a cast of the model, or reads
the result of a widening cast instead of its operand. No number changes by merging. The model's
own superfluous casts stay where no edit touches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import onnx_ir as ir

from finecast.frontends.onnx.constants import DATA_TYPES
from finecast.frontends.onnx.editor import MARK, is_read
from finecast.numbers.formats import Format

_FORMATS: Final[dict[ir.DataType | None, Format]] = {
    data_type: fmt for fmt, data_type in DATA_TYPES.items()
}


def merge_casts(graphs: Iterable[ir.Graph]) -> None:
    """Rewire and remove casts between float types in ``graphs``."""
    for graph in graphs:
        casts = [n for n in graph if n.op_type == "Cast" and not n.domain]
        casts = [n for n in casts if _between_floats(n)]
        passed = {before for node in casts for before in _shorten(node)}
        first: dict[tuple[int, ir.DataType | None], ir.Node] = {}
        for node in casts:
            source, result = node.inputs[0], node.outputs[0]
            assert source is not None
            if source.dtype == result.dtype:
                before = source.producer()
                if MARK in {*node.metadata_props, *(before.metadata_props if before else ())}:
                    bypass(node, source)
                continue
            same = first.setdefault((id(source), result.dtype), node)
            if same is not node and (_is_ours(node) or _is_ours(same)):
                _join(same, node)
        for node in reversed(casts):
            unread = node.graph is graph and not is_read(node.outputs[0])
            if unread and (_is_ours(node) or node in passed):
                graph.remove(node, safe=True)


def _join(kept: ir.Node, node: ir.Node) -> None:
    """Let readers of ``node`` read the equal cast ``kept``.

    If ``node`` is the author's, ``kept`` takes its name and metadata, and is that from now on.
    """
    if bypass(node, kept.outputs[0]) and not _is_ours(node):
        del kept.metadata_props[MARK]
        kept.metadata_props.update(node.metadata_props)
        kept.name, node.name = node.name, kept.name


def _is_ours(node: ir.Node) -> bool:
    """Whether an edit inserted the cast."""
    return node.metadata_props.get(MARK) == ""


def _between_floats(node: ir.Node) -> bool:
    source = node.inputs[0]
    return source is not None and {source.dtype, node.outputs[0].dtype} <= {*_FORMATS}


def _shorten(node: ir.Node) -> Iterator[ir.Node]:
    """Let an inserted cast read the operand of the widening casts before it.

    Yields the casts that it no longer reads.
    """
    while _is_ours(node) and (source := node.inputs[0]) is not None:
        before = source.producer()
        if before is None or before.op_type != "Cast" or before.domain:
            return
        origin = before.inputs[0]
        if origin is None or not _between_floats(before):
            return
        if not _FORMATS[source.dtype].holds(_FORMATS[origin.dtype]):
            return
        node.replace_input_with(0, origin)
        yield before


def bypass(node: ir.Node, source: ir.Value) -> bool:
    """Let all readers of ``node``, a model's output too, read ``source``; remove ``node``.

    Returns False, and changes nothing, if ``source`` cannot be the output that ``node`` is: it
    is an input or an output already, or is made in another graph.
    """
    result, graph, producer = node.outputs[0], node.graph, source.producer()
    if result.is_graph_output():
        if source.is_graph_output() or producer is None or producer.graph is not graph:
            return False
        if not isinstance(graph, ir.Graph):
            return False
        source.name, result.name = result.name, source.name
        source.shape = result.shape or source.shape  # as it was declared
    result.replace_all_uses_with(source, replace_graph_outputs=True)
    if isinstance(graph, ir.Graph):
        graph.remove(node, safe=True)
    return True
