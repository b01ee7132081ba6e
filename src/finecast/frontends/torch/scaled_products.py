"""Linear layers on codes, stated as the ops that GPUs have kernels for.

These are ``torch._scaled_mm`` in fp8 and ``torch._int_mm`` in int8. On CPUs they give the same
numbers, slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.frontends.torch.aten import named_arguments
from finecast.frontends.torch.codes import BIASED, called, size_of
from finecast.frontends.torch.restating import conversion

_ATEN: Final = torch.ops.aten
_CAST: Final = _ATEN._to_copy.default
_MUL: Final = _ATEN.mul.Tensor
_RESHAPE: Final = _ATEN.reshape.default
_SCALED_MM: Final = _ATEN._scaled_mm.default
_ONE: Final = "finecast_one"
_BF16: Final = torch.bfloat16
_FP8: Final = torch.float8_e4m3fn
_INT8: Final = torch.int8
# What cuBLASLt takes by ``torch._int_mm`` in PyTorch 2.13: more rows than 16, and sizes of
# weights that are multiples of 8. Rows of zeros are added where there may be fewer.
_FEW_ROWS: Final = 16
_INT_SIZES: Final = 8


def takes_sizes(sizes: Sequence[Any]) -> bool:
    """Whether kernels on integers take weights of these sizes."""
    return all(isinstance(n, int) and n % _INT_SIZES == 0 for n in sizes)


def state_products(module: GraphModule) -> None:
    """Multiply codes where linear layers read the numbers that codes decode to.

    Where all that read a result in fp8 cast it to bf16 the kernel itself has the scales of
    rows and channels and the bias, and gives bf16. Else these are applied in fp32 to what it
    gives: with scales kernels for some GPUs give no fp32. Inductor fuses these ops.
    Layers in int8 whose sizes no kernel has stay on decoded numbers, which are the same.
    """
    for layer in module.graph.find_nodes(op="call_function", target=_ATEN.linear.default):
        product = _Product.of(layer)
        if product is None:
            continue
        casts = list(product.end.users)
        low = bool(casts) and all(conversion(c) is _BF16 for c in casts) and product.in_fp8
        with module.graph.inserting_before(casts[0] if low else layer):
            result = product.in_bf16(module) if low else product.in_fp32(module)
        for node in casts if low else [layer]:
            node.replace_all_uses_with(result)
    module.graph.eliminate_dead_code()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """The nodes of a linear layer on codes.

    Attributes:
        layer: It reads decoded numbers: of rows without their scales.
        codes, rows: The codes of what it reads, and a scale for each row, or one for all.
        stored, channels: The codes of its weights, and a scale for each channel, or for all.
        bias: What is added behind the scales; None for nothing.
        end: The layer's result, with scales and bias.
    """

    layer: FxNode
    codes: FxNode
    rows: FxNode | float
    stored: FxNode
    channels: FxNode
    bias: FxNode | None
    end: FxNode

    @classmethod
    def of(cls, layer: FxNode) -> Self | None:
        """The nodes around ``layer``, as ``codes`` makes them; None if it is on no codes."""
        values: Any
        weights: Any
        arguments = named_arguments(layer)
        values, weights = arguments["input"], arguments["weight"]
        one_scale = values.target is _MUL and _decodes(values.args[0])
        decoded = values.args[0] if one_scale else values
        if weights.target is not _MUL or not all(map(_decodes, (decoded, weights.args[0]))):
            return None
        end: Any = layer
        channels, rows, bias = weights.args[1], values.args[-1], arguments.get("bias")
        if not one_scale:
            sizes = weights.meta["val"].shape
            if values.args[0].meta["val"].dtype is _INT8 and not takes_sizes(sizes):
                return None
            (end,) = layer.users
            channels, rows, bias = channels.args[0], end.args[1], None
            readers = list(end.users)
            if len(readers) == 1 and BIASED in readers[0].meta:
                end, bias = readers[0], readers[0].args[1]
        return cls(
            layer=layer,
            codes=decoded.args[0],
            rows=rows,
            stored=weights.args[0].args[0],
            channels=channels,
            bias=bias,
            end=end,
        )

    @property
    def in_fp8(self) -> bool:
        """Whether codes are fp8's, not integers."""
        return self.codes.meta["val"].dtype is _FP8

    def in_fp32(self, module: GraphModule) -> FxNode:
        """New nodes for the layer's result, without scales of rows and a bias behind them."""
        if not isinstance(self.rows, FxNode):
            one, scale = _one(module, self.channels), self._one_scale()
            result = self._as_before(self._multiplied(one, scale, None, torch.float32))
            add = _ATEN.add.Tensor
            return (
                result
                if self.bias is None
                else called(self.layer.graph, add, result, self.bias)
            )
        if self.in_fp8:
            one = _one(module, self.channels)
            sums = self._multiplied(one, one, None, torch.float32)
        else:
            sums = self._summed()
        return self._as_before(called(self.layer.graph, _MUL, sums, self.channels))

    def in_bf16(self, module: GraphModule) -> FxNode:
        """New nodes for the result with scales and bias."""
        graph, bias = self.layer.graph, self.bias
        if isinstance(self.rows, FxNode):
            # By one axis first: with no rows the kernel does not take the strides of two.
            rows = called(graph, _RESHAPE, self.rows, [-1])
            rows = called(graph, _ATEN.unsqueeze.default, rows, 1)
            channels = called(graph, _ATEN.unsqueeze.default, self.channels, 0)
        else:
            rows, channels = _one(module, self.channels), self._one_scale()
        low = None if bias is None else called(graph, _CAST, bias, dtype=_BF16)
        return self._as_before(self._multiplied(rows, channels, low, _BF16))

    def _one_scale(self) -> FxNode:
        """The scale of the product of two tensors that have one each."""
        return called(self.layer.graph, _MUL, self.channels, self.rows)

    def _multiplied(
        self, rows: FxNode, channels: FxNode, bias: FxNode | None, dtype: torch.dtype
    ) -> FxNode:
        graph, inner = self.layer.graph, self.codes.meta["val"].shape[-1]
        codes = called(graph, _RESHAPE, self.codes, [-1, inner])
        columns = called(graph, _ATEN.t.default, self.stored)
        return called(graph, _SCALED_MM, codes, columns, rows, channels, bias, None, dtype)

    def _summed(self) -> FxNode:
        """Sums of products of integers, in fp32."""
        graph, whole = self.layer.graph, self.codes.meta["val"]
        rows = called(graph, _RESHAPE, self.codes, [-1, whole.shape[-1]])
        count = rows.meta["val"].shape[0]
        few = not isinstance(count, int) or count <= _FEW_ROWS
        if few:
            rows = called(graph, _ATEN.constant_pad_nd.default, rows, [0, 0, 0, _FEW_ROWS])
        columns = called(graph, _ATEN.t.default, self.stored)
        sums = called(graph, _ATEN._int_mm.default, rows, columns)
        if few:
            sums = called(graph, _ATEN.slice.Tensor, sums, 0, 0, -_FEW_ROWS)
        return called(graph, _CAST, sums, dtype=torch.float32)

    def _as_before(self, result: FxNode) -> FxNode:
        """``result``, a matrix, with the layer's own axes."""
        whole = self.codes.meta["val"].shape
        if len(whole) == 2:
            return result
        axes = [size_of(self.codes, axis) for axis in range(len(whole) - 1)]
        sizes = [*axes, self.stored.meta["val"].shape[0]]
        back = self.layer.graph.call_function(_RESHAPE, (result, sizes))
        fake = self.layer.meta["val"].to(result.meta["val"].dtype)
        back.meta = {**self.layer.meta, "val": fake}
        return back


def _decodes(node: FxNode) -> bool:
    """Whether the node casts codes to fp32."""
    read = node.all_input_nodes
    return conversion(node) is torch.float32 and read[0].meta["val"].dtype in (_FP8, _INT8)


def _one(module: GraphModule, like: FxNode) -> FxNode:
    """A new node that reads the module's 1 in fp32, which stands for no scale."""
    if not hasattr(module, _ONE):
        held = module.get_buffer(str(like.target))
        module.register_buffer(_ONE, held.new_ones(()))
    node = module.graph.get_attr(_ONE)
    node.meta = {**like.meta, "val": like.meta["val"].new_ones(())}
    return node
