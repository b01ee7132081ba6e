"""The peers as a table: environment, driver, options, and how the engine runs their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One way to use a tool.

    Attributes:
        title: Its name in the tables.
        env: A key of ``environments.REQUIREMENTS``; empty for the interpreter that runs this.
        driver: A module of ``drivers``.
        options: What the driver gets.
        hints: OpenVINO's precision hints that its files are run with. The fastest one that
            keeps the criterion counts.
        transformer: Whether models of transformers are told as such by ``transformer``.
        used: How the tool is used, for the page.
    """

    title: str
    env: str
    driver: str
    used: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hints: tuple[str, ...] = ("f32",)
    transformer: bool = False


FINECAST: Final = "finecast"
_EITHER: Final = ("f32", "bf16")

TOOLS: Final[Mapping[str, Tool]] = {
    FINECAST: Tool(
        title="finecast", env="", driver="by_finecast",
        used="`tune` with its defaults to OpenVINO's IR and the metric as a function; no price"
        " book",
    ),
    "hint-bf16": Tool(
        title="OpenVINO's hint, bf16", env="", driver="by_hint", hints=("bf16",),
        used="the fp32 model, run with `INFERENCE_PRECISION_HINT` bf16, OpenVINO's default"
        " where the CPU has it",
    ),
    "hint-f16": Tool(
        title="OpenVINO's hint, f16", env="", driver="by_hint", hints=("f16",),
        used="the same with f16, where the CPU has it",
    ),
    "nncf-quantize": Tool(
        title="NNCF `quantize`", env="nncf", driver="by_nncf", options={"way": "quantize"},
        hints=_EITHER, transformer=True,
        used="all of the calibration data; `ModelType.TRANSFORMER` for transformers",
    ),
    "nncf-accuracy": Tool(
        title="NNCF `quantize_with_accuracy_control`", env="nncf", driver="by_nncf",
        options={"way": "accuracy"}, hints=_EITHER, transformer=True,
        used="the same with the metric on all search data and the drop as `ABSOLUTE`",
    ),
    "nncf-weights": Tool(
        title="NNCF `compress_weights`", env="nncf", driver="by_nncf",
        options={"way": "weights"}, hints=_EITHER,
        used="weights in 8 bits; OpenVINO then quantizes what meets them by itself, as is its"
        " default",
    ),
    "onnxruntime-static": Tool(
        title="onnxruntime `quantize_static`", env="onnxruntime", driver="by_static",
        hints=_EITHER,
        used="after `quant_pre_process`; QDQ, weights by channel",
    ),
    "inc-onnx": Tool(
        title="neural-compressor, ONNX", env="neural-compressor", driver="by_inc",
        options={"way": "onnx"}, hints=_EITHER,
        used="`quantization.fit` with QDQ, the metric as `eval_func` and the loss as"
        " `absolute`",
    ),
    "inc-torch": Tool(
        title="neural-compressor, PyTorch", env="neural-compressor", driver="by_inc",
        options={"way": "torch"}, hints=_EITHER,
        used="the same with the module, exported to QDQ by the result's `export`",
    ),
    "olive": Tool(
        title="Olive `auto-opt`", env="olive", driver="by_olive", hints=_EITHER,
        used="for CPU, int8, QDQ; it takes a data set of a hub or none, so that it quantizes"
        " without data here",
    ),
    "aimet-amp": Tool(
        title="AIMET AMP", env="aimet", driver="by_aimet", hints=_EITHER,
        used="`choose_mixed_precision` among int8 and fp16: groups by the SQNR of four calls,"
        " the search by the metric on all search data; `to_onnx_qdq`",
    ),
    "converter-all": Tool(
        title="onnxconverter-common, all fp16", env="onnxconverter-common",
        driver="by_converter", options={"way": "all"},
        used="`convert_float_to_float16` with `keep_io_types`",
    ),
    "converter-auto": Tool(
        title="onnxconverter-common, auto", env="onnxconverter-common",
        driver="by_converter", options={"way": "auto"},
        used="`auto_convert_mixed_precision` on one call of the data, rtol 0.01 and atol"
        " 0.001 as its documentation has them",
    ),
    "autocast-bf16": Tool(
        title="ModelOpt AutoCast, bf16", env="modelopt", driver="by_modelopt",
        options={"type": "bf16"},
        used="with calibration data of one call",
    ),
    "autocast-fp16": Tool(
        title="ModelOpt AutoCast, fp16", env="modelopt", driver="by_modelopt",
        options={"type": "fp16"},
        used="the same in fp16",
    ),
}  # fmt: skip

# Models that are transformers, for tools that ask.
TRANSFORMERS: Final = frozenset({"sts_minilm_l6", "sst2_minilm_l6", "vit_tiny", "bert"})
