"""Values and constants as codes: the nodes by which PyTorch states 8-bit integers.

Inductor's passes for x86 recognise them around products and run those on integers.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from finecast.numbers.scaled import Scaled

_REGISTERS: Final = "torch.ao.quantization.fx._decomposed"


def coded_ops() -> Any:
    """PyTorch's ops on codes, which are there once their module was imported."""
    importlib.import_module(_REGISTERS)
    return torch.ops.quantized_decomposed


def round_trip(graph: FxGraph, value: FxNode, to: Scaled) -> tuple[FxNode, FxNode]:
    """Nodes that store ``value`` as codes of a tensor, and read them back to fp32."""
    grid = to.grid
    dtype: torch.dtype = getattr(torch, grid.dtype.name)
    range_of = (to.scale[0], to.zero_point, grid.lowest, grid.highest, dtype)
    codes = graph.call_function(coded_ops().quantize_per_tensor.default, (value, *range_of))
    back = graph.call_function(coded_ops().dequantize_per_tensor.default, (codes, *range_of))
    return codes, back


def stored_codes(tensor: torch.Tensor, to: Scaled) -> dict[str, torch.Tensor]:
    """What a constant is stored as: its codes, and the parameters of each channel."""
    scale = torch.tensor(to.scale, dtype=torch.float32)
    codes = torch.from_numpy(to.encode(tensor.detach().cpu().numpy()))
    zero = torch.full(scale.shape, to.zero_point, dtype=torch.int64)
    return {"codes": codes, "scale": scale, "zero": zero}


def read_back(graph: FxGraph, stored: dict[str, FxNode], to: Scaled) -> FxNode:
    """The node that reads a constant's codes back to fp32."""
    grid = to.grid
    dtype: torch.dtype = getattr(torch, grid.dtype.name)
    codes, scale, zero = (stored[name] for name in ("codes", "scale", "zero"))
    if to.axis is None:
        tensor = (codes, to.scale[0], to.zero_point, grid.lowest, grid.highest, dtype)
        return graph.call_function(coded_ops().dequantize_per_tensor.default, tensor)
    channels = (codes, scale, zero, to.axis, grid.lowest, grid.highest, dtype)
    return graph.call_function(coded_ops().dequantize_per_channel.default, channels)


def scales_of_products(module: GraphModule) -> dict[str, str]:
    """By the names of the FX nodes that read coded constants, the paths of their scales."""
    op = coded_ops().dequantize_per_channel.default
    return {
        user.name: str(back.args[1].target)
        for back in module.graph.find_nodes(op="call_function", target=op)
        for user in back.users
    }
