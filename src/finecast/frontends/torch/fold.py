"""Folds batch norms of inference into the convolutions before them.

Law: the folded graph computes the same function in exact arithmetic. Folded weights are
computed in fp64. A plan that is made after it rounds the pair once, and eager PyTorch runs one
op where there were two.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import native_name
from finecast.frontends.torch.reader import attribute, forget_unused

_CONVS = frozenset({"aten::conv1d", "aten::conv2d", "aten::conv3d"})
_NORM = "aten::_native_batch_norm_legit_no_training"


def fold_batch_norms(module: GraphModule) -> int:
    """Fold all batch norms that can be; returns how many were."""
    folded = 0
    for norm in list(module.graph.nodes):
        if native_name(norm) == _NORM and _foldable(norm):
            _fold(module, norm, folded)
            folded += 1
    if folded:
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        forget_unused(module)
        module.recompile()
    return folded


def _foldable(norm: FxNode) -> bool:
    conv = norm.args[0]
    if not isinstance(conv, FxNode) or native_name(conv) not in _CONVS or len(conv.users) > 1:
        return False
    constants = [a for a in (*norm.args[1:5], *conv.args[1:3]) if a is not None]
    return all(isinstance(c, FxNode) and c.op == "get_attr" for c in constants) and all(
        u.target is operator.getitem and u.args[1] == 0 for u in norm.users
    )


def _fold(module: GraphModule, norm: FxNode, number: int) -> None:
    conv = norm.args[0]
    assert isinstance(conv, FxNode)
    weight_node = conv.args[1]
    assert isinstance(weight_node, FxNode)
    weight, bias = _folded(module, conv, norm)
    fake = weight_node.meta["val"]
    new: list[FxNode] = []
    for part, tensor, like in (
        ("weight", weight, fake),
        ("bias", bias, fake.new_empty(bias.shape)),
    ):
        name = f"_folded_{number}_{part}"
        parameter = torch.nn.Parameter(tensor.to(fake.dtype), requires_grad=False)
        module.register_parameter(name, parameter)
        with module.graph.inserting_before(conv):
            new.append(module.graph.get_attr(name))
        new[-1].meta["val"] = like
    conv.args = (conv.args[0], *new, *conv.args[3:])
    for user in list(norm.users):
        user.replace_all_uses_with(conv)


def _folded(
    module: GraphModule, conv: FxNode, norm: FxNode
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight and bias, in fp64, of the convolution that ``conv`` and ``norm`` become."""

    def read(arg: Any) -> torch.Tensor | None:
        return None if arg is None else attribute(module, str(arg.target)).detach().double()

    weight = read(conv.args[1])
    bias = read(conv.args[2]) if len(conv.args) > 2 else None
    gamma, beta, mean, variance = map(read, norm.args[1:5])
    eps: Any = norm.args[6]
    assert weight is not None
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance + eps)
    scale = scale if gamma is None else scale * gamma
    shift = (-mean if bias is None else bias - mean) * scale
    shift = shift if beta is None else shift + beta
    return weight * scale.reshape(-1, *[1] * (weight.dim() - 1)), shift
