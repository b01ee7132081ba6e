"""Measured speeds of a device in each format, which its capability flags do not tell.

Measured once per process, device and thread count, within milliseconds: matrix products, and
an elementwise op on a large and on a tiny tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] - no public name
)

from finecast.engines.base import Capability
from finecast.engines.probe import PROBED
from finecast.frontends.torch.aten import DTYPES
from finecast.frontends.torch.codes import CODES
from finecast.numbers.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """What is timed on a kind of device.

    Attributes:
        products: Rows, inner size and columns of two products, the larger one last.
        elements: Of the tensor that an elementwise op reads.
        calls: Calls between two readings of the clock.
    """

    products: tuple[tuple[int, int, int], ...]
    elements: int
    calls: int = 1


_RUNS: Final = 15
_GIGA: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Speed of a format on a device.

    Attributes:
        product_tflops: Rate of the larger matrix product.
        speed: Time of the products in fp32 over theirs in this format (geometric mean).
        bandwidth_gb_s: Bytes that an elementwise op reads and writes in a second, in 1e9.
        overhead_s: Time of a kernel on a single element.
    """

    product_tflops: float
    speed: float
    bandwidth_gb_s: float
    overhead_s: float


@lru_cache(maxsize=32)
def rate(device: str, fmt: Format, threads: int) -> Rate:
    """The rate of ``fmt`` with ``threads`` threads (1 for a GPU)."""
    # A backend may ask while torch traces a graph, in a mode where tensors are fake.
    with _disable_current_modes(), one_thread(device):
        plain, own = _products(device, (Format.FP32, fmt))
        stream_s, overhead_s = _streams(device)
    # Measured on one thread: on a busy machine barriers between threads would hide differences
    # of formats. Products scale with the number of threads, overheads do not.
    sizes = _sizes(device)
    rows, inner, columns = sizes.products[-1]
    ratios = [a / b for a, b in zip(plain, own, strict=True)]
    return Rate(
        product_tflops=threads * 2.0 * rows * inner * columns / own[-1] / 1e12,
        speed=float((ratios[0] * ratios[1]) ** 0.5),
        bandwidth_gb_s=threads * 2 * 4 * sizes.elements / stream_s / _GIGA,
        overhead_s=overhead_s,
    )


def rate_here(device: str, fmt: Format) -> Rate:
    """The rate of ``fmt`` with the number of threads that torch uses now."""
    return rate(device, fmt, torch.get_num_threads() if device == "cpu" else 1)


def _products(device: str, formats: Sequence[Format]) -> list[list[float]]:
    """Least times by format and size, of calls in turns."""
    times: list[list[float]] = [[] for _ in formats]
    for rows, inner, columns in _sizes(device).products:
        runs: list[Call] = []
        for fmt in formats:
            if fmt.has_float_codes or (fmt.multiplies_integers and device != "cpu"):
                runs.append(coded_linear((rows, inner), columns, fmt, device))
                continue
            if fmt.multiplies_integers:
                runs.append(linear((rows, inner), columns, fmt, bias=False))
                continue
            a = torch.full((rows, inner), 0.5, device=device).to(DTYPES[fmt.storage])
            b = torch.full((columns, inner), 0.5, device=device).to(DTYPES[fmt.storage])
            runs.append(in_format(lambda a=a, b=b: torch.nn.functional.linear(a, b), fmt))
        for series, best in zip(times, least_times(runs, device), strict=True):
            series.append(best)
    return times


@contextmanager
def tf32_products() -> Generator[None]:
    """Inside, products in fp32 on CUDA GPUs are those of tf32; on CPUs nothing changes.

    The switch is read as a product begins, and is the process's: products in fp32 that another
    thread begins in between are in tf32, too.
    """
    switch: Any = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        yield
    finally:
        switch.fp32_precision = before


def in_format(call: Call, fmt: Format) -> Call:
    """``call``, whose products in fp32 are in tf32 if that is the format."""
    if fmt is not Format.TF32:
        return call

    def run() -> object:
        with tf32_products():
            return call()

    return run


def _streams(device: str) -> list[float]:
    """Least times of an elementwise op on a large tensor and on a single element."""
    large = torch.ones(_sizes(device).elements, device=device)
    tiny = torch.ones(1, device=device)
    return least_times([lambda: torch.neg(large), lambda: torch.neg(tiny)], device)


