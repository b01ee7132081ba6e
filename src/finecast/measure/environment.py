"""The machine and the library versions that a measurement was made with."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from finecast.engines.base import cpus
from finecast.engines.numerics import recorded

_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "avx_vnni",
    "avx_ne_convert",
    "amx_tile",
    "amx_bf16",
    "amx_fp16",
    "amx_int8",
    "asimdhp",
    "bf16",
    "i8mm",
    "sve",
    "sme",
)
"""CPU flags that decide which low-precision kernels an engine has (x86, then Arm)."""

_LIBRARIES = (
    "numpy",
    "scipy",
    "ml-dtypes",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "openvino",
    "tensorflow-cpu",
    "torch",
)
_CPUINFO = Path("/proc/cpuinfo")

# Environment variables that forbid newer instructions to oneDNN, and to engines that ask it
# what the CPU has (OpenVINO, PyTorch). They are read when the process starts; the second, an
# older name, counts where the first is not set.
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# Values of the variable, and the instruction sets that each allows, as bits. Any other value
# (ALL, DEFAULT, newer ones) allows all. Source: oneDNN's dnnl_cpu_isa_t.
_ISA_BITS = {
    "SSE41": 0x1,
    "AVX": 0x3,
    "AVX2": 0x7,
    "AVX2_VNNI": 0xF,
    "AVX2_VNNI_2": 0x1F,
    "AVX512_CORE": 0x27,
    "AVX512_CORE_VNNI": 0x67,
    "AVX512_CORE_BF16": 0xE7,
    "AVX512_CORE_FP16": 0x1EF,
    "AVX10_1_512": 0x1EF,
    "AVX512_CORE_AMX": 0xFEF,
    "AVX10_1_512_AMX": 0xFEF,
}
# The lowest value that allows the instructions of a CPU flag.
_ISA_OF_FLAG = {
    "amx_tile": "AVX512_CORE_AMX",
    "amx_bf16": "AVX512_CORE_AMX",
    "amx_int8": "AVX512_CORE_AMX",
    "avx512_fp16": "AVX512_CORE_FP16",
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512_vnni": "AVX512_CORE_VNNI",
    "avx512f": "AVX512_CORE",
    "avx_vnni": "AVX2_VNNI",
    "avx2": "AVX2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is recorded beside a measurement: only those of equal environments compare.

    ``isa_limit`` is the environment variable that limits the instructions oneDNN may use, as
    ``NAME=VALUE``; None where it is not set. ``flags`` are the CPU's, whatever the limit.
    ``numerics`` has the settings of each engine that change numbers, and such variables of the
    environment as are set.
    """

    cpu: str
    flags: tuple[str, ...]
    isa_limit: str | None
    cores: int
    platform: str
    python: str
    finecast: str
    libraries: dict[str, str]
    numerics: dict[str, dict[str, str]]

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON content."""
        return {**asdict(self), "flags": list(self.flags)}


@cache
def environment() -> Environment:
    """This machine and this installation."""
    cpu, flags = _cpu(_CPUINFO.read_text() if _CPUINFO.exists() else "")
    return Environment(
        cpu=cpu,
        flags=flags,
        isa_limit=next((f"{n}={v}" for n in _ISA_LIMITS if (v := os.environ.get(n))), None),
        cores=cpus(),
        platform=platform.platform(),
        python=platform.python_version(),
        finecast=version_of("finecast") or "unknown",
        libraries={name: v for name in _LIBRARIES if (v := version_of(name))},
        numerics=recorded(),
    )


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, or None; imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu(cpuinfo: str) -> tuple[str, tuple[str, ...]]:
    name = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    line = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(line[1].split()) if line else set[str]()
    cpu = name[1].strip() if name else platform.processor() or platform.machine()
    return cpu, tuple(flag for flag in _FLAGS if flag in present)


def cpu_label(machine: Environment) -> str:
    """The CPU's name, and the limit on its instructions where one is set."""
    return machine.cpu + (f" ({machine.isa_limit})" if machine.isa_limit else "")


def local_target(machine: Environment | None = None) -> str:
    """The name of the target that describes this CPU best, as far as engines may use it.

    Args:
        machine: The CPU; None for this one.
    """
    flags = instruction_sets(machine or environment())
    for flag, target in (
        ("amx_bf16", "amx"),
        ("avx512_bf16", "avx512-bf16"),
        ("sve", "neoverse-v1"),
        ("avx512_vnni", "avx512-vnni"),
        ("avx_vnni", "avx2-vnni"),
    ):
        if flag in flags:
            return target
    return "avx2"


def instruction_sets(machine: Environment) -> tuple[str, ...]:
    """Those flags of the CPU whose instructions engines may use."""
    return tuple(flag for flag in machine.flags if _allowed(flag, machine.isa_limit))


def _allowed(flag: str, isa_limit: str | None) -> bool:
    """Whether engines may use the instructions of ``flag`` under ``isa_limit``."""
    limit = (isa_limit or "").partition("=")[2].upper()
    if limit not in _ISA_BITS or flag not in _ISA_OF_FLAG:
        return True
    return not _ISA_BITS[_ISA_OF_FLAG[flag]] & ~_ISA_BITS[limit]
