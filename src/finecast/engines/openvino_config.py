"""How OpenVINO compiles a model here: in the types that it states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import openvino

DYNAMIC_QUANTIZATION: Final = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""By default what meets 8-bit weights in a product is rounded to 8 bits; with 0 it is not."""


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
        core: What compiles.
        device: For what.
        hint: OpenVINO's name of a precision.
        profiling: Whether the times of kernels are counted.
        serving: OpenVINO's name of what it is to be best at: one call, or several at once.
    """
    found: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": hint,
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
    }
    if DYNAMIC_QUANTIZATION in core.get_property(device, "SUPPORTED_PROPERTIES"):
        found[DYNAMIC_QUANTIZATION] = 0
    return found
