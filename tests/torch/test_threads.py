"""Modules are converted in threads at once: ``torch.export`` itself is not thread-safe."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

import finecast.torch as ft

pytestmark = pytest.mark.filterwarnings("ignore")  # filters are those of all threads

THREADS = 4


def test_modules_are_converted_in_threads_at_once() -> None:
    start = Barrier(THREADS)

    def converted(width: int) -> torch.Tensor:
        net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)).eval()
        x = torch.randn(2, 8)
        start.wait()
        lows = [ft.convert(net, (x,), "all:bf16") for _ in range(3)]
        with torch.no_grad():
            return (lows[-1](x) - net(x)).abs().max()

    with ThreadPoolExecutor(THREADS) as pool:
        errors = [*pool.map(converted, range(16, 16 + THREADS))]
    assert all(0 < error < 0.05 for error in errors)
