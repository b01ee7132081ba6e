"""Decomposes ops of PyTorch into the steps that a device runs, each of which may round.

Law: in fp32 the steps compute what the op computes, up to the order of sums. The metadata of
each step names the op.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.fx import GraphModule, Proxy
from torch.fx import Node as FxNode
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from finecast.frontends.torch.aten import named_arguments, native_name

STEP_OF: Final = "finecast_step_of"
"""The key in a step's metadata of the FX name of the op that was decomposed."""

# Adds an op's steps, given its arguments by name; returns None where the op has to stay whole.
Steps = Callable[[dict[str, Any]], Proxy | None]
_aten: Final = torch.ops.aten


def expand_ops(module: GraphModule, steps: Mapping[str, Steps]) -> None:
    """Decompose in place the ops whose native names are in ``steps``."""
    for node in list(module.graph.nodes):
        build = steps.get(native_name(node)) if node.op == "call_function" else None
        if build is not None and _only_first_used(node):
            _replace(module.graph, node, build)
    module.graph.lint()
    module.recompile()


def _only_first_used(node: FxNode) -> bool:
    """Whether no result but the op's first is used."""
    if isinstance(node.meta["val"], torch.Tensor):
        return True
    return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)


def _replace(graph: torch.fx.Graph, node: FxNode, build: Steps) -> None:
    tracer = _Tracer(graph, node)
    with graph.inserting_before(node):

        def proxy(argument: FxNode) -> Any:
            return Proxy(argument, tracer)

        given = {name: map_arg(value, proxy) for name, value in named_arguments(node).items()}
        out = build(given)
    if out is None:
        return
    alone = isinstance(node.meta["val"], torch.Tensor)
    for whole in [node] if alone else list(node.users):
        whole.replace_all_uses_with(out.node)
        graph.erase_node(whole)
    if not alone:
        graph.erase_node(node)


class _Tracer(GraphAppendingTracer):
    """Adds steps to a graph, with the names, metadata and fake results that ``read`` needs."""

    def __init__(self, graph: torch.fx.Graph, whole: FxNode) -> None:
        super().__init__(graph)
        self.whole = whole

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> FxNode:
        """One step, named after the op and the step's own op."""
        step = target.name().partition("::")[2].partition(".")[0].strip("_")
        kwargs["name"] = f"{self.whole.name}_{step}"
        made = super().create_node(kind, target, *args[:2], **kwargs)
        kept = {k: v for k, v in self.whole.meta.items() if k not in ("val", "tensor_meta")}
        made.meta = {**kept, STEP_OF: self.whole.meta.get(STEP_OF, self.whole.name)}
        fake_args, fake_kwargs = map_arg((made.args, made.kwargs), lambda n: n.meta["val"])
        made.meta["val"] = target(*fake_args, **fake_kwargs)
        return made


def _attention(given: dict[str, Any]) -> Proxy | None:
    """The steps of ``aten::_scaled_dot_product_attention_math``, as XLA and ONNX run them."""
    q, k, v = given["query"], given["key"], given["value"]
    width = q.node.meta["val"].shape[-1]
    if given.get("dropout_p") or not isinstance(width, int):
        return None
    if given.get("enable_gqa"):
        groups = [t.node.meta["val"].shape[-3] for t in (q, k, v)]
        if not all(isinstance(g, int) for g in groups):
            return None
        k = _aten.repeat_interleave.self_int(k, groups[0] // groups[1], -3)
        v = _aten.repeat_interleave.self_int(v, groups[0] // groups[2], -3)
    scale = given.get("scale")
    # Queries and keys each take the root of the scale, so that the product is less likely to
    # overflow.
    root = math.sqrt(width**-0.5 if scale is None else scale)
    keys = _aten.mul.Tensor(_aten.transpose.int(k, -2, -1), root)
    scores = _aten.matmul.default(_aten.mul.Tensor(q, root), keys)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = _aten.tril.default(_aten.ones_like.default(scores, dtype=torch.bool))
    if mask is not None:
        if mask.node.meta["val"].dtype is torch.bool:
            scores = _aten.where.ScalarOther(mask, scores, -math.inf)
        else:
            scores = _aten.add.Tensor(scores, mask)
    softmax = _aten.softmax.int if mask is None else _aten._safe_softmax.default
    return _aten.matmul.default(softmax(scores, -1), v)


def _softmax(given: dict[str, Any]) -> Proxy:
    x, axis = given["self"], given["dim"]
    powers = _aten.exp.default(_aten.sub.Tensor(x, _aten.amax.default(x, [axis], True)))
    return _aten.div.Tensor(powers, _aten.sum.dim_IntList(powers, [axis], True))


def _layer_norm(given: dict[str, Any]) -> Proxy:
    x = given["input"]
    axes = list(range(-len(given["normalized_shape"]), 0))
    centred = _aten.sub.Tensor(x, _aten.mean.dim(x, axes, True))
    variance = _aten.mean.dim(_aten.mul.Tensor(centred, centred), axes, True)
    deviation = _aten.sqrt.default(_aten.add.Tensor(variance, given.get("eps", 1e-5)))
    out = _aten.div.Tensor(centred, deviation)
    if given.get("weight") is not None:
        out = _aten.mul.Tensor(out, given["weight"])
    if given.get("bias") is not None:
        out = _aten.add.Tensor(out, given["bias"])
    return out


def _matrix_product(given: dict[str, Any]) -> Proxy | None:
    """The steps of ``aten::addmm`` with a bias."""
    bias, scaled = given["self"], any(given.get(n, 1) != 1 for n in ("alpha", "beta"))
    if scaled or bias.node.meta["val"].ndim != 1:
        return None
    return _aten.add.Tensor(_aten.mm.default(given["mat1"], given["mat2"]), bias)


def _biased(product: Any) -> Steps:
    """The steps of a linear layer or a convolution."""

    def steps(given: dict[str, Any]) -> Proxy | None:
        bias = given.get("bias")
        if bias is None:
            return None
        positions = given["weight"].node.meta["val"].ndim - 2
        if positions > 0:
            bias = _aten.view.default(bias, [-1, *[1] * positions])
        named = isinstance(given.get("padding"), str)  # "same" or "valid"
        alone = product.padding if named else product.default
        return _aten.add.Tensor(alone(*{**given, "bias": None}.values()), bias)

    return steps


ATTENTION: Final[Mapping[str, Steps]] = {"aten::scaled_dot_product_attention": _attention}
"""Attention as products and a softmax, for devices that round the operands of each product."""

BIASES: Final[Mapping[str, Steps]] = {
    "aten::addmm": _matrix_product,
    "aten::linear": _biased(_aten.linear),
    "aten::convolution": _biased(_aten.convolution),
    "aten::conv1d": _biased(_aten.conv1d),
    "aten::conv2d": _biased(_aten.conv2d),
    "aten::conv3d": _biased(_aten.conv3d),
}
"""Products without their biases, which are added behind them: rules may judge each apart."""

ACCUMULATIONS: Final[Mapping[str, Steps]] = {
    "aten::softmax": _softmax,
    "aten::_softmax": _softmax,
    "aten::_safe_softmax": _softmax,
    "aten::layer_norm": _layer_norm,
    "aten::native_layer_norm": _layer_norm,
}
"""Reductions, for devices that accumulate in the low format and so round every step."""
