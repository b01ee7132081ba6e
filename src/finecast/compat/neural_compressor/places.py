"""Intel Neural Compressor's names of devices and backends, and finecast's engines for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from finecast.engines import candidates, led_by_one_that_loads
from finecast.engines.base import Engine
from finecast.errors import UsageError
from finecast.naming import unknown_name

_DEVICES: Final = ("cpu", "gpu", "npu", "xpu")
_BACKENDS: Final = (
    "default",
    "itex",
    "ipex",
    "onnxrt_trt_ep",
    "onnxrt_cuda_ep",
    "onnxrt_dnnl_ep",
    "onnxrt_dml_ep",
)
# Backends of INC's documentation that finecast does not support: why, and what to do instead.
_UNSUPPORTED: Final[Mapping[str, tuple[str, str]]] = {
    "ipex": (
        "Intel's extension for PyTorch is discontinued; its kernels are in PyTorch",
        'use backend="default"',
    ),
    "onnxrt_dml_ep": (
        "finecast does not drive DirectML, which has no bf16",
        'give DirectML the file that finecast.convert(model, "low.onnx", "all:fp16") writes',
    ),
}
# The engine that runs ONNX models, by backend and device. INC's default is ONNX Runtime; here
# it is OpenVINO, because ONNX Runtime has no bf16 arithmetic on CPUs.
_ENGINES: Final[Mapping[tuple[str, str], str]] = {
    ("default", "cpu"): "openvino",
    ("default", "gpu"): "openvino:GPU",
    ("default", "npu"): "openvino:NPU",
    ("onnxrt_cuda_ep", "gpu"): "onnxruntime:CUDA",
    ("onnxrt_trt_ep", "gpu"): "onnxruntime:Tensorrt",
    ("onnxrt_dnnl_ep", "cpu"): "onnxruntime:Dnnl",
}


def check_place(device: str, backend: str) -> None:
    """Raise UsageError for an unknown device or backend, or one that is not supported."""
    for what, known, given in (("device", _DEVICES, device), ("backend", _BACKENDS, backend)):
        if given not in known:
            raise unknown_name(given, known, what=what)
    if backend in _UNSUPPORTED:
        reason, fix = _UNSUPPORTED[backend]
        raise UsageError(f"backend {backend!r}: {reason}", fix=fix)


def engine_that_runs(model: Path, device: str, backend: str) -> Engine:
    """The engine of ``engine_name``, loaded as a library.

    By default that is ONNX Runtime, INC's own engine, for a model that OpenVINO does not load.

    Raises:
        UsageError: As ``engine_name``.
        EngineError: If it is not installed.
    """
    spec = engine_name(device, backend)
    default = (backend, device) == ("default", "cpu")
    engines = candidates(None if default else spec)
    return led_by_one_that_loads(engines, model)[0]


def engine_name(device: str, backend: str) -> str:
    """The engine that runs ONNX models on a device by a backend, as ``NAME[:DEVICE]``.

    Raises:
        UsageError: If the backend does not run on the device.
    """
    found = _ENGINES.get((backend, device))
    if found is None:
        there = [d for b, d in _ENGINES if b == backend]
        raise UsageError(
            f"backend {backend!r} does not run on device {device!r}",
            fix="use device=" + " or ".join(f'"{d}"' for d in there),
        )
    return found
