"""Products with constant matrices are restated as linear layers.

Law: the results stay the same bit for bit. A linear layer multiplies by transposed weights;
it gets a transposed view of the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import named_arguments
from finecast.frontends.torch.reader import attribute, forget_unused, register, written

_LINEAR: Final = torch.ops.aten.linear.default
# The argument names of each product: operand, weights, and the bias that is added.
_PRODUCTS: Final[Mapping[Any, tuple[str, str, str]]] = {
    torch.ops.aten.addmm.default: ("mat1", "mat2", "self"),
    torch.ops.aten.mm.default: ("self", "mat2", ""),
    torch.ops.aten.matmul.default: ("self", "other", ""),
}
_FACTORS: Final = ("alpha", "beta")


def state_linear_layers(module: GraphModule) -> None:
    """Restate them in place; in transformers' GPT-2 a linear layer is an ``addmm``."""
    changing = written(module)
    transposed: dict[int, str] = {}  # names of transposed tensors, by the tensor's id
    for node in list(module.graph.nodes):
        operands = _operands(node)
        if operands is None or operands[1] in changing:
            continue
        value, weights, added = operands
        tensor = attribute(module, str(weights.target))
        if id(tensor) not in transposed:
            transposed[id(tensor)] = _transposed(module, str(weights.target), tensor)
        with module.graph.inserting_after(weights):
            turned = module.graph.get_attr(transposed[id(tensor)])
        turned.meta = {**weights.meta, "val": weights.meta["val"].t()}
        node.target, node.kwargs = _LINEAR, {}
        node.args = (value, turned) if added is None else (value, turned, added)
    if not transposed:
        return
    module.graph.eliminate_dead_code()
    forget_unused(module)
    module.recompile()


def _operands(node: FxNode) -> tuple[FxNode, FxNode, FxNode | None] | None:
    """Operand, weights and bias of a product with a constant matrix; None for other nodes."""
    names = _PRODUCTS.get(node.target) if node.op == "call_function" else None
    if names is None:
        return None
    given = named_arguments(node)
    value, weights, added = (given.get(name) for name in names)
    if not _is_float(value) or value.op == "get_attr":
        return None
    if not _is_float(weights) or weights.op != "get_attr" or weights.meta["val"].ndim != 2:
        return None
    fits = added is None or added.meta["val"].shape == weights.meta["val"].shape[1:]
    plain = all(given.get(factor, 1) == 1 for factor in _FACTORS)
    return (value, weights, added) if fits and plain else None


def _is_float(arg: object) -> TypeGuard[FxNode]:
    return isinstance(arg, FxNode) and arg.meta["val"].dtype.is_floating_point


def _transposed(module: GraphModule, path: str, tensor: torch.Tensor) -> str:
    """Add a transposed view of ``tensor``, which is at ``path``; returns its name."""
    turned = tensor.detach().t()
    if isinstance(tensor, torch.nn.Parameter):
        turned = torch.nn.Parameter(turned, requires_grad=tensor.requires_grad)
    return register(module, f"{path}_transposed", turned)
