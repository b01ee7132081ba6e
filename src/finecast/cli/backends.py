"""The backends that Intel Neural Compressor lists, and how to get those missing here.

Source: the support matrix of its version 2.x, ``docs/source/mix_precision.md``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """A backend: the formats documented for it, and how to install it.

    ``engine`` is finecast's own engine for it as (name, device), if there is one.
    """

    framework: str
    backend: str
    device: str
    formats: tuple[str, ...]
    install: str
    engine: tuple[str, str] | None = None


BACKENDS = (
    BackendRow(
        framework="ONNX",
        backend="OpenVINO",
        device="CPU",
        formats=("bf16", "fp16"),
        install="pip install openvino",
        engine=("openvino", "CPU"),
    ),
    BackendRow(
        framework="ONNX",
        backend="OpenVINO",
        device="GPU",
        formats=("fp16",),
        install="an Intel GPU and its compute runtime (driver)",
        engine=("openvino", "GPU"),
    ),
    BackendRow(
        framework="ONNX",
        backend="CPUExecutionProvider",
        device="CPU",
        formats=(),
        install="pip install onnxruntime",
        engine=("onnxruntime", "CPU"),
    ),
    BackendRow(
        framework="ONNX",
        backend="CUDAExecutionProvider",
        device="GPU",
        formats=("bf16", "fp16"),
        install="pip install onnxruntime-gpu (an NVIDIA GPU with CUDA)",
        engine=("onnxruntime", "CUDA"),
    ),
    BackendRow(
        framework="ONNX",
        backend="TensorrtExecutionProvider",
        device="GPU",
        formats=(),
        install="pip install onnxruntime-gpu tensorrt (an NVIDIA GPU)",
        engine=("onnxruntime", "Tensorrt"),
    ),
    BackendRow(
        framework="ONNX",
        backend="DnnlExecutionProvider",
        device="CPU",
        formats=("bf16",),
        install="build ONNX Runtime with --use_dnnl",
        engine=("onnxruntime", "Dnnl"),
    ),
    BackendRow(
        framework="PyTorch",
        backend="default",
        device="CPU",
        formats=("bf16", "fp16"),
        install="pip install 'finecast[torch]'",
        engine=("torch", "CPU"),
    ),
    BackendRow(
        framework="PyTorch",
        backend="default",
        device="GPU",
        formats=("bf16", "fp16"),
        install="a build of PyTorch with CUDA (an NVIDIA GPU)",
        engine=("torch", "CUDA"),
    ),
    BackendRow(
        framework="PyTorch",
        backend="ipex",
        device="CPU",
        formats=("bf16",),
        install="nothing to gain: retired, its kernels are in PyTorch",
    ),
    BackendRow(
        framework="TensorFlow",
        backend="default",
        device="CPU",
        formats=("bf16",),
        install="pip install 'finecast[tensorflow]'",
        engine=("tensorflow", "CPU"),
    ),
    BackendRow(
        framework="TensorFlow",
        backend="itex",
        device="CPU, GPU",
        formats=("bf16",),
        install="nothing to gain: archived (TensorFlow 2.15); its CPU part is in TensorFlow",
    ),
    BackendRow(
        framework="MXNet",
        backend="default",
        device="CPU",
        formats=("bf16",),
        install="retired in 2023, no engine of finecast's: export to ONNX",
    ),
)


def absent_backends(present: Collection[tuple[str, str]]) -> list[dict[str, Any]]:
    """The rows, as JSON, whose engine is not ``present``, which has (name, device) pairs."""
    rows = [asdict(row) for row in BACKENDS if row.engine not in present]
    return [{key: row[key] for key in row if key != "engine"} for row in rows]
