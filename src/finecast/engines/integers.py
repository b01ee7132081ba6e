"""Formats of integer codes: engines that plans are made for, and whether ops ran on codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from finecast.engines.base import KernelTime
from finecast.numbers.formats import Format
from finecast.plugin import title_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What an engine needs so that it fuses quantized ops into kernels on integers.

    ``coded_results``: results have to be codes, too (``rules.scaled_operands.coded_result``);
    otherwise its kernels can give floats. ``if_named``: it is not tried unless it is named,
    as it loses many digits, or gains in few models.
    """

    coded_results: bool = False
    if_named: bool = False


_WEIGHTS: Final = {
    "openvino": Fusion(if_named=True),
    "onnxruntime": Fusion(if_named=True),
}
FUSIONS: Final[Mapping[Format, Mapping[str, Fusion]]] = {
    Format.INT8: {"openvino": Fusion(), "onnxruntime": Fusion(coded_results=True)},
    Format.INT8_WEIGHTS: {"openvino": Fusion()},
    # ONNX Runtime's products by exact values and weights in 8 bits are slower than fp32.
    Format.INT4_WEIGHTS: _WEIGHTS,
    Format.INT8_DYNAMIC: _WEIGHTS,
    Format.INT4_DYNAMIC: _WEIGHTS,
    Format.INT8_WEIGHTS_BF16: {"openvino": Fusion(if_named=True)},
    Format.INT4_WEIGHTS_BF16: {"openvino": Fusion(if_named=True)},
    # OpenVINO has one size of groups for the values of a whole model.
    Format.INT8_DYNAMIC_128: {"onnxruntime": Fusion(if_named=True)},
    Format.INT4_DYNAMIC_128: {"onnxruntime": Fusion(if_named=True)},
    # For compiled modules, whose products on integers are seen as they compile.
    Format.INT8_DYNAMIC_ROW: {},
    # For modules, whose graphs state the products themselves.
    Format.FP8: {},
    Format.FP8_DYNAMIC_ROW: {},
}
"""Engines that plans in a format are made for: their kernels dequantize operands."""

INTEGERS: Final = frozenset({"int8", "uint8"})
"""Labels of the types that kernels on codes of values compute in."""
_CODES: Final = INTEGERS | {"int4", "uint4"}


def fuses(engine: str, fmt: Format) -> bool:
    """Whether plans in ``fmt``, which has scales, are made for ``engine``."""
    return engine in FUSIONS.get(fmt, ())


def tried_unnamed(engine: str) -> tuple[Format, ...]:
    """The formats of codes that are tried for ``engine`` where nobody names a format."""
    fusions = ((fmt, engines.get(engine)) for fmt, engines in FUSIONS.items())
    return tuple(fmt for fmt, fusion in fusions if fusion is not None and not fusion.if_named)


def codes_results(engine: str, fmt: Format) -> bool:
    """Whether kernels of ``engine`` in ``fmt`` have to give codes."""
    fusion = FUSIONS.get(fmt, {}).get(engine)
    return fusion is not None and fusion.coded_results


def engines_for(fmt: Format) -> str:
    """Titles of the engines that plans in ``fmt`` are made for, as text."""
    titles = map(title_of, FUSIONS.get(fmt, ()))
    return " or ".join(titles) or ("PyTorch" if fmt in FUSIONS else "no engine")


def not_as_planned(
    kernels: Sequence[KernelTime], planned: Mapping[str, Format]
) -> dict[str, str]:
    """Ops of ``planned`` that did not run on 8-bit integers, with the formats they ran in.

    In a format for constants alone a kernel computes in floats, but has to read constants of
    at most 8 bits. An op that no kernel names is not judged: it was fused or removed.
    """
    failed: dict[str, str] = {}
    for name, fmt in planned.items():
        ran = [k for k in kernels if name in k.ops]
        on_codes = (k.format in INTEGERS if fmt.runs_on_codes else reads_codes(k) for k in ran)
        if ran and not any(on_codes):
            failed[name] = " and ".join(sorted({k.format for k in ran}))
    return failed


def reads_codes(kernel: KernelTime) -> bool:
    """Whether the kernel reads constants of integers of at most 8 bits."""
    return not _CODES.isdisjoint(kernel.constants)
