"""Linear layers on codes, stated as layers of the numbers that codes stand for.

Converted modules multiply codes, and apply scales and biases behind the product. Beside the
fp32 module each such layer is one op, whose result has all of that. Law: the module computes
the same, but for roundings in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import named_arguments
from finecast.frontends.torch.codes import called, coded_ops
from finecast.frontends.torch.restating import conversion

_ATEN: Final = torch.ops.aten
_CAST: Final = _ATEN._to_copy.default
_ADD: Final = _ATEN.add.Tensor
_DETACH: Final = _ATEN.detach.default
_DIV: Final = _ATEN.div.Tensor
_LINEAR: Final = _ATEN.linear.default
_MUL: Final = _ATEN.mul.Tensor
_SCALED_MM: Final = _ATEN._scaled_mm.default
_INT_MM: Final = _ATEN._int_mm.default
_RESHAPED: Final = (_ATEN.view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default)
_PADDED: Final = (*_RESHAPED, _ATEN.constant_pad_nd.default)
_ENCODES: Final = (_ATEN.round.default, _ATEN.clamp.default)
_BEHIND: Final = (*_RESHAPED, _ATEN.slice.Tensor)
_CODES: Final = (torch.int8, torch.float8_e4m3fn)


def decode_products(module: GraphModule) -> bool:
    """State the products on codes in ``module`` on decoded numbers; whether there are any."""
    layers = [*_layers(module)]
    for layer in layers:
        with module.graph.inserting_before(layer.end.next):
            result = layer.decoded(module.graph)
        result.meta = {**layer.end.meta, "val": layer.end.meta["val"]}
        layer.end.replace_all_uses_with(result, lambda user, new=result: user is not new)
    # Scales of rows are constants for gradients: that is one op more, which has no partner.
    for node in module.graph.find_nodes(op="call_function", target=_DETACH) if layers else ():
        node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    return bool(layers)


def _layers(module: GraphModule) -> Iterator[_Layer]:
    for node in module.graph.nodes:
        layer = None
        if node.target in (_SCALED_MM, _INT_MM):
            layer = _Layer.of_codes(node)
        elif node.target is _LINEAR:
            layer = _Layer.of_rows(node)
        if layer is not None:
            yield layer


@dataclass(slots=True, kw_only=True)
class _Layer:
    """A product, what it multiplies, and what is applied to its result.

    Attributes:
        end: The result with scales and bias.
        values, weights: What is multiplied: codes, or numbers without some of their scales.
        zero: The code of the value 0.
        rows: What scales values by rows: the number or node by which they were divided.
        scales: Further factors of the values, and those of the weights.
        bias: What is added.
    """

    end: FxNode
    values: FxNode
    weights: FxNode
    zero: float = 0.0
    rows: Any = None
    scales: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    bias: FxNode | None = None

    @classmethod
    def of_codes(cls, product: FxNode) -> Self | None:
        """The layer of a product of two matrices of codes; None if they are none."""
        arguments: Any = product.args
        codes, stored = _before(arguments[0], _PADDED), arguments[1]
        if stored.target is not _ATEN.t.default or codes.meta["val"].dtype not in _CODES:
            return None
        encoded = _before(codes.args[0], _ENCODES) if codes.target is _CAST else codes
        rows = encoded.args[1] if encoded.target is _DIV else None
        layer = cls(end=product, values=codes, weights=stored.args[0], rows=rows)
        if product.target is _SCALED_MM:
            _, _, of_rows, of_channels, bias, *_ = arguments
            layer.scales = [(0, _before(of_rows, _RESHAPED)), (1, of_channels)]
            layer.bias = bias
        layer._follow()
        return layer

    @classmethod
    def of_rows(cls, product: FxNode) -> Self | None:
        """The layer of a product of rows without their scales; None if it is another one."""
        ops, arguments = coded_ops(), named_arguments(product)
        values, weights = arguments["input"], arguments["weight"]
        if values.target is not ops.dequantize_per_tensor.default:
            return None
        codes, _, zero, *_ = values.args
        encoded = codes.args[0] if codes.target is ops.quantize_per_tensor.default else codes
        if encoded.target is not _DIV or not isinstance(encoded.args[1], FxNode):
            return None
        rows = encoded.args[1]
        layer = cls(end=product, values=codes, weights=weights, zero=zero, rows=rows)
        layer._follow()
        return layer if layer.end is not product else None

    def _follow(self) -> None:
        """Take what scales the result and what is added to it into the layer."""
        by_rows = False
        while len(self.end.users) == 1 and self.bias is None:
            (user,) = self.end.users
            arguments: Any = user.args
            first, factor = arguments[0], arguments[1] if len(arguments) > 1 else None
            if user.target is _MUL and first is self.end:
                if factor is not self.rows and not _is_constant(factor):
                    return
                if factor is self.rows and by_rows:
                    return
                by_rows = by_rows or factor is self.rows
                self.scales.append((0 if factor is self.rows else 1, factor))
            elif user.target is _ADD and first is self.end and _is_constant(factor):
                self.bias = factor
            elif not (user.target in _BEHIND or conversion(user) is torch.float32):
                return
            self.end = user

    def decoded(self, graph: FxGraph) -> FxNode:
        """New nodes for the result."""
        operands = [_in_fp32(graph, self.values), _in_fp32(graph, self.weights)]
        if self.zero:
            operands[0] = called(graph, _ADD, operands[0], -float(self.zero))
        for which, scale in self.scales:
            factor = scale
            if isinstance(scale, FxNode) and which and scale.meta["val"].ndim == 1:
                factor = called(graph, _ATEN.unsqueeze.default, scale, 1)
            elif isinstance(scale, FxNode) and which and scale.meta["val"].ndim:
                factor = called(graph, _ATEN.t.default, scale)
            operands[which] = called(graph, _MUL, operands[which], factor)
        bias = () if self.bias is None else (_in_fp32(graph, self.bias),)
        result = called(graph, _LINEAR, *operands, *bias)
        dtype = self.end.meta["val"].dtype
        return result if dtype is torch.float32 else called(graph, _CAST, result, dtype=dtype)


def _before(node: Any, ops: tuple[Any, ...]) -> Any:
    """The node in front of those of ``ops``."""
    while node.target in ops:
        node = node.args[0]
    return node


def _in_fp32(graph: FxGraph, node: FxNode) -> FxNode:
    is_fp32 = node.meta["val"].dtype is torch.float32
    return node if is_fp32 else called(graph, _CAST, node, dtype=torch.float32)


def _is_constant(node: Any) -> bool:
    """Whether the node reads a tensor of the module, or casts one."""
    read = isinstance(node, FxNode) and (node.args[0] if conversion(node) else node)
    return isinstance(read, FxNode) and read.op == "get_attr"
