"""Facts about ATen's ops: which tensors share an op's format, and which numbers are operands.

By default every float tensor that an op reads or writes has the op's format; schemas do not
say where it must not, so tables do. Names are those of ``Node.native``: ``aten::mm``, without
the overload.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_leaves

from finecast.numbers.formats import Format

DTYPES: Final[Mapping[Format, torch.dtype]] = {
    Format.FP32: torch.float32,
    Format.BF16: torch.bfloat16,
    Format.FP16: torch.float16,
    Format.FP8_E4M3: torch.float8_e4m3fn,
    Format.FP8_E5M2: torch.float8_e5m2,
}
_LABELS: Final = {dtype: fmt.label for fmt, dtype in DTYPES.items()} | {torch.float64: "fp64"}

BODIES: Final = "higher_order"
"""The namespace of ops with bodies, as ``cond``."""

# Formats that ATen's float kernels are written for; fp8 exists for storage only.
ADMITTED: Final = frozenset({Format.FP32, Format.BF16, Format.FP16})

# Scale and shift, which CPU kernels and Inductor take in fp32 beside low values; statistics.
_AFFINE: Final = ("weight", "bias")
_NORM: Final = (*_AFFINE, "running_mean", "running_var")
_NORM_BACKWARD: Final = ("weight", "running_mean", "running_var", "save_mean")
# Log-sum-exp: saved in fp32 whatever the inputs' type.
_SAVED: Final = ((), (1,))
_READ_AGAIN: Final = (("logsumexp",), ())
FIXED: Final[Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]] = {
    "aten::batch_norm": (_NORM, ()),
    "aten::_native_batch_norm_legit_no_training": (_NORM, (1, 2)),
    "aten::_native_batch_norm_legit_functional": (_NORM, (1, 2, 3, 4)),
    "aten::_native_batch_norm_legit": (_NORM, (1, 2)),
    "aten::native_batch_norm": (_NORM, (1, 2)),
    "aten::_batch_norm_with_update_functional": (_NORM, (1, 2, 3, 4, 5)),
    "aten::native_batch_norm_backward": ((*_NORM_BACKWARD, "save_invstd"), (1, 2)),
    "aten::cudnn_batch_norm": (_NORM, (1, 2, 3)),
    "aten::cudnn_batch_norm_backward": ((*_NORM_BACKWARD, "save_var", "reserveSpace"), (1, 2)),
    "aten::layer_norm": (_AFFINE, ()),
    "aten::native_layer_norm": (_AFFINE, (1, 2)),
    "aten::native_layer_norm_backward": ((*_AFFINE, "mean", "rstd"), (1, 2)),
    "aten::group_norm": (_AFFINE, ()),
    "aten::native_group_norm": (_AFFINE, (1, 2)),
    "aten::native_group_norm_backward": (("weight", "mean", "rstd"), (1, 2)),
    **{
        f"aten::_scaled_dot_product_{kind}": fixed
        for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                     "cudnn_attention", "fused_attention_overrideable")
        for kind, fixed in ((name, _SAVED), (f"{name}_backward", _READ_AGAIN))
    },
    # It reads memory as it is laid out, and a cast removes gaps from the layout.
    "aten::as_strided": (("self",), (0,)),
}  # fmt: skip
"""Tensors that keep fp32 beside low ones: names of an op's arguments, and places of results.

Kernels take mixed types there. Statistics, and gradients of scale and shift, are not rounded.
"""
# Conversions read any format and write the one that an argument names.
CONVERSIONS: Final = frozenset({"aten::_to_copy", "aten::to", "prims::convert_element_type"})
# Views give the memory that they read another shape, without a copy.
VIEWS: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("view", "_unsafe_view", "alias", "detach", "unsqueeze", "squeeze", "expand", "t"),
        *("permute", "transpose", "select", "slice", "narrow", "as_strided", "diagonal"),
        *("unbind", "split", "split_with_sizes", "chunk", "unflatten", "view_as"),
    )
)
# These write into a tensor that is given to them, and so keep its type.
WRITERS: Final = frozenset({"aten::copy_", "aten::copy", "aten::set_"})


EPSILON: Final = "eps"
"""What schemas call a norm's epsilon; without one rms_norm takes that of the type."""

