"""Products by constant matrices, stated as the linear layers that they are.

Law: the numbers are those of before, bit for bit. A linear layer multiplies by its weights
transposed; it is given a transposed view of the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import named_arguments
from finecast.frontends.torch.reader import attribute, forget_unused, written

_LINEAR: Final = torch.ops.aten.linear.default
# Of each product: its operands and what is added, by their names.
_PRODUCTS: Final[Mapping[Any, tuple[str, str, str]]] = {
    torch.ops.aten.addmm.default: ("mat1", "mat2", "self"),
    torch.ops.aten.mm.default: ("self", "mat2", ""),
    torch.ops.aten.matmul.default: ("self", "other", ""),
}
_FACTORS: Final = ("alpha", "beta")


def state_linear_layers(module: GraphModule) -> None:
    """State products so in place: transformers' GPT-2 has ``addmm`` for a linear layer."""
    changing = written(module)
    for node in list(module.graph.nodes):
        operands = _operands(node)
        if operands is None or operands[1] in changing:
            continue
        value, weights, added = operands
        with module.graph.inserting_after(weights):
            turned = module.graph.get_attr(_transposed(module, str(weights.target)))
        turned.meta = {**weights.meta, "val": weights.meta["val"].t()}
        node.target, node.kwargs = _LINEAR, {}
        node.args = (value, turned) if added is None else (value, turned, added)
    module.graph.eliminate_dead_code()
    forget_unused(module)
    module.recompile()


def _operands(node: FxNode) -> tuple[FxNode, FxNode, FxNode | None] | None:
    """What a product reads, its weights, what is added; None of all that is none."""
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


def _transposed(module: GraphModule, path: str) -> str:
    """The path of the matrix at ``path``, transposed."""
    name = f"{path}_transposed".replace(".", "_")
    if not hasattr(module, name):
        tensor = attribute(module, path)
        turned = tensor.detach().t()
        if isinstance(tensor, torch.nn.Parameter):
            parameter = torch.nn.Parameter(turned, requires_grad=tensor.requires_grad)
            module.register_parameter(name, parameter)
        else:
            module.register_buffer(name, turned)
    return name
