"""Mixed precision of an ``nn.Module`` without example inputs: module by module.

Each module that the matmul engine runs gets low parameters and a cast on either side. Given
example inputs, ``finecast.torch.convert`` plans the whole graph instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from finecast.frontends.torch.converted import check_types_stay

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
    nn.MultiheadAttention,
)
# So many positional arguments are data that a module computes on; those after them (masks) are
# only compared or added.
_DATA_ARGUMENTS: Final = 3
_DATA_NAMES: Final = frozenset({"query", "key", "value", "input"})


class LowModule(nn.Module):
    """Computes ``inner`` in ``dtype``; takes and gives fp32.

    Laws: attributes of ``inner`` can be read from this module, parameters in fp32: code that
    computes with ``layer.weight`` itself stays right. The casts are hooks, because
    PyTorch's fused transformer layers call modules that have hooks, and read the parameters of
    all others without calling them.
    """

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner.to(dtype)
        self.dtype = dtype
        self.register_forward_pre_hook(_cast_in, with_kwargs=True)
        self.register_forward_hook(_cast_out)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; the hooks have cast the arguments."""
        return self.inner(*args, **kwargs)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> LowModule:
        check_types_stay(self, fn)  # the hooks cast to the type that it has now
        return super()._apply(fn, recurse)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":  # not set yet while this module is being copied
                raise
            return _cast(getattr(self.inner, name), self.dtype, torch.float32)


def _cast_in(
    module: LowModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def data(x: object) -> object:
        return _cast(x, torch.float32, module.dtype)

    def mask(x: object) -> object:
        return _cast(_clamped(x, module.dtype), torch.float32, module.dtype)

    first, rest = (
        tree_map(data, args[:_DATA_ARGUMENTS]),
        tree_map(mask, args[_DATA_ARGUMENTS:]),
    )
    named = {k: tree_map(data if k in _DATA_NAMES else mask, v) for k, v in kwargs.items()}
    return (*first, *rest), named


def _cast_out(module: LowModule, args: object, result: object) -> object:
    del args
    return tree_map(lambda x: _cast(x, module.dtype, torch.float32), result)


def _cast(x: object, source: torch.dtype, target: torch.dtype) -> object:
    if isinstance(x, torch.Tensor) and x.dtype is source:
        return x.to(target)
    return x


def _clamped(x: object, dtype: torch.dtype) -> object:
    """Clamp finite fp32 numbers to the range of ``dtype``.

    fp32's lowest number, the usual mask, would become -Inf in bf16, and rows of it NaN.
    """
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
        return x
    most = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-most, most))


def convertible(module: nn.Module) -> dict[str, str]:
    """The class of each submodule that can be converted, by name; none is inside another.

    A module that has several names is listed under each.
    """
    found: dict[str, str] = {}
    outer: str | None = None
    for name, one in module.named_modules(remove_duplicate=False):
        inside = outer is not None and (not outer or name.startswith(f"{outer}."))
        if isinstance(one, CONVERTED) and not inside:
            outer = name
            found[name] = type(one).__name__
    return found


def lower_modules(
    module: nn.Module, names: Mapping[str, str], dtype: torch.dtype
) -> nn.Module:
    """A copy of ``module`` with the submodules called ``names`` in ``dtype``.

    A parameter that they share with other modules is lowered in them only.
    """
    result = copy.deepcopy(module)
    if "" in names:
        return LowModule(result, dtype)
    lowered: dict[nn.Module, LowModule] = {}
    for name in names:
        parent_name, _, last = name.rpartition(".")
        parent = result.get_submodule(parent_name)
        one = getattr(parent, last)
        if isinstance(one, LowModule):  # the parent has two names, and came by the other
            continue
        if one not in lowered:
            lowered[one] = LowModule(copy.deepcopy(one), dtype)
        setattr(parent, last, lowered[one])
    for one in result.modules():
        if isinstance(one, nn.TransformerEncoder):
            one.use_nested_tensor = False  # only its fused layers take nested tensors
    return result
