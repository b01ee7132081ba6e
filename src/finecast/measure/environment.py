"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from finecast.engines.cpus import cpus

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

# The variable with which oneDNN, and engines that ask it what the CPU has (OpenVINO, PyTorch),
# leave newer instructions alone; read as the process starts. The older name counts where the
# newer one is not set.
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What to record beside a figure, and to hold figures apart by.

    ``isa_limit`` is the variable that holds oneDNN to older instructions than ``flags`` has,
    as ``NAME=VALUE``; None where it is not set.
    """

    cpu: str
    flags: tuple[str, ...]
    isa_limit: str | None
    cores: int
    platform: str
    python: str
    finecast: str
    libraries: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Only lists, dicts, strings and numbers."""
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


def limited(machine: Environment) -> str:
    """The CPU's name, and the limit on its instructions where one is set."""
    return machine.cpu + (f" ({machine.isa_limit})" if machine.isa_limit else "")


def local_target() -> str:
    """The name of the target that describes this CPU best."""
    flags = environment().flags
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
