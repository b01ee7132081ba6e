"""Settings under which OpenVINO computes in the types that a model states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import openvino

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
        "INFERENCE_PRECISION_HINT": hint,
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
    }
    if DYNAMIC_QUANTIZATION in core.get_property(device, "SUPPORTED_PROPERTIES"):
        found[DYNAMIC_QUANTIZATION] = 0
    return found
