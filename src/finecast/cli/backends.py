"""The backends that the tools before finecast list, and how to get those missing here.

Source: the support matrix of Intel Neural Compressor 2.x, ``docs/source/mix_precision.md``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_LATER = "installed; finecast has no engine for it yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One row: what the seeds document for it, and what installs it.

    ``engine`` is finecast's own (name, device), where there is one; ``requires`` the module
    that is importable where it is installed.
    """

    framework: str
    backend: str
    device: str
    formats: tuple[str, ...]
    install: str
    requires: str = ""
    engine: tuple[str, str] | None = None


BACKENDS = (
    Backend(
        framework="ONNX",
        backend="OpenVINO",
        device="CPU",
        formats=("bf16", "fp16"),
        install="pip install openvino",
        engine=("openvino", "CPU"),
    ),
    Backend(
        framework="ONNX",
        backend="OpenVINO",
        device="GPU",
        formats=("fp16",),
        install="an Intel GPU and its compute runtime (driver)",
        engine=("openvino", "GPU"),
    ),
    Backend(
        framework="ONNX",
        backend="CPUExecutionProvider",
        device="CPU",
        formats=(),
        install="pip install onnxruntime",
        engine=("onnxruntime", "CPU"),
    ),
    Backend(
        framework="ONNX",
        backend="CUDAExecutionProvider",
        device="GPU",
        formats=("bf16", "fp16"),
        install="pip install onnxruntime-gpu (an NVIDIA GPU with CUDA)",
        engine=("onnxruntime", "CUDA"),
    ),
    Backend(
        framework="ONNX",
        backend="TensorrtExecutionProvider",
        device="GPU",
        formats=(),
        install="pip install onnxruntime-gpu tensorrt (an NVIDIA GPU)",
        engine=("onnxruntime", "Tensorrt"),
    ),
    Backend(
        framework="ONNX",
        backend="DnnlExecutionProvider",
        device="CPU",
        formats=("bf16",),
        install="build ONNX Runtime with --use_dnnl",
        engine=("onnxruntime", "Dnnl"),
    ),
    Backend(
        framework="PyTorch",
        backend="default",
        device="CPU",
        formats=("bf16",),
        install="pip install torch",
        requires="torch",
    ),
    Backend(
        framework="PyTorch",
        backend="ipex",
        device="CPU",
        formats=("bf16",),
        install="pip install intel-extension-for-pytorch (retired after PyTorch 2.8)",
        requires="intel_extension_for_pytorch",
    ),
    Backend(
        framework="TensorFlow",
        backend="default",
        device="CPU",
        formats=("bf16",),
        install="pip install tensorflow",
        requires="tensorflow",
    ),
    Backend(
        framework="TensorFlow",
        backend="itex",
        device="CPU, GPU",
        formats=("bf16",),
        install="pip install intel-extension-for-tensorflow[cpu]",
        requires="intel_extension_for_tensorflow",
    ),
    Backend(
        framework="MXNet",
        backend="default",
        device="CPU",
        formats=("bf16",),
        install="pip install mxnet (retired by Apache in 2023)",
        requires="mxnet",
    ),
)


def absent_backends(present: Collection[tuple[str, str]]) -> list[dict[str, Any]]:
    """The rows that no engine here covers; ``present`` are (engine, device)."""
    return [
        {
            "framework": row.framework,
            "backend": row.backend,
            "device": row.device,
            "formats": list(row.formats),
            "install": _LATER if _importable(row.requires) else row.install,
        }
        for row in BACKENDS
        if row.engine not in present
    ]


def _importable(module: str) -> bool:
    return bool(module) and importlib.util.find_spec(module) is not None
