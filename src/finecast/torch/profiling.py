"""``profile``: time per call and the peak of the memory that tensors take.

On the CPU the peak is counted from the allocator's own events (``torch.profiler``'s memory
records), so that it is the tensors' and not the process's; on CUDA it is the allocator's
statistic. Both leave out what was allocated before the call, but for ``resident_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from finecast.measure.timing import Latency, latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Times of single calls, and the most bytes that a call had allocated at once."""

    latency: Latency
    peak_bytes: int
    resident_bytes: int

    @property
    def ms(self) -> float:
        """Median milliseconds of a call."""
        return 1e3 * self.latency.median_s

    @property
    def mb(self) -> float:
        """Peak of a call and what lay there before it, in 2**20 bytes."""
        return (self.peak_bytes + self.resident_bytes) / 2**20


def profile(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    warmup: int = 5,
    repeats: int = 10,
    min_time_s: float = 0.0,
) -> Profile:
    """Time ``fn(*args)`` and find its peak of tensor memory.

    Args:
        fn: A module, a compiled function, or a whole training step.
        args: Its arguments.
        warmup: Calls before the first that counts.
        repeats: Calls that are timed, at least.
        min_time_s: Time to spend on them, at least.
    """
    device = _device(fn, args)

    def call() -> None:
        fn(*args)
        if device == "cuda":
            torch.cuda.synchronize()

    timed = latency({"": call}, warmup=warmup, repeats=repeats, min_time_s=min_time_s)[""]
    measure = _cuda_peak if device == "cuda" else _cpu_peak
    return Profile(
        latency=timed, peak_bytes=measure(call), resident_bytes=resident_bytes(fn, args)
    )


def peak_bytes(fn: Callable[..., Any], args: Sequence[Any] = ()) -> int:
    """The most bytes that one call had allocated at once, beyond what was there before."""
    measure = _cuda_peak if _device(fn, args) == "cuda" else _cpu_peak
    return measure(lambda: fn(*args))


def resident_bytes(fn: object, args: Sequence[Any]) -> int:
    """Bytes of the parameters, buffers and tensor arguments, each memory counted once."""
    module = getattr(fn, "_orig_mod", fn)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if isinstance(module, torch.nn.Module):
        tensors += [*module.parameters(), *module.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _cpu_peak(call: Callable[[], None]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as recorded:
        call()
    kineto: Any = recorded.profiler.kineto_results  # type: ignore[union-attr]
    events = [
        (int(e.start_ns()), int(e.nbytes())) for e in kineto.events() if e.name() == "[memory]"
    ]
    now = most = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        now += change
        most = max(most, now)
    return most


def _cuda_peak(call: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _device(fn: object, args: Sequence[Any]) -> str:
    module = getattr(fn, "_orig_mod", fn)
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if isinstance(module, torch.nn.Module):
        tensors += list(module.parameters())
    return next((t.device.type for t in tensors), "cpu")
