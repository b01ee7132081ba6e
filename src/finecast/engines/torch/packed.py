"""Calls of products whose constant weights are packed, as in modules with frozen weights.

Inductor packs the weights of such modules into the layout of oneDNN's kernels, and products
on integers only exist so. So these calls are timed where formats with integers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from finecast.frontends.torch.aten import DTYPES
from finecast.numbers.formats import Format

Call = Callable[[], object]
_PLACES: Final = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
# Scale and zero point of values, and the arguments that ask for an fp32 result and no more.
_VALUES: Final = (0.01, 128)
_FP32_RESULT: Final = (1.0, 0, torch.float32, "none", [], "")


def linear(shape: Sequence[int], columns: int, fmt: Format, *, bias: bool = True) -> Call:
    """A product of values of ``shape`` with weights of ``columns`` outputs.

    Raises:
        RuntimeError: If there is no such kernel.
    """
    *front, inner = shape
    rows = math.prod(front)
    added = torch.zeros(columns) if bias else None
    if fmt.runs_on_codes:
        codes = torch.full((rows, inner), 130, dtype=torch.uint8)
        weights = torch.ones(columns, inner, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weights, [rows, inner])
        scales = (torch.ones(columns), torch.zeros(columns, dtype=torch.int32))
        kernel = torch.ops.onednn.qlinear_pointwise.default
        return lambda: kernel(codes, *_VALUES, packed, *scales, added, *_FP32_RESULT)
    values = torch.full((rows, inner), 0.5, dtype=DTYPES[fmt])
    plain = torch.full((columns, inner), 0.5, dtype=DTYPES[fmt])
    added = None if added is None else added.to(DTYPES[fmt])
    if fmt is Format.FP32:
        return lambda: torch.nn.functional.linear(values, plain, added)
    weights = torch.ops.mkldnn._reorder_linear_weight(plain, rows)
    pointwise = torch.ops.mkldnn._linear_pointwise
    return lambda: pointwise(values, weights, added, "none", [], "")


def coded_conv2d(
    shape: Sequence[int], weight: Sequence[int], options: Mapping[str, Any]
) -> Call:
    """A convolution of codes of ``shape``; ``options`` are arguments of ``aten::conv2d``.

    Raises:
        RuntimeError: If there is no such kernel.
        NotImplementedError: If its padding is ``same`` or ``valid``.
    """
    if options.get("padding") in ("same", "valid"):
        raise NotImplementedError("padding by name is not packed")
    channels = weight[0]
    layout = torch.channels_last
    codes = torch.full(tuple(shape), 130, dtype=torch.uint8).contiguous(memory_format=layout)
    weights = torch.ones(tuple(weight), dtype=torch.int8)
    scales = torch.ones(channels)
    zeros = torch.zeros(channels, dtype=torch.int64)
    where = (
        *(list(options.get(name) or default) for name, default in _PLACES.items()),
        options.get("groups", 1),
    )
    packed = torch.ops.onednn.qconv_prepack(weights, scales, *_VALUES, *where, list(shape))
    kernel = torch.ops.onednn.qconv_pointwise.default
    added = None if options.get("bias") is None else torch.zeros(channels)
    return lambda: kernel(codes, *_VALUES, packed, scales, zeros, added, *where, *_FP32_RESULT)
