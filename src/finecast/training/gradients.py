"""Gradient accumulation inside the backward pass.

Usually each microbatch computes a gradient of its own, in fp32 and of the model's size, which
autograd adds to the existing one and frees. Here the kernel that casts the gradient to fp32
adds it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._C import (
    _will_engine_execute_node,  # pyright: ignore[reportPrivateUsage] - no public name
)
from torch.autograd.graph import get_gradient_edge
from torch.fx import GraphModule
from torch.fx import Node as FxNode

_PLACE: Final = "finecast_gradient_of_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedGradient:
    """Output ``result`` of a backward graph is the gradient of its input ``source``."""

    source: int
    result: int


def mark_gradients(
    joint: torch.fx.Graph, backward: GraphModule, parameters: Collection[int]
) -> None:
    """Note at the inputs of ``backward`` that are parameters which output is their gradient.

    ``parameters`` are indices of the joint graph's inputs; the backward graph's outputs are
    the gradients of these inputs, in the same order.
    """
    inputs = joint.find_nodes(op="placeholder")
    places = {inputs[number].name: number for number in parameters}
    for node in backward.graph.find_nodes(op="placeholder"):
        if node.name in places:
            node.meta[_PLACE] = places[node.name]


def add_gradients(module: GraphModule) -> tuple[AddedGradient, ...]:
    """Have a backward graph add gradients into memory that it gets by two inputs for each.

    The first input is the memory for the sum, the second says whether it has a gradient
    already. The output of the gradient itself becomes None. Only gradients that end in a cast
    to fp32, those of products, are handled.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    (end,) = module.graph.find_nodes(op="output")
    results = list(end.args[0])
    found: list[AddedGradient] = []
    last = inputs[-1] if inputs else None
    for number, source in enumerate(inputs):
        place = source.meta.get(_PLACE)
        if place is None or not _is_widened(results[place], source, results):
            continue
        assert last is not None
        value = source.meta["val"]
        with module.graph.inserting_after(last):
            there = module.graph.placeholder(f"there_{source.name}")
            memory = module.graph.placeholder(f"memory_{source.name}")
        there.meta = {"val": value.new_empty((), dtype=torch.bool)}
        memory.meta = {"val": torch.empty_like(value)}
        own = results[place]
        # Directly after it: at the graph's end all low gradients would be alive at once.
        with module.graph.inserting_before(own.next):
            total = _call(module, torch.ops.aten.add.Tensor, memory, own)
            total = _call(module, torch.ops.aten.where.self, there, total, own)
            _call(module, torch.ops.aten.copy_.default, memory, total)
        results[place] = None
        found.append(AddedGradient(source=number, result=place))
        last = there
    end.args = (results,)
    module.graph.lint()
    module.recompile()
    return tuple(found)


def _is_widened(result: Any, source: FxNode, results: Sequence[Any]) -> bool:
    if not isinstance(result, FxNode) or results.count(result) > 1:
        return False
    widened = result.target is torch.ops.prims.convert_element_type.default
    mine, theirs = result.meta["val"], source.meta["val"]
    return widened and mine.dtype is theirs.dtype and mine.stride() == theirs.stride()


def _call(module: GraphModule, target: Any, *args: FxNode) -> FxNode:
    node = module.graph.call_function(target, args)
    node.meta["val"] = args[-1].meta["val"]
    return node


def feed(compiled: Any, added: Sequence[AddedGradient]) -> Any:
    """``compiled``, changed to be called without the added inputs and to give all gradients.

    Law: after ``loss.backward()`` each parameter's ``grad`` is what autograd would have made.
    A gradient that is not added to ``grad`` (``torch.autograd.grad``), or that a hook reads,
    is computed by itself.
    """
    inner: Callable[[list[Any]], Any] = compiled.current_callable
    flags: dict[tuple[bool, torch.device], torch.Tensor] = {}

    def call(inputs: list[Any]) -> Any:
        sums: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for one in added:
            parameter = inputs[one.source]
            kept = _addable(parameter)
            if any(kept is memory for _, _, memory in sums):
                kept = None  # the same parameter twice: autograd adds the two
            memory = torch.empty_like(parameter) if kept is None else kept
            key = kept is not None, parameter.device
            if key not in flags:
                flags[key] = torch.tensor(key[0], device=key[1])
            inputs += [memory, flags[key]]
            sums.append((one.result, parameter, memory))
        results = list(inner(inputs))
        for place, parameter, memory in sums:
            # Autograd then takes over the memory, as it does with a first gradient.
            if parameter.is_leaf and parameter.grad is memory:
                parameter.grad = None
            results[place] = memory.detach()
        return tuple(results)

    compiled.current_callable = call
    return compiled


def _addable(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that ``parameter`` has, if this backward pass may add to it; else None."""
    kept = parameter.grad if parameter.is_leaf else None
    alike = (
        kept is not None
        and kept.dtype is parameter.dtype
        and kept.stride() == parameter.stride()
        and not kept.requires_grad
    )
    if not alike or parameter._backward_hooks:
        return None
    adder = get_gradient_edge(parameter).node
    try:
        return kept if _will_engine_execute_node(adder) else None
    except RuntimeError:  # raised for leaves inside torch.autograd.grad
        return None
