"""What outputs depend on beside a model's inputs: random draws, or nothing at all.

What random ops draw is no difference between two models: engines load models with fixed draws
in place of them (``numbers/draws.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from finecast.errors import ModelError
from finecast.graph import Graph, Node
from finecast.naming import listed
from finecast.ops import OpKind, by_name

_NAMED: Final = 3
"""Random ops or outputs that a message names."""
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
    drawn = _reached(graph, set(), lambda node: draws(graph, node))
    return frozenset(value.name for value in graph.outputs if value.id in drawn)


def check_depends(graph: Graph) -> None:
    """Raise ModelError for a graph with inputs on which no output depends.

    Such a model was read or exported without the ops that lead to its outputs. Whatever is
    done to it, its error is 0.
    """
    constant = constant_outputs(graph)
    if graph.inputs and constant and len(constant) == len(graph.outputs):
        verb = "depends" if len(constant) == 1 else "depend"
        raise ModelError(
            f"{listed([repr(name) for name in constant], _NAMED)} {verb} on no input: the"
            " model gives the same numbers whatever is fed in, and has nothing to convert",
            fix="see whether it lost ops when it was exported, as state that it kept in"
            " variables or Python code that was run once",
        )


def constant_notes(graph: Graph) -> list[str]:
    """A note that names the outputs which depend on no input, if there are any."""
    constant = [repr(name) for name in constant_outputs(graph)]
    if not constant:
        return []
    return [f"{listed(constant, _NAMED)}: the same numbers whatever is fed in"]


def constant_outputs(graph: Graph) -> tuple[str, ...]:
    """Names of the outputs that are the same in each run, whatever is fed in."""
    varying = varying_values(graph)
    return tuple(value.name for value in graph.outputs if value.id not in varying)


def varying_values(graph: Graph) -> frozenset[int]:
    """The values that may be others in each run: they depend on inputs, or on draws.

    Control flow is taken to depend on inputs, as its condition does.
    """

    def varies(node: Node) -> bool:
        return draws(graph, node) or by_name(node.op).kind is OpKind.CONTROL

    return _reached(graph, {value.id for value in graph.inputs}, varies)


def _reached(graph: Graph, values: set[int], starts: Callable[[Node], bool]) -> frozenset[int]:
    """``values``, and what depends on them or on ops of which ``starts`` holds."""
    reached = set(values)
    for node in graph.nodes:
        if starts(node) or any(index in reached for index in node.inputs):
            reached.update(node.output_ids)
    return frozenset(reached)
