"""Formats of whole numbers: the engines that plans are made for, and what ran as planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from finecast.engines.base import KernelTime
from finecast.numbers.formats import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What an engine's kernels in a format need.

    ``coded_results``: that results are stored as codes, too, as
    ``rules.scaled_operands.coded_result`` has it; else they give floats as well.
    """

    coded_results: bool = False


FUSIONS: Final[Mapping[Format, Mapping[str, Fusion]]] = {
    Format.INT8: {"openvino": Fusion(), "onnxruntime": Fusion(coded_results=True)},
    Format.INT8_WEIGHTS: {"openvino": Fusion()},
}
"""By format the engines for which plans are made: kernels of theirs dequantize."""

_INTEGERS: Final = frozenset({"int8", "uint8"})


def fuses(engine: str, fmt: Format) -> bool:
    """Whether plans in ``fmt``, which has scales, are made for ``engine``."""
    return engine in FUSIONS.get(fmt, ())


def codes_results(engine: str, fmt: Format) -> bool:
    """Whether kernels of ``engine`` in ``fmt`` have to give codes."""
    found = FUSIONS.get(fmt, {}).get(engine)
    return found is not None and found.coded_results


def engines_for(fmt: Format) -> str:
    """Those that plans in ``fmt`` are made for, in words."""
    return " or ".join(FUSIONS.get(fmt, ())) or "no engine"


def not_as_planned(
    kernels: Sequence[KernelTime], planned: Mapping[str, Format]
) -> dict[str, str]:
    """Those of ``planned`` that no kernel runs on 8-bit integers, and in what they ran.

    In a format for constants alone a kernel has to read them so, and computes in floats. An
    op that no kernel names is not judged: it was fused into one, or left out.
    """
    failed: dict[str, str] = {}
    for name, fmt in planned.items():
        ran = [k for k in kernels if name in k.ops]
        if ran and not any(_on_codes(k, fmt) for k in ran):
            failed[name] = " and ".join(sorted({k.format for k in ran}))
    return failed


def reads_codes(kernel: KernelTime) -> bool:
    """Whether constants that the kernel reads are 8-bit integers."""
    return not _INTEGERS.isdisjoint(kernel.constants)


def _on_codes(kernel: KernelTime, fmt: Format) -> bool:
    return reads_codes(kernel) if fmt.constants_only else kernel.format in _INTEGERS
