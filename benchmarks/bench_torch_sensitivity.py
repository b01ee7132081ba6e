"""Sensitivities of a PyTorch module: one backward pass beside probing every point alone.

python -m benchmarks.bench_torch_sensitivity [NET ...]
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

# First, as it exits with a message where PyTorch is not installed.
from benchmarks.torch_common import Case, ids, images, settled  # isort: skip

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.common import report
from benchmarks.torch_nets import Bert
from benchmarks.torch_published import MobileNetV3
from finecast.frontends import torch as frontend
from tests.torch.errors import Errors, first_order, points_of, probed

CASES = {
    "bert2 1x32": Case(net=lambda: Bert(2, 1000), inputs=lambda: ids(1, 32)),
    "mobilenetv3": Case(net=MobileNetV3, inputs=lambda: images(1)),
}


def compare(name: str, case: Case) -> None:
    """Print how well both agree and how long each takes."""
    torch.manual_seed(0)
    args = case.inputs()
    captured = frontend.capture(settled(case.net(), args), args)
    points = points_of(captured)
    one_pass, pass_s = _timed(lambda: first_order(captured, points, args))
    each, probe_s = _timed(lambda: probed(captured, points, args))
    # Points that no output depends on are exactly 0 in both.
    live = (one_pass > 0) & (each > 0)
    octaves = np.abs(np.log2(one_pass[live] / each[live]))
    ranks: Any = spearmanr(one_pass[live], each[live])
    report(
        "torch sensitivities",
        f"{name}: sum of squared errors, one pass over probing",
        round(float(one_pass.sum() / each.sum()), 3),
        "x",
        points=len(points),
        rank_correlation=round(float(ranks.statistic), 3),
        median_factor=round(float(2 ** np.median(octaves)), 3),
        one_pass_s=round(pass_s, 3),
        probing_s=round(probe_s, 3),
    )


def _timed(work: Callable[[], Errors]) -> tuple[Errors, float]:
    start = time.process_time()
    return work(), time.process_time() - start


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for chosen in sys.argv[1:] or CASES:
        compare(chosen, CASES[chosen])
