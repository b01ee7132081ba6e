"""Where nodes that read a value can stand."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir


def place_after(
    value: ir.Value, nodes: Sequence[ir.Node], main: ir.Graph, prologue: list[ir.Node]
) -> None:
    """Put ``nodes`` right after ``value`` appears.

    After its producer; at the start of its body, for a body's input or initializer; what is
    of the ``main`` graph goes to ``prologue``, which its caller puts first.
    """
    home, producer = value.graph, value.producer()
    if producer is not None:
        producer.append(nodes)
    elif home is main or home is None:
        prologue += nodes
    else:
        next(iter(home)).prepend(nodes)
