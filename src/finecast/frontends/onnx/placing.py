"""Where nodes that read a value are put: right after the value is defined."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def home_of(value: ir.Value, main: ir.Graph) -> ir.Graph:
    """The graph or body that defines ``value``; ``main`` where onnx_ir does not say."""
    producer = value.producer()
    home = value.graph if producer is None else producer.graph
    return home if isinstance(home, ir.Graph) else main


def place_after(
    value: ir.Value,
    nodes: Sequence[ir.Node],
    main: ir.Graph,
    prologue: list[ir.Node] | None = None,
) -> None:
    """Put ``nodes`` after the node that makes ``value``.

    If no node makes it, they become the first of its graph. Those of the ``main`` graph are
    added to ``prologue`` instead, if there is one: its owner puts all of them first at once.
    """
    home, producer = home_of(value, main), value.producer()
    if producer is not None:
        home.insert_after(producer, nodes)
    elif home is main and prologue is not None:
        prologue += nodes
    elif len(home):
        home.insert_before(home[0], nodes)
    else:
        home.extend(nodes)
