"""Batch norms of inference multiplied into the convolutions before them.

Law: the folded graph computes the same function in exact arithmetic. Done in fp32 and before
rounding, so that the pair rounds once, and eager runs one op where there were two.
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
    """Fold what can be folded; returns how many were."""
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
    parameters = [a for a in norm.args[1:5] if a is not None]
    return (
        isinstance(conv, FxNode)
        and native_name(conv) in _CONVS
        and len(conv.users) == 1
        and all(isinstance(p, FxNode) and p.op == "get_attr" for p in parameters)
        and _is_attribute(conv.args[1])
        and (len(conv.args) < 3 or conv.args[2] is None or _is_attribute(conv.args[2]))
        and all(u.target is operator.getitem and u.args[1] == 0 for u in norm.users)
    )


def _is_attribute(arg: Any) -> bool:
    return isinstance(arg, FxNode) and arg.op == "get_attr"


def _fold(module: GraphModule, norm: FxNode, number: int) -> None:
    conv = norm.args[0]
    assert isinstance(conv, FxNode)
    read = lambda arg: None if arg is None else attribute(module, str(arg.target)).detach()  # noqa: E731
    weight = read(conv.args[1])
    gamma, beta, mean, variance = (read(a) for a in norm.args[1:5])
    eps = norm.args[6]
    bias = read(conv.args[2]) if len(conv.args) > 2 else None
    assert weight is not None
    assert mean is not None
    assert variance is not None
    scale = torch.rsqrt(variance.double() + float(eps))  # type: ignore[arg-type]
    scale = scale if gamma is None else scale * gamma.double()
    shift = (0.0 if bias is None else bias.double()) - mean.double()
    shift = shift * scale if beta is None else shift * scale + beta.double()
    wide = scale.reshape(-1, *[1] * (weight.dim() - 1))
    names = (f"_folded_{number}_weight", f"_folded_{number}_bias")
    for name, tensor in zip(names, (weight.double() * wide, shift), strict=True):
        parameter = torch.nn.Parameter(tensor.to(weight.dtype), requires_grad=False)
        module.register_parameter(name, parameter)
    new: list[FxNode] = []
    given = list(conv.args)
    weight_node = given[1]
    assert isinstance(weight_node, FxNode)
    fake = weight_node.meta["val"]
    with module.graph.inserting_before(conv):
        for name, like in zip(names, (fake, fake.new_empty(shift.shape)), strict=True):
            node = module.graph.get_attr(name)
            node.meta["val"] = like
            new.append(node)
    conv.args = (given[0], *new, *given[3:])
    for user in list(norm.users):
        user.replace_all_uses_with(conv)
