"""Low copies of parameters, made once and kept until the parameter changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistedCast:
    """Input ``source`` of a compiled graph is wanted in ``dtype``, as a further input."""

    source: int
    dtype: torch.dtype


def hoist_casts(module: GraphModule) -> tuple[HoistedCast, ...]:
    """Make each conversion of a parameter an input of the graph, put after the others.

    A parameter is an input whose fake tensor is one; Dynamo keeps that apart.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    found: list[HoistedCast] = []
    nodes: list[FxNode] = []
    for number, source in enumerate(inputs):
        if not _is_parameter(source):
            continue
        for user in list(source.users):
            if user.target is not torch.ops.prims.convert_element_type.default:
                continue
            found.append(HoistedCast(source=number, dtype=user.args[1]))  # type: ignore[arg-type]
            nodes.append(user)
    last = inputs[-1] if inputs else None
    for node in nodes:
        assert last is not None
        with module.graph.inserting_after(last):
            new = module.graph.placeholder(f"low_{node.name}")
        new.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(new)
        module.graph.erase_node(node)
        last = new
    module.recompile()
    return tuple(found)


def _is_parameter(node: FxNode) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    if isinstance(value, torch.nn.Parameter):
        return True
    described = node.meta.get("desc")
    return described is not None and type(described).__name__.startswith("Param")


class WeightCache:
    """Low copies by the memory of the fp32 tensor.

    Law: what ``get`` returns equals ``tensor.to(dtype)`` unless the tensor was written to
    through ``.data``, which hides from version counters.
    """

    def __init__(self) -> None:
        self.copies: dict[tuple[int, torch.dtype], tuple[int, torch.Tensor]] = {}

    def get(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The low copy of ``tensor``, made anew in place if it has changed."""
        key = (tensor.data_ptr(), dtype)
        version, low = self.copies.get(key, (-1, None))
        if low is None or low.shape != tensor.shape:
            low = tensor.detach().to(dtype)
        elif version != tensor._version:
            with torch.no_grad():
                low.copy_(tensor)
        self.copies[key] = (tensor._version, low)
        return low

    def feed(self, compiled: Any, casts: Sequence[HoistedCast]) -> Any:
        """``compiled``, which is then called without the hoisted inputs."""
        inner: Callable[[list[Any]], Any] = compiled.current_callable

        def call(inputs: list[Any]) -> Any:
            lows = [self.get(inputs[c.source], c.dtype) for c in casts]
            inputs.extend(lows)
            return inner(inputs)

        compiled.current_callable = call
        return compiled
