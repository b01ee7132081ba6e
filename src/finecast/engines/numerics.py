"""Settings of engines that change numbers: what sessions state, and what users are told.

Law: each is stated in every session, also where it is the engine's default today; in the line
that runs the result, where it is not; and in the recorded environment. What changes the order
of sums alone, such as the number of threads, is not among them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from finecast.devices.kv_cache import KV_CACHE, kv_cache_settings
from finecast.numbers.formats import DYNAMIC, Format

HINT: Final = "INFERENCE_PRECISION_HINT"
"""The type that OpenVINO lowers fp32 ops to by itself; ``f32`` for none."""
HINTS: Final = {Format.FP32: "f32", Format.BF16: "bf16", Format.FP16: "f16"}
"""Its values by the format."""
DYNAMIC_QUANTIZATION: Final = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""Unless it is 0, values that meet weights in codes are rounded to 8 bits, too."""


def dynamic_group(labels: Iterable[str]) -> int:
    """How many numbers share a scale where kernels round values; 0 if none of ``labels`` does.

    ``labels`` are formats, and may be other texts, too.
    """
    known = {fmt.label: fmt.dynamic_group or 0 for fmt in DYNAMIC}
    return max((known.get(label, 0) for label in labels), default=0)


def openvino_settings(
    hint: str, formats: Iterable[str] = (), kv_cache: Format | None = None
) -> dict[str, str | int | bool]:
    """OpenVINO's properties under a precision hint, for a model with these ``formats``.

    Its defaults (2026.4) are those of the mode PERFORMANCE: a cache of keys and values in 8
    bits even in fp32, and dynamic quantization. The cache holds what attention computes, so it
    has the hint's type, unless a plan gives it another one. What another model of the process
    said of denormal numbers stays in the threads that it shares with this one, unless this one
    says so, too.
    """
    return {
        HINT: hint,
        "EXECUTION_MODE_HINT": "ACCURACY",
        **({KV_CACHE: hint} if kv_cache is None else kv_cache_settings(kv_cache)),
        DYNAMIC_QUANTIZATION: dynamic_group(formats),
        "CPU_DENORMALS_OPTIMIZATION": False,
    }


ONNXRUNTIME_CHANGED: Final[Mapping[str, str]] = MappingProxyType(
    # By default (4) products with 4-bit weights round the other operand to 8 bits (1.32).
    {"session.qdq_matmulnbits_accuracy_level": "1"}
)
"""Entries of ONNX Runtime's session options that differ from its defaults."""
ONNXRUNTIME: Final[Mapping[str, str]] = MappingProxyType(
    {
        **ONNXRUNTIME_CHANGED,
        "session.set_denormal_as_zero": "0",
        "session.x64quantprecision": "0",  # 1 takes a bit from weights on CPUs without VNNI
        "optimization.enable_gelu_approximation": "0",
        "optimization.enable_cast_chain_elimination": "0",
        "mlas.enable_gemm_fastmath_arm64_bfloat16": "0",
        "mlas.use_lut_gemm": "0",
    }
)
"""Entries of ONNX Runtime's session options."""

TENSORFLOW: Final = (
    "auto_mixed_precision",
    "auto_mixed_precision_cpu",
    "auto_mixed_precision_onednn_bfloat16",
)
"""Grappler's settings that lower a model; all are off but the one that is asked for."""
TENSORFLOW_REWRITES: Final[Mapping[Format, str]] = MappingProxyType(
    {Format.BF16: "auto_mixed_precision_onednn_bfloat16"}
)
"""The one of them that lowers a model to a format on a CPU."""

OF_SPEED: Final = frozenset(
    {
        *("PERFORMANCE_HINT", "NUM_STREAMS", "INFERENCE_NUM_THREADS"),
        *("threads", "intra_op_num_threads", "inter_op_num_threads", "execution_mode"),
    }
)
"""Settings that sessions report and that change speed, and of numbers the order of sums."""

DENORMALS: Final = "denormal numbers"


VARIABLES: Final = (
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "TF_SET_ONEDNN_FPMATH_MODE",
    "TF_ENABLE_ONEDNN_OPTS",
    "TF_ENABLE_AUTO_MIXED_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
)
"""Environment variables by which the libraries round operands or change kernels."""


def process_settings() -> dict[str, str]:
    """What decides numbers in this process, whatever the engine: variables that are set.

    And whether results below the least normal number are kept: a library that was compiled
    for speed may have told the processor to replace them by 0, for all code of the thread.
    """
    least = np.finfo(np.float32).smallest_normal
    kept = bool((np.full(4, least, np.float32) * np.float32(0.5)).all())
    return {**_variables(), DENORMALS: "kept" if kept else "0"}


def _variables() -> dict[str, str]:
    return {name: value for name in VARIABLES if (value := os.environ.get(name))}


def recorded() -> dict[str, dict[str, str]]:
    """What is recorded beside measurements: settings by engine, and variables that are set."""
    stated: dict[str, Mapping[str, object]] = {
        "openvino": openvino_settings(HINTS[Format.FP32]),
        "onnxruntime": ONNXRUNTIME,
        "tensorflow": dict.fromkeys(TENSORFLOW, "OFF"),
        "variables": _variables(),
    }
    return {
        engine: {k: str(v) for k, v in settings.items()} for engine, settings in stated.items()
    }
