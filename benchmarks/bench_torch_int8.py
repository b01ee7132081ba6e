"""PyTorch modules tuned over int8: a digits CNN and MiniLM, by metrics on real data.

Everything is compiled with frozen weights. Speeds are ratios of processor time, the modules in
turns: `python -m benchmarks.bench_torch_int8 [digits] [minilm] [--policy auto:int8,bf16]`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from torch import nn

import finecast.torch as ft
from benchmarks.common import report, shared_case, skip
from benchmarks.torch_int8_nets import Digits, MiniLM, digits_data, train
from finecast.data.criterion import Criterion, CriterionKind
from finecast.engines.torch.integers import compiled_frozen
from finecast.tuning.result import Result

_BENCH: Final = "torch_int8"
_ROUNDS: Final = 25


def digits(policy: str) -> None:
    """A CNN trained on two thirds of scikit-learn's digits; top-1 on the rest, within 1%."""
    (images, labels), (unseen, wanted) = digits_data()
    net = train(Digits(), images, labels)
    batch = torch.export.Dim("batch", min=2, max=4096)

    def top_1(module: nn.Module) -> float:
        return float((module(unseen).argmax(1) == wanted).float().mean())

    example = (images[:64],)
    outcome = ft.tune(
        net,
        example,
        evaluate=top_1,
        policy=policy,
        criterion=Criterion(tolerance=0.01),
        options=ft.TuneOptions(dynamic_shapes=({0: batch},)),
    )
    _report("digits", net, example, outcome)


def minilm(policy: str) -> None:
    """MiniLM with its published weights; Spearman on STS, within 0.005."""
    case = shared_case("sts_minilm_l6")
    if case is None:
        skip(_BENCH, "shared/models is not here")
        return
    net = MiniLM.of_onnx(case.model())
    feeds = list(case.calib(n=16, batch=16))
    example = _inputs(max(feeds, key=lambda f: f["input_ids"].shape[1]))

    def spearman(module: nn.Module) -> float:
        def run(feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            return [module(*_inputs(feed)).numpy()]

        return float(case.metric(run, limit=400)["spearman"])

    free = {
        0: torch.export.Dim("batch", min=2, max=64),
        1: torch.export.Dim("tokens", min=2, max=512),
    }
    outcome = ft.tune(
        net,
        example,
        evaluate=spearman,
        policy=policy,
        criterion=Criterion(kind=CriterionKind.ABSOLUTE, tolerance=0.005),
        options=ft.TuneOptions(dynamic_shapes=(free, free)),
    )
    _report("minilm", net, example, outcome)


def _inputs(feed: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(feed["input_ids"]), torch.from_numpy(feed["attention_mask"])


def _report(
    name: str, net: nn.Module, example: tuple[torch.Tensor, ...], outcome: Result
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        blind = ft.convert(net, example, "matmult:int8")
    modules = {"fp32": net, "all int8": blind, "tuned": outcome.model}
    calls = {n: compiled_frozen(m, example, {})[0] for n, m in modules.items()}
    took = _in_turns(calls, example)
    for other in ("all int8", "tuned"):
        ratios = [a / b for a, b in zip(took["fp32"], took[other], strict=True)]
        report(_BENCH, f"{name}: {other} over fp32", median(ratios), "x", at_least=True, bar=1)
    report(
        _BENCH,
        f"{name}: metric",
        outcome.tuned.metric,
        "",
        fp32=outcome.baseline.metric,
        ops=outcome.counts,
        why=outcome.why,
        predicted_error=outcome.predicted_error,
        measured_error=outcome.measured_error,
        evaluations=outcome.evaluations,
        seconds=outcome.seconds,
        shape=[list(x.shape) for x in example],
        fp32_ms=1e3 * median(took["fp32"]),
        warnings=list(outcome.warnings),
    )


def _in_turns(
    calls: Mapping[str, Callable[..., Any]], example: tuple[torch.Tensor, ...]
) -> dict[str, list[float]]:
    """Seconds of processor time of each, round by round."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                call(*example)
                start = time.process_time()
                call(*example)
                took[name].append(time.process_time() - start)
    return took


CASES: Final = {"digits": digits, "minilm": minilm}


def main() -> None:
    """Run what is named, by default both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--policy", default="auto:int8,bf16")
    given = parser.parse_args()
    for name in given.names or CASES:
        CASES[name](given.policy)


if __name__ == "__main__":
    main()
