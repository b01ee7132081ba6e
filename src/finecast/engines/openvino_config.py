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


def config(
    core: openvino.Core,
    device: str,
    hint: str,
    *,
    profiling: bool = False,
    serving: str = "LATENCY",
) -> dict[str, Any]:
    """Settings of ``compile_model``.

    Args:
        core: The core that compiles.
        device: The device to compile for.
        hint: OpenVINO's name of a precision.
        profiling: Whether times of kernels are recorded.
        serving: The performance hint: ``LATENCY`` or ``THROUGHPUT``.
    """
    found: dict[str, Any] = {
        HINT: hint,
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
    }
    if DYNAMIC_QUANTIZATION in core.get_property(device, "SUPPORTED_PROPERTIES"):
        found[DYNAMIC_QUANTIZATION] = 0
    return found
