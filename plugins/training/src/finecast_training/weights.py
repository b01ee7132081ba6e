"""A cache of low copies of parameters, each kept until its parameter changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class HoistedCast:
    """A cast of input ``source`` to ``dtype`` that became a further input of the graph."""

    source: int
    dtype: torch.dtype


def hoist_casts(module: GraphModule, static: Collection[int] = ()) -> tuple[HoistedCast, ...]:
    """Replace each cast of a parameter by a further input of the graph, after the others.

    Parameters are fp32 inputs of the forward graph and, if the backward pass needs them, of
    its graph; there they are known by the names of the joint graph's inputs. A graph for
    inference has other names; its parameters are among the inputs ``static``. If a view of a
    parameter is cast (a linear layer's transpose), the new input is viewed instead.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    added_inputs: dict[HoistedCast, FxNode] = {}
    for number, source in enumerate(inputs):
        if not _is_parameter(source, static=number in static):
            continue
        for node, views in list(_conversions(source, ())):
            hoisted = HoistedCast(source=number, dtype=_dtype(node))
            if hoisted not in added_inputs:
                added_inputs[hoisted] = _add_input(
                    module, source, hoisted, [*inputs, *added_inputs.values()][-1]
                )
            with module.graph.inserting_before(node):
                low = _viewed(module, added_inputs[hoisted], views)
            node.replace_all_uses_with(low)
            for dead in (node, *reversed(views)):
                if not dead.users:
                    module.graph.erase_node(dead)
    if added_inputs:
        module.recompile()
    return tuple(added_inputs)


def _dtype(node: FxNode) -> torch.dtype:
    """The type that a cast gives."""
    dtype = node.args[1]
    assert isinstance(dtype, torch.dtype)
    return dtype


def _conversions(
    source: FxNode, views: tuple[FxNode, ...]
) -> Iterator[tuple[FxNode, tuple[FxNode, ...]]]:
    """Casts of ``source`` or of views of it, and the views in between."""
    for user in source.users:
        if user.target is torch.ops.prims.convert_element_type.default:
            yield user, views
        elif isinstance(user.target, OpOverload) and user.target.is_view:
            yield from _conversions(user, (*views, user))


def _add_input(
    module: GraphModule, source: FxNode, hoisted: HoistedCast, last: FxNode
) -> FxNode:
    with module.graph.inserting_after(last):
        new = module.graph.placeholder(f"low_{source.name}")
    new.meta = {"val": source.meta["val"].to(hoisted.dtype)}
    return new


def _viewed(module: GraphModule, low: FxNode, views: Sequence[FxNode]) -> FxNode:
    """``views`` applied to ``low``."""
    for view in views:
        new = module.graph.call_function(
            cast("Callable[..., Any]", view.target), (low, *view.args[1:]), dict(view.kwargs)
        )
        new.meta = {**view.meta, "val": view.meta["val"].to(low.meta["val"].dtype)}
        low = new
    return low


def _is_parameter(node: FxNode, *, static: bool) -> bool:
    """Whether an input may be a parameter: ``WeightCache.get`` sees whether it is one."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    return static or str(node.target).startswith("primals")


@dataclass(slots=True, kw_only=True)
class _Copy:
    version: tuple[int, int]
    low: torch.Tensor


class WeightCache:
    """Low copies of fp32 tensors, which are freed with the tensor.

    Law: what ``get`` returns equals ``tensor.to(dtype)``, unless the tensor was written to in
    place through ``.data``, which does not change its version. Copies are kept only of
    parameters and of leaves that require a gradient: inputs and activations are new tensors
    each time.
    """

    def __init__(self) -> None:
        self.copies = WeakTensorKeyDictionary()
        self.casts = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        kept = (cast("dict[torch.dtype, _Copy]", copies) for copies in self.copies.values())
        return sum(copy.low.nbytes for copies in kept for copy in copies.values())

    def stale(self) -> list[torch.Tensor]:
        """Tensors with a copy that ``get`` would return though it no longer equals them."""
        return [
            tensor
            for tensor, copies in self.copies.items()
            if any(
                copy.version == (tensor._version, tensor.data_ptr())
                and not torch.equal(copy.low, tensor.detach().to(dtype))
                for dtype, copy in cast("dict[torch.dtype, _Copy]", copies).items()
            )
        ]

    def get(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The low copy of ``tensor``, updated in place if the tensor has changed."""
        lasting = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
        # Tensors made in inference mode have no version counter.
        if not (lasting and tensor.is_leaf) or tensor.is_inference():
            return tensor.detach().to(dtype)
        kept = cast("dict[torch.dtype, _Copy]", self.copies.setdefault(tensor, {}))
        kept_copy = kept.get(dtype)
        version = tensor._version, tensor.data_ptr()  # ``.data`` may be another tensor now
        if kept_copy is None or kept_copy.low.shape != tensor.shape:
            self.casts += 1
            kept[dtype] = kept_copy = _Copy(version=version, low=tensor.detach().to(dtype))
        elif kept_copy.version != version:
            self.casts += 1
            with torch.no_grad():
                kept_copy.low.copy_(tensor)
            kept_copy.version = version
        return kept_copy.low

    def feed(self, compiled: Any, casts: Sequence[HoistedCast]) -> Any:
        """``compiled``, changed to be called without the hoisted inputs."""
        inner: Callable[[list[Any]], Any] = compiled.current_callable

        def call(inputs: list[Any]) -> Any:
            # A copy made in inference mode could not be written to outside of it.
            with torch.inference_mode(mode=False):
                lows = [self.get(inputs[c.source], c.dtype) for c in casts]
            inputs.extend(lows)
            return inner(inputs)

        compiled.current_callable = call
        return compiled
