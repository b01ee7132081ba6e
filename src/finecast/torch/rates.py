"""How fast this device really is in each format: a capability flag is not a speed.

Measured once per process, device and thread count: matrix products, a stream through memory,
and one conversion, in milliseconds of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch

from finecast.formats import Format
from finecast.frontends.torch.aten import DTYPES

# Products of the sizes that models have: a few tokens and a few hundred.
_SIZES: Final = ((32, 768, 768), (256, 768, 3072))
# A stream that fits no first-level cache: one activation of a small transformer.
_STREAM_ELEMENTS: Final = 1 << 17
_RUNS: Final = 7
_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Speed of a format on a device.

    Attributes:
        product_tflops: Rate of the larger matrix product.
        speed: Time of the products in fp32 over theirs in this format (geometric mean).
        bandwidth_gb_s: Rate at which an elementwise op reads and writes.
        overhead_s: Time of a kernel that does nothing.
    """

    product_tflops: float
    speed: float
    bandwidth_gb_s: float
    overhead_s: float


@lru_cache(maxsize=32)
def rate(device: str, fmt: Format, threads: int) -> Rate:
    """The rate of ``fmt``; ``threads`` only tells settings apart."""
    del threads
    plain = _products(device, Format.FP32)
    own = plain if fmt is Format.FP32 else _products(device, fmt)
    rows, inner, columns = _SIZES[-1]
    ratios = [a / b for a, b in zip(plain, own, strict=True)]
    a = torch.ones(_STREAM_ELEMENTS, device=device)
    tiny = torch.ones(1, device=device)
    stream_s = _best(lambda: torch.neg(a), device)
    overhead_s = _best(lambda: torch.neg(tiny), device)
    return Rate(
        product_tflops=2.0 * rows * inner * columns / own[-1] / 1e12,
        speed=float((ratios[0] * ratios[1]) ** 0.5),
        bandwidth_gb_s=2 * a.nbytes / stream_s / _GIGA,
        overhead_s=overhead_s,
    )


def rate_here(device: str, fmt: Format) -> Rate:
    """The rate of ``fmt`` with the threads that torch has now."""
    return rate(device, fmt, torch.get_num_threads())


def _products(device: str, fmt: Format) -> list[float]:
    times: list[float] = []
    for rows, inner, columns in _SIZES:
        a = torch.full((rows, inner), 0.5, device=device).to(DTYPES[fmt])
        b = torch.full((columns, inner), 0.5, device=device).to(DTYPES[fmt])
        times.append(_best(lambda a=a, b=b: torch.nn.functional.linear(a, b), device))
    return times


def _best(run: Callable[[], object], device: str) -> float:
    """The least of a few times: a disturbance only ever adds."""
    best = float("inf")
    with torch.no_grad():
        run()
        for _ in range(_RUNS):
            start = time.perf_counter()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
    return best
