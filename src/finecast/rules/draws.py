"""Random ops: what they draw is no difference between two models.

Engines load models with fixed draws in place of them (``numbers/draws.py``).
"""

from __future__ import annotations

from typing import Final

from finecast.graph import Graph, Node
from finecast.naming import listed
from finecast.ops import OpKind, by_name

_NAMED: Final = 3
"""Random ops that a note names."""
_SWITCHES: Final = ("train", "dropout_p")
"""Attributes of PyTorch's ops that draw only where these are set."""
_TRAINING: Final = 2
"""The input by which ONNX's Dropout draws: it is True in training."""


def draws(graph: Graph, node: Node) -> bool:
    """Whether the op's result is drawn at random."""
    if by_name(node.op).kind is OpKind.RANDOM:
        return True
    if any(node.attributes.get(name) for name in _SWITCHES):
        return True
    switch = graph.read(node, _TRAINING) if node.op == "dropout" else None
    constant = None if switch is None else switch.constant
    return constant is not None and bool(constant.read().all())


def random_notes(graph: Graph, *, fixed: bool) -> list[str]:
    """A note that names the random ops, if there are any.

    ``fixed`` says whether engines load the model with fixed draws.
    """
    random_nodes = (node for node in graph.nodes if draws(graph, node))
    names = [f"{node.name} ({node.native.rpartition('::')[2]})" for node in random_nodes]
    if not names:
        return []
    text = f"random draws of {listed(names, _NAMED)} are"
    if not fixed:
        return [f"{text} other numbers in each run: errors and metrics have that noise"]
    text = f"{text} replaced by the same fixed numbers in all models that are run here"
    return [f"{text}; what is written draws anew"]


def behind_draws(graph: Graph) -> frozenset[str]:
    """Names of the outputs that depend on what is drawn."""
    drawn: set[int] = set()
    for node in graph.nodes:
        if draws(graph, node) or any(index in drawn for index in node.inputs):
            drawn.update(index for index in node.outputs if index is not None)
    return frozenset(value.name for value in graph.outputs if value.id in drawn)
