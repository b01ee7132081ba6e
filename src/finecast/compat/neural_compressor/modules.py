"""Mixed precision of an ``nn.Module`` without example inputs: module by module.

Each module that the matmul engine runs gets low parameters and a cast on either side. Given
example inputs, ``finecast.torch.convert`` plans the whole graph instead.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

CONVERTED: Final = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.LSTM,
    nn.GRU,
    nn.RNN,
    nn.LSTMCell,
    nn.GRUCell,
    nn.RNNCell,
)


class LowModule(nn.Module):
    """Computes ``inner`` in ``dtype``; takes and gives fp32."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner.to(dtype)
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast in, compute, cast out."""
        args, kwargs = tree_map(lambda x: _cast(x, torch.float32, self.dtype), (args, kwargs))
        result = self.inner(*args, **kwargs)
        return tree_map(lambda x: _cast(x, self.dtype, torch.float32), result)


def convertible(module: nn.Module) -> dict[str, str]:
    """Class by name of the submodules that can be converted."""
    return {
        name: type(one).__name__
        for name, one in module.named_modules()
        if isinstance(one, CONVERTED)
    }


def lower_modules(
    module: nn.Module, names: Mapping[str, str], dtype: torch.dtype
) -> nn.Module:
    """A copy of ``module`` with the submodules called ``names`` in ``dtype``."""
    result = copy.deepcopy(module)
    if "" in names:
        return LowModule(result, dtype)
    for name in names:
        parent_name, _, last = name.rpartition(".")
        parent = result.get_submodule(parent_name)
        setattr(parent, last, LowModule(getattr(parent, last), dtype))
    return result


def _cast(x: object, source: torch.dtype, target: torch.dtype) -> object:
    if isinstance(x, torch.Tensor) and x.dtype is source:
        return x.to(target)
    return x