# Types in schemas of arguments that may be a number as an operand, such as the 2 in add(x, 2).
_OPERANDS: Final = frozenset({"number", "Optional[number]", "Tensor", "Optional[Tensor]"})
# Ops whose float arguments are operands, too. Those of other ops are settings, such as
# epsilons, which kernels keep in fp32.
_FLOAT_OPERANDS: Final = frozenset({"aten::nan_to_num", "aten::pad"})


def scalar_names(target: object) -> frozenset[str]:
    """Names of an op's arguments that, where a number is given for them, are operands."""
    if not isinstance(target, OpOverload):
        return frozenset()
    floats = target.name().partition(".")[0] in _FLOAT_OPERANDS
    types = _OPERANDS | ({"float", "Optional[float]"} if floats else set())
    schema = target._schema  # pyright: ignore[reportPrivateUsage] - torch has no public name
    return frozenset(a.name for a in schema.arguments if str(a.type) in types)


def named_arguments(node: FxNode) -> dict[str, Any]:
    """Arguments of a call by their names in the op's schema."""
    target = node.target
    if not isinstance(target, OpOverload):
        return dict(node.kwargs)
    return dict(zip(argument_names(node), node.args, strict=False)) | dict(node.kwargs)


def argument_names(node: FxNode) -> list[str]:
    """Names of the arguments in the schema of the op that a node calls, in order."""
    return [*_defaults(node)]


def port_names(node: FxNode) -> tuple[str, ...]:
    """The argument that each tensor input of a call belongs to, in order, with repetitions."""
    return tuple(
        name
        for name, argument in named_arguments(node).items()
        for one in tree_leaves(argument)
        if isinstance(one, FxNode)
    )


def _defaults(node: FxNode) -> dict[str, Any]:
    """The defaults of these arguments by name; None for those without one."""
    assert isinstance(node.target, OpOverload)
    schema = node.target._schema  # pyright: ignore[reportPrivateUsage] - torch has no public name
    return {a.name: a.default_value for a in schema.arguments}


def epsilon(node: FxNode) -> float | None:
    """A norm's epsilon, stated or by default; None for an op without one."""
    if not isinstance(node.target, OpOverload):
        return None
    default = _defaults(node)
    if EPSILON not in default:
        return None
    eps = named_arguments(node).get(EPSILON, default[EPSILON])
    return float(torch.finfo(torch.float32).eps) if eps is None else float(eps)


def is_number(arg: object) -> TypeGuard[int | float]:
    """Whether an argument is an int or float, and no bool."""
    return isinstance(arg, int | float) and not isinstance(arg, bool)


def dtype_label(dtype: torch.dtype) -> str:
    """A type as the graph names it: ``fp32``, ``int64``."""
    return _LABELS.get(dtype, str(dtype).removeprefix("torch."))


def type_label(tensor: torch.Tensor) -> str:
    """The type of a tensor as the graph names it; of a sparse or nested one its layout."""
    dense = tensor.layout is torch.strided
    return dtype_label(tensor.dtype) if dense else str(tensor.layout)


def is_layout(label: str) -> bool:
    """Whether a label is that of a layout, as ``torch.sparse_coo``: no op there is lowered."""
    return label.startswith("torch.")


def native_name(node: FxNode) -> str:
    """``aten::mm`` for ``torch.ops.aten.mm.default``; ``python::f`` for other functions.

    ``higher_order::cond`` for an op with bodies.
    """
    target = node.target
    if isinstance(target, OpOverload):
        return target.name().partition(".")[0]
    if isinstance(target, HigherOrderOperator):
        return f"{BODIES}::{target.name()}"
    if isinstance(target, str):
        return f"{node.op}::{target}"
    return f"python::{getattr(target, '__name__', target)}"
