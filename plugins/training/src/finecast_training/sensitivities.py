"""What roundings in a training step do to its gradients, by one backward pass through it.

The gradients are outputs of the joint graph, which is differentiated once more
(``first_order``). For a few ops of backward passes PyTorch knows no derivative; they are
computed as the gradient of the forward op, which has two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch._decomp import decomposition_table
from torch.fx import Interpreter

from finecast.errors import first_line
from finecast.frontends.torch import TorchNative, first_order, shared_copy
from finecast.graph import TANGENTS
from finecast.planning import Analysis, Planner
from finecast_training.backend import JointGraph
from finecast_training.measures import with_digits

_ATEN: Final = torch.ops.aten
_LACKING: Final = re.compile(r"derivative for aten::(\w+) is not implemented")
# One random combination of the gradients tells enough: an error is a sum over the elements of
# all parameters' gradients, and what the solver makes of errors is corrected by comparisons.
_DRAWS: Final = 1


def analysed(joint: JointGraph, planner: Planner) -> tuple[Analysis, str]:
    """Times and squared errors of the plans that ``planner`` permits, and a note.

    Products, convolutions and attention are timed in each format, as the faster one depends on
    the shapes: on a CPU with bf16 instructions attention takes half of the time in fp32. The
    error is the sum over all parameters of their gradients' squared relative errors, on
    the batch that the step was compiled with. The note says why errors are not known, if they
    are not; then no rounding makes any.
    """
    times = joint.times(planner, single_kernels=True)
    arguments = _arguments(joint)
    if arguments is None:
        why = "the step is captured in several graphs, or updates what it reads"
        return times.analysis(joint.prepared, planner), why
    replaced = dict(_DIFFERENTIABLE)
    while True:
        module = shared_copy(joint.binding.module)
        for node in module.graph.nodes:
            node.target = replaced.get(node.target, node.target)
        native = TorchNative(joint.graph, joint.binding.on(module))
        try:
            outputs = Interpreter(module).run(*arguments, enable_io_processing=False)
            counted = _gradients(joint, outputs)
            with torch.enable_grad():
                errors = first_order(native, times.points, arguments, counted, draws=_DRAWS)
        except (RuntimeError, NotImplementedError) as error:
            why = first_line(error)
            more = _decompositions(why)
            if more.keys() <= replaced.keys():
                return times.analysis(joint.prepared, planner), why
            replaced |= more
        else:
            return times.analysis(joint.prepared, planner, errors), ""


def _decompositions(why: str) -> dict[Any, Callable[..., Any]]:
    """The decompositions of the op that an error says has no derivative."""
    lacking = _LACKING.search(why)
    if lacking is None:
        return {}
    name = f"aten.{lacking.group(1)}."
    return {op: own for op, own in decomposition_table.items() if str(op).startswith(name)}


def _arguments(joint: JointGraph) -> list[Any] | None:
    """What the joint graph is called with on the batch; None where that is not known.

    A loss has the gradient 1. The gradients of other outputs, as of a part of the step after
    which Python goes on, are those of what is computed later.
    """
    places = joint.binding.module.graph.find_nodes(op="placeholder")
    tangents = [p.meta["val"] for p in places if str(p.target).startswith(TANGENTS)]
    inputs = [_detached(value) for value in joint.inputs]
    if len(tangents) != 1 or len(inputs) + 1 != len(places) or tangents[0].numel() != 1:
        return None
    for place, value in zip(places, inputs, strict=False):
        expected = place.meta.get("val")
        if isinstance(expected, torch.Tensor) and (
            not isinstance(value, torch.Tensor) or value.shape != expected.shape
        ):
            return None
    tangent = torch.ones(tangents[0].shape, dtype=tangents[0].dtype, device=joint.device)
    return [*inputs, tangent]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _gradients(joint: JointGraph, outputs: Any) -> frozenset[int]:
    """Numbers of ``outputs``, of those that are tensors, that are gradients with digits."""
    places = joint.binding.module.graph.find_nodes(op="placeholder")
    (end,) = joint.binding.module.graph.find_nodes(op="output")
    backward = {p for p in places if str(p.target).startswith(TANGENTS)}
    for node in joint.binding.module.graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    nodes: Any = end.args[0]
    pairs = [(n, y) for n, y in zip(nodes, outputs, strict=True) if torch.is_tensor(y)]
    gradients = {str(i): y for i, (n, y) in enumerate(pairs) if n in backward}
    return frozenset(map(int, with_digits(gradients)))


# --------------------------------------- ops whose derivative PyTorch does not know, by others


def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    causal = bool(rest[-1])

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mixed: Any = _ATEN._scaled_dot_product_attention_math(
            q, k, v, attn_mask, 0.0, causal, scale=scale
        )
        return mixed[0]

    return _gradients_of(attention, gradient, query, key, value)


def _group_norm_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    _mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    *sizes: Any,
) -> tuple[torch.Tensor, ...]:
    channels: int = sizes[1]
    grouped = x.detach().reshape(*rstd.shape, -1)
    eps = float((rstd.detach() ** -2 - grouped.var(-1, unbiased=False)).mean().clamp_min(0))
    scale = x.new_ones(channels) if weight is None else weight

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        parts = x.reshape(*rstd.shape, -1)
        centred = parts - parts.mean(-1, keepdim=True)
        normal = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
        shape = (1, channels, *(1,) * (x.dim() - 2))
        return normal.reshape(x.shape) * weight.reshape(shape) + bias.reshape(shape)

    return _gradients_of(norm, gradient, x, scale, torch.zeros_like(scale))


def _gradients_of(
    function: Callable[..., torch.Tensor], gradient: torch.Tensor, *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    results: Any = torch.func.vjp(function, *inputs)
    return results[1](gradient)


def _copied(_: torch.Tensor, new: torch.Tensor, *__: Any) -> torch.Tensor:
    """Statistics that the step updates at its end stay as they are."""
    return new


_DIFFERENTIABLE: Final[Mapping[Any, Callable[..., Any]]] = {
    _ATEN.copy_.default: _copied,
    # Stands before what the forward pass saves, as the result of a softmax: an error in that
    # goes on into the gradients.
    _ATEN.detach.default: _ATEN.alias.default,
    _ATEN.view.default: torch.reshape,  # what others compute may lie otherwise in memory
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _ATEN.native_group_norm_backward.default: _group_norm_backward,
}
