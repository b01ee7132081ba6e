"""Kernels in low formats that not every CPU has: tests of their numbers ask for them first."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from finecast.engines import get_engine, probe
from finecast.engines.base import Capability
from finecast.engines.probe import probe_one
from finecast.numbers.formats import Format


def state_kernels(
    monkeypatch: pytest.MonkeyPatch, engine: str, kernels: Mapping[Format, bool]
) -> None:
    """Have ``engine`` run these formats or not, whatever this CPU has; others are probed."""
    device = get_engine(engine).device
    stated = {
        fmt: Capability(
            runs=runs, speed=2.0 if runs else None, reason="" if runs else "stated"
        )
        for fmt, runs in kernels.items()
    }
    monkeypatch.setattr(probe, "_cache", {(engine, device): stated})


def skip_without_int8(engine: str = "openvino") -> None:
    """Skips where int8 products are wrong: without VNNI their sums of 16 bits overflow."""
    if not probe_one(get_engine(engine), Format.INT8).runs:
        pytest.skip("this CPU has no integer products that are right")


def computes_bf16(engine: str = "openvino") -> bool:
    """Whether bf16 has kernels: on CPUs without AVX-512, OpenVINO computes it in fp32."""
    found = probe_one(get_engine(engine), Format.BF16)
    return found.runs and not found.in_fp32


def skip_without_bf16(engine: str = "openvino") -> None:
    """Skips where models in bf16 are computed in fp32, so that nothing shows in numbers."""
    if not computes_bf16(engine):
        pytest.skip(f"{engine} has no bf16 kernels on this CPU")