def least_times(
    calls: Sequence[Call], device: str, *, fewest: int = _RUNS, budget_s: float = 0.0
) -> list[float]:
    """The least time of each call, in turns: a disturbance only makes a time longer.

    On an accelerator it is that of several in a row, which are started while others compute.
    After ``fewest`` rounds it stops once ``budget_s`` per call is spent, at most at ``_RUNS``.
    """
    least, repeated = [float("inf")] * len(calls), _sizes(device).calls
    with torch.no_grad():
        for call in calls:
            call()
        end = time.perf_counter() + budget_s * len(calls)
        for turn in range(_RUNS):
            if turn >= fewest and time.perf_counter() > end:
                break
            for k, call in enumerate(calls):
                start = time.perf_counter()
                for _ in range(repeated):
                    call()
                wait_for(device)
                least[k] = min(least[k], (time.perf_counter() - start) / repeated)
    return least


def _sizes(device: str) -> _Sizes:
    """On a CPU products as in models, for a few tokens and a few hundred, and one activation.

    The elements of an activation of a small transformer are more than a first-level cache
    holds. An accelerator starts a kernel in the time in which it computes what is large for a
    CPU: smaller products, smaller tensors and single calls would tell of the start alone.
    """
    if device == "cpu":
        return _Sizes(products=((32, 768, 768), (256, 768, 3072)), elements=1 << 17)
    large = ((512, 1024, 1024), (4096, 4096, 4096))
    return _Sizes(products=large, elements=1 << 26, calls=10)


def wait_for(device: str) -> None:
    """Wait until a device has computed: calls on an accelerator return before that."""
    if device != "cpu":
        torch.accelerator.synchronize()


def capabilities(device: str) -> dict[Format, Capability]:
    """Which formats PyTorch's ops compute in on ``device``, and their measured speeds."""
    by_format = {
        fmt: Capability(runs=False, reason=f"PyTorch's ops do not compute in {fmt.label}")
        for fmt in PROBED
    }
    by_format[Format.TF32] = Capability(
        runs=False,
        reason="a switch of fp32: torch.set_float32_matmul_precision; of single products in"
        " training steps",
    )
    for fmt in (f for f in CODES if f.multiplies_integers):
        by_format[fmt] = Capability(
            runs=False,
            reason="products alone, in modules that torch.compile makes with frozen weights:"
            f' finecast.torch.tune(..., policy="auto:{fmt.label},bf16")',
        )
    by_format[Format.FP32] = Capability(runs=True, speed=1.0)
    for fmt in (f for f in CODES if f.has_float_codes):
        by_format[fmt] = Capability(
            runs=False,
            reason="linear layers alone, fast on GPUs with fp8 products:"
            f' finecast.torch.tune(..., policy="auto:{fmt.label},bf16")',
        )
    for fmt in (Format.BF16, Format.FP16):
        by_format[fmt] = Capability(runs=True, speed=rate_here(device, fmt).speed)
    return by_format


@contextmanager
def one_thread(device: str) -> Generator[None]:
    """Inside, torch uses one thread on the CPU; on other devices nothing changes."""
    before = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -------------------------------------------------- products whose constant weights are packed
#
# Inductor packs the weights of such modules into the layout of oneDNN's kernels, and products
# on integers only exist so. So these calls are timed where formats with integers are compared.

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
    if fmt.multiplies_integers:
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


def coded_linear(shape: Sequence[int], columns: int, fmt: Format, device: str) -> Call:
    """A product of codes of ``shape`` with those of weights of ``columns`` outputs.

    It is the op that modules state: in fp8, or in integers on a GPU.

    Raises:
        RuntimeError: If there is no such kernel.
    """
    *front, inner = shape
    dtype = torch.float8_e4m3fn if fmt.has_float_codes else torch.int8
    values = torch.ones((math.prod(front), inner), device=device).to(dtype)
    weights = torch.ones((columns, inner), device=device).to(dtype).t()
    if not fmt.has_float_codes:
        return lambda: torch.ops.aten._int_mm.default(values, weights)
    one = torch.ones((), device=device)
    kernel = torch.ops.aten._scaled_mm.default
    return lambda: kernel(values, weights, one, one, None, None, torch.float32)


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
