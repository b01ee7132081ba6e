"""Settings under which OpenVINO computes in the types that a model states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from finecast.engines.numerics import openvino_settings

if TYPE_CHECKING:
    import openvino

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
        device: The device to compile for; settings that it does not know are left out.
        hint: OpenVINO's name of a precision.
        profiling: Whether times of kernels are recorded.
        serving: The performance hint: ``LATENCY`` or ``THROUGHPUT``.
        threads: Threads of a CPU; 0 for as many as OpenVINO chooses.
    """
    known = core.get_property(device, "SUPPORTED_PROPERTIES")
    stated = openvino_settings(hint) | ({_THREADS: threads} if threads else {})
    return {
        "PERFORMANCE_HINT": serving,
        "PERF_COUNT": profiling,
        **{name: value for name, value in stated.items() if name in known},
    }
