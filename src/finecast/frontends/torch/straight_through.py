"""Gradients of products on codes, which pass straight through the roundings.

PyTorch has no derivative of ``torch._scaled_mm``, and none through integers: gradients would
be errors, or lack all that goes through quantized layers without a word. Here a rounding has
the gradient of the identity on the numbers that codes can hold, and zero beyond. A product has
that of the product of the numbers that its codes stand for. Codes of constants have none.

Graphs of converted modules call the functions of this module. Where no gradient is recorded
these are PyTorch's own ops, and exported programs have those alone.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.codes import ENCODED, coded_ops
from finecast.frontends.torch.restating import conversion

_ATEN: Final = torch.ops.aten
_CAST: Final = _ATEN._to_copy.default
_SCALED_MM: Final = _ATEN._scaled_mm.default
_INT_MM: Final = _ATEN._int_mm.default
_RESHAPED: Final = (_ATEN.reshape.default, _ATEN.constant_pad_nd.default)
# What e4m3 rounds to its largest number, 448, ends half a step beyond.
_E4M3_END: Final = 464.0
_HALF: Final = 0.5


def state_gradients(module: GraphModule) -> None:
    """Let what ``codes`` and ``scaled_products`` made have gradients for encoded values."""
    graph, ops = module.graph, coded_ops()
    functions = {_SCALED_MM: scaled_mm, _INT_MM: int_mm}
    back = ops.dequantize_per_tensor.default
    for node in [n for n in graph.nodes if n.target in (*functions, _CAST, back)]:
        codes = _codes(node.args[0])
        if node.target is back and codes.target is ops.quantize_per_tensor.default:
            arguments: Any = codes.args
            value, scale, zero, lowest, highest, _ = arguments
            ends = (lowest - zero - _HALF) * scale, (highest - zero + _HALF) * scale
            _pass_through(node, value, *ends)
        elif ENCODED in codes.meta and codes.target is _CAST:
            if node.target in functions:
                node.args = (*node.args, *_encoded(codes))
                node.target = functions[node.target]
            elif conversion(node) is torch.float32:
                _pass_through(node, *_encoded(codes))
    module.recompile()


def _codes(node: Any) -> FxNode:
    """The node that gives the numbers which ``node`` has in another shape."""
    while node.target in _RESHAPED:
        node = node.args[0]
    return node


def _encoded(codes: FxNode) -> tuple[Any, float, float]:
    """The numbers that are rounded to codes, and the ends of those that are not clipped."""
    steps: Any = codes.args[0]
    if steps.target is _ATEN.clamp.default:
        return steps.args[0], -_E4M3_END, _E4M3_END
    return steps.args[0] if steps.target is _ATEN.round.default else steps, -math.inf, math.inf


def _pass_through(decoded: FxNode, value: FxNode, lowest: float, highest: float) -> None:
    graph = decoded.graph
    with graph.inserting_after(decoded):
        result = graph.call_function(rounded, (decoded, value, lowest, highest))
    result.meta = dict(decoded.meta)
    decoded.replace_all_uses_with(result, lambda reader: reader is not result)


def rounded(
    decoded: torch.Tensor, value: torch.Tensor, lowest: float, highest: float
) -> torch.Tensor:
    """``decoded``, whose gradient is that of ``value`` from ``lowest`` to ``highest``."""
    if not _recorded(value):
        return decoded
    with torch.no_grad():
        result = decoded.detach()
    return _Rounded.apply(result, _clipped(value, lowest, highest).reshape(decoded.shape))


def scaled_mm(
    codes: torch.Tensor,
    columns: torch.Tensor,
    rows: torch.Tensor,
    channels: torch.Tensor,
    bias: torch.Tensor | None,
    scale: None,
    dtype: torch.dtype,
    *encoded: Any,
) -> torch.Tensor:
    """``torch._scaled_mm`` with the gradients of ``encoded`` and the bias.

    ``encoded`` are the numbers that are rounded to the codes, and the ends of what is not
    clipped.
    """
    if not _recorded(encoded[0], bias):
        return _SCALED_MM(codes, columns, rows, channels, bias, scale, dtype)
    with torch.no_grad():
        result = _SCALED_MM(codes, columns, rows, channels, bias, scale, dtype)
    values = _clipped(*encoded).reshape(codes.shape)
    return _Product.apply(result, values, columns, rows * channels, bias)


def int_mm(codes: torch.Tensor, columns: torch.Tensor, *encoded: Any) -> torch.Tensor:
    """``torch._int_mm`` in fp32, with the gradient of ``encoded``, as in ``scaled_mm``."""
    if not _recorded(encoded[0]):
        return _INT_MM(codes, columns).to(torch.float32)
    with torch.no_grad():
        result = _INT_MM(codes, columns).to(torch.float32)
    values = _clipped(*encoded).reshape(-1, codes.shape[1])
    added = codes.shape[0] - values.shape[0]  # rows of zeros
    values = torch.nn.functional.pad(values, (0, 0, 0, added))
    return _Product.apply(result, values, columns, None, None)


def _recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient of one of them is recorded; no programs and traces record any."""
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return False
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _clipped(value: torch.Tensor, lowest: float, highest: float) -> torch.Tensor:
    return value if highest == math.inf else value.clamp(lowest, highest)


class _Rounded(torch.autograd.Function):
    """The first tensor, with the gradient of the second."""

    @staticmethod
    def forward(decoded: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        del value
        return decoded.view_as(decoded)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx
        return None, *gradients


class _Product(torch.autograd.Function):
    """A result, with the gradients of the product of values and columns that it is."""

    @staticmethod
    def forward(
        result: torch.Tensor,
        values: torch.Tensor,
        columns: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        del values, columns, scales, bias
        return result.view_as(result)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del output
        _, _, columns, scales, bias = inputs
        ctx.save_for_backward(columns, scales)
        ctx.bias_type = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        columns, scales = ctx.saved_tensors
        scaled = gradient if scales is None else (gradient * scales).to(gradient.dtype)
        values = scaled @ columns.t().to(gradient.dtype)
        bias = None if ctx.bias_type is None else gradient.sum(0).to(ctx.bias_type)
        return None, values, None, None, bias
