"""Regions of a module under ``torch.autocast``, and others that torch runs as one op.

Law: their ops have the scopes of the modules that they were written in, and those for which
the module turns autocast off say so: ``states_fp32``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
from torch.amp.autocast_mode import (  # torch has no public names for these
    _enter_autocast,  # pyright: ignore[reportPrivateUsage]
    _exit_autocast,  # pyright: ignore[reportPrivateUsage]
)
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode
from torch.fx.traceback import preserve_node_meta

_AUTOCAST: Final = torch.ops.higher_order.wrap_with_autocast
_REGIONS: Final = (_AUTOCAST, torch.ops.higher_order.wrap_with_set_grad_enabled)
_ENABLED: Final = 2
"""Index of the argument that turns autocast on or off."""
_KEPT: Final = "custom"
"""The key of what torch hands on from a node to those that are traced of it."""
_MARK: Final = "finecast_fp32"


def states_fp32(node: FxNode) -> bool:
    """Whether the op was written where the module turns autocast off."""
    return bool((node.meta.get(_KEPT) or {}).get(_MARK))


@contextmanager
def told_apart(module: GraphModule) -> Generator[None]:
    """Inside, tracing ``module`` gives ops of its regions their own metadata, and marks them.

    Torch calls the body of a region, and every op in it would have the metadata of that call.
    """
    with ExitStack() as stack:
        for body in _off(module):
            stack.enter_context(_marked(body))
        for body in _bodies(module):
            stack.enter_context(_interpreted(body))
        yield


def _off(module: GraphModule, *, off: bool = False) -> Iterator[GraphModule]:
    """The bodies in which autocast is off; ``off`` says how it is around the module."""
    for node in module.graph.nodes:
        inside = not node.args[_ENABLED] if node.target is _AUTOCAST else off
        for body in _called(module, node):
            if inside:
                yield body
            yield from _off(body, off=inside)


def _bodies(module: GraphModule) -> Iterator[GraphModule]:
    """The bodies of all regions of a module; those within others, too."""
    for node in module.graph.nodes:
        for body in _called(module, node):
            if node.target in _REGIONS:
                yield body
            yield from _bodies(body)


def _called(module: GraphModule, node: FxNode) -> Iterator[GraphModule]:
    """The graphs among what ``node`` is called with."""
    for arg in node.all_input_nodes:
        if arg.op == "get_attr" and "." not in str(arg.target):
            found = getattr(module, str(arg.target), None)
            if isinstance(found, GraphModule):
                yield found


@contextmanager
def _interpreted(body: GraphModule) -> Generator[None]:
    """Inside, a call of ``body`` runs node by node, each with its metadata."""

    def run(*args: Any) -> Any:
        with preserve_node_meta():
            return Interpreter(body).run(*args)

    body.forward = run
    try:
        yield
    finally:
        del body.__dict__["forward"]


@contextmanager
def _marked(body: GraphModule) -> Generator[None]:
    """Inside, the ops of ``body`` are marked; the graph may be the user's own."""
    before = [(node, node.meta.get(_KEPT)) for node in body.graph.nodes]
    for node, _ in before:
        _mark(node)
    try:
        yield
    finally:
        for node, was in before:
            node.meta[_KEPT] = was
            if was is None:
                del node.meta[_KEPT]


def _mark(node: FxNode) -> None:
    node.meta[_KEPT] = {**(node.meta.get(_KEPT) or {}), _MARK: True}


def mark_regions(module: GraphModule, *, off: bool = False) -> None:
    """Mark ops where autocast is off in a graph as Dynamo captures it, and in its bodies.

    ``off`` says how it is around the graph.
    """
    states = [off]
    for node in module.graph.nodes:
        if node.target is _enter_autocast:
            states.append(not node.args[_ENABLED])
        elif node.target is _exit_autocast:
            states.pop()
        else:
            if states[-1]:
                _mark(node)
            for body in _called(module, node):
                mark_regions(body, off=states[-1])
