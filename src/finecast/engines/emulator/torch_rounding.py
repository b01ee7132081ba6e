"""Rounding of tensors: by torch where its conversions are exact, else by numpy.

Law: ``convert_tensor`` is ``roundmodes.convert``, bit for bit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder, Rounding, convert

# Types whose conversions round to nearest even and overflow to infinity. Torch's fp8 types are
# not Neuron's, and whether they saturate depends on the processor.
_CASTS: Final = {Format.BF16: torch.bfloat16, Format.FP16: torch.float16}


def convert_tensor(
    x: torch.Tensor, how: Rounder, *, offset: int = 0, stream: int = 0
) -> torch.Tensor:
    """Convert an fp32 tensor; the results are fp32, in the same shape."""
    plain = how.rounding is Rounding.NEAREST_EVEN and not how.saturate and how.encoding is None
    if plain and how.format in (*_CASTS, Format.TF32, Format.FP32):
        out = _nearest(x, how.format)
        return _flushed(out, how.format) if how.flush_subnormals else out
    array = x.detach().cpu().numpy()
    rounded = np.asarray(convert(array, how, offset=offset, stream=stream))
    return torch.from_numpy(rounded.reshape(array.shape)).to(x.device)


def _nearest(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    if fmt is Format.FP32:
        return x
    if fmt in _CASTS:
        return x.to(_CASTS[fmt]).to(torch.float32)
    drop = Format.FP32.mantissa_bits - fmt.mantissa_bits
    bits = x.view(torch.int32)
    odd = (bits >> drop) & 1
    rounded = (bits + (1 << (drop - 1)) - 1 + odd) & -(1 << drop)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def _flushed(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    zero = torch.copysign(torch.zeros_like(x), x)
    return torch.where(x.abs() < fmt.smallest_normal, zero, x)
