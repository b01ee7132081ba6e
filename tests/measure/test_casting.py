"""A cast's rate is measured once per engine and device, whichever object stands for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finecast.engines.base import Engine, KernelTime
from finecast.measure.timing_cache import TimingCache
from finecast.native import profiles as rates
from finecast.numbers.formats import Format


@dataclass
class Casts(Engine):
    """Loads anything; a cast takes 1 us and 1 ns a byte."""

    name: str = "toy"
    device: str = "CPU"
    loads: list[int] = field(default_factory=list[int])

    def load(self, model: Path | bytes, *, profiling: bool = False) -> Any:
        del profiling
        assert isinstance(model, bytes)
        self.loads.append(len(model))
        return self

    def profile(self, feeds: Mapping[str, Any], *, repeats: int) -> list[KernelTime]:
        del repeats
        bytes_moved = feeds["x"].size * 6  # four read in fp32, two written in bf16
        time_s = 1e-6 + 1e-9 * bytes_moved
        return [
            KernelTime(kernel="c", kind="Convert", ops=("cast",), format="", time_s=time_s)
        ]


def test_measured_once_per_name_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_KNOWN", {})
    first, second, other = Casts(), Casts(), Casts(device="GPU")
    rate = rates.measure_casts(first, Format.BF16)
    assert rate.overhead_s == pytest.approx(1e-6)
    assert rate.bandwidth_gb_s == pytest.approx(1.0)
    assert len(set(first.loads)) == 2
    assert rates.measure_casts(second, Format.BF16) is rate
    assert not second.loads
    rates.measure_casts(other, Format.BF16)
    assert len(set(other.loads)) == 2


def test_a_rate_that_the_book_has_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = TimingCache.here("toy", "CPU", tmp_path / "timing_cache.db")
    first, second = Casts(), Casts()
    monkeypatch.setattr(rates, "_KNOWN", {})
    rate = rates.measure_casts(first, Format.BF16, cache)
    rates._KNOWN.clear()
    assert rates.measure_casts(second, Format.BF16, cache) == rate
    assert not second.loads
    rates.measure_casts(second, Format.FP16, cache)
    assert second.loads
