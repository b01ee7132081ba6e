"""What PyTorch's rates are computed from: times of products and of streams, stated here."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from finecast.engines.torch import rates
from finecast.numbers.formats import Format


@pytest.mark.real_clock
def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, own = [4e-3, 9e-3], [1e-3, 4e-3]  # 4 and x2.25 as fast: 3 in the mean
    monkeypatch.setattr(rates, "_products", lambda *_: (plain, own))
    monkeypatch.setattr(rates, "_streams", lambda *_: (1e-3, 1e-6))
    rates.rate.cache_clear()
    one, two = (rates.rate("cpu", Format.BF16, threads) for threads in (1, 2))
    rates.rate.cache_clear()
    assert one.speed == two.speed == pytest.approx(3.0)
    assert one.overhead_s == two.overhead_s == 1e-6
    assert two.product_tflops == 2 * one.product_tflops > 0
    assert two.bandwidth_gb_s == 2 * one.bandwidth_gb_s > 0
