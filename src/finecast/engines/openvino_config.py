"""Settings under which OpenVINO computes in the types that a model states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from finecast.numbers.formats import Format

if TYPE_CHECKING:
    import openvino

HINT: Final = "INFERENCE_PRECISION_HINT"
"""The type that OpenVINO lowers fp32 ops to by itself; ``f32`` for none."""
HINTS: Final = {Format.FP32: "f32", Format.BF16: "bf16", Format.FP16: "f16"}
"""Its values by the format."""
DYNAMIC_QUANTIZATION: Final = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""Unless it is 0, operands of products with 8-bit weights are rounded to 8 bits, too."""
_THREADS: Final = "INFERENCE_NUM_THREADS"


def config(
    core: openvino.Core,
    device: str,
    hint: str,
    *,
    profiling: bool = False,
    serving: str = "LATENCY",
    threads: int = 0,
) -> dict[str, Any]:
    """Settings of ``compile_model``.

    Args:
        core: The core that compiles.
        device: The device to compile for.
        hint: OpenVINO's name of a precision.
        profiling: Whether times of kernels are recorded.
        serving: The performance hint: ``LATENCY`` or ``THROUGHPUT``.
        threads: Threads of a CPU; 0 for as many as OpenVINO chooses.
    """
    found: dict[str, Any] = {
        HINT: hint,
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
    }
    known = core.get_property(device, "SUPPORTED_PROPERTIES")
    if DYNAMIC_QUANTIZATION in known:
        found[DYNAMIC_QUANTIZATION] = 0
    if threads and _THREADS in known:
        found[_THREADS] = threads
    return found
