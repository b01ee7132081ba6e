"""Bounds on the size of what is written: with the toy engine of ``test_tuning``."""

from __future__ import annotations

import re

import numpy as np
import pytest

from finecast.data.function_workload import Run
from finecast.engines import get_engine
from finecast.errors import UsageError
from finecast.numbers.formats import Format
from finecast.tuning.goal import Goal
from finecast.tuning.result import Result
from finecast.tuning.size import SizeBound
from tests.tuning.test_tuning import Bench, bench

__all__ = ["bench"]

NUMBERS = 8 * 3 * 9 + 8 * 8 * 9 + 4 * 8


def bits(outcome: Result) -> float:
    """Mean bits of a weight by the plan's formats; each op here has weights of its own."""
    counts = {"conv0": 8 * 3 * 9, "conv1": 8 * 8 * 9, "head": 4 * 8}
    stored = {n: f.storage.bits for n, f in outcome.plan.formats.items()}
    return sum(count * stored[name] for name, count in counts.items()) / NUMBERS


def test_a_bound_is_kept_where_that_costs_time(bench: Bench) -> None:
    """Low ops take twice as long here, and without the bound all stay in fp32."""
    bench.engine.gain = 0.5
    assert not bench.tune().improved
    outcome = bench.tune(max_bits=20)
    assert outcome.improved
    assert bits(outcome) <= 20
    assert outcome.gain < 1
    # The small head and the pool keep fp32: what is not needed for the bound costs time.
    assert outcome.plan.formats["conv1"] is Format.FP16
    assert outcome.plan.formats["pool"] is Format.FP32


def test_the_file_keeps_a_bound(bench: Bench) -> None:
    bench.engine.gain = 0.5
    fp32 = bench.model.stat().st_size
    most = fp32 - NUMBERS
    outcome = bench.tune(max_size=most)
    assert outcome.improved
    assert outcome.built is not None
    assert outcome.tuned.size_bytes <= most < fp32


def test_a_bound_that_fp32_keeps_asks_for_nothing_else(bench: Bench) -> None:
    free, bounded = bench.tune(), bench.tune(max_size="1MB", max_bits=32)
    assert bounded.plan.digest == free.plan.digest
    bench.engine.gain = 0.5
    assert not bench.tune(max_bits=32).improved  # nothing is faster than fp32


def test_where_nothing_fits_it_says_what_the_smallest_takes_and_loses(bench: Bench) -> None:
    outcome = bench.tune(max_bits=8)
    assert not outcome.improved
    assert "no plan takes at most 8 bits a weight: the smallest takes" in outcome.why
    assert ", 16 bits a weight; it has " in outcome.why
    assert re.search(r"has [0-9.]+ on your data, and fp32 1$", outcome.why)


def test_a_bound_that_no_file_keeps_is_answered_in_the_same_way(bench: Bench) -> None:
    """Prices of a size that nothing takes overflowed: numpy warned of it."""
    with np.errstate(over="raise"):
        outcome = bench.tune(max_size=1)
    assert "no plan takes at most 1 byte: the smallest takes" in outcome.why


def test_where_what_fits_misses_it_says_what_the_best_has(bench: Bench) -> None:
    bench.engine.gain = 0.5
    x = np.load(bench.data)["x"]
    exact = get_engine("onnxruntime").load(bench.model).run({"x": x})["y"]

    def evaluate(run: Run) -> float:
        return 1.0 if np.array_equal(run({"x": x})["y"], exact) else 0.5

    outcome = bench.tune(max_bits=17, evaluate=evaluate)
    assert not outcome.improved
    assert "the best that takes at most 17 bits a weight has 0.5" in outcome.why


def test_a_model_larger_than_predicted_is_not_chosen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stored model takes decides, and not what was predicted of it."""
    bench.engine.gain = 0.5
    monkeypatch.setattr(SizeBound, "keeps", lambda *_: False)
    outcome = bench.tune(max_bits=20)
    assert not outcome.improved
    assert outcome.why == "no plan tried takes at most 20 bits a weight"


@pytest.mark.parametrize(
    ("given", "size"),
    [("120MB", 120_000_000), ("1.5 kB", 1500), ("2GiB", 2**31), ("77", 77), (77, 77)],
)
def test_sizes_that_users_write(given: str | int, size: int) -> None:
    assert Goal(max_size=given).max_size == size  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["many", "-3MB", "12 parsecs", "0", "0.1B", ""])
def test_what_is_no_size(given: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        Goal(max_size=given)  # type: ignore[arg-type]


def test_bits_that_hold_nothing() -> None:
    with pytest.raises(UsageError, match="hold no weight"):
        Goal(max_bits=0.0)
