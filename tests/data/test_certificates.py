"""Certificates: bounds that hold as often as they say, on samples that were drawn anew."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, spearmanr

from finecast.data.certificates import (
    certify,
    decision_bound,
    provable_loss,
    samples_needed,
)
from finecast.data.metrics import METRICS
from finecast.data.samples import RankedSamples, Samples, SummedSamples
from finecast.engines.base import Array
from finecast.errors import UsageError

RNG = np.random.default_rng(0)
SCORES = RNG.normal(size=(40, 5)).astype(np.float32)
LABELS = RNG.integers(0, 5, 40)
LOW = SCORES + RNG.normal(size=SCORES.shape).astype(np.float32) / 5
ALL = np.arange(40)
SAMPLED = [name for name in METRICS if name != "max_abs"]


def labels_of(name: str) -> Array:
    return SCORES + 0.5 if name in ("mse", "mae") else LABELS


def samples_of(name: str, outputs: Array, rows: NDArray[np.intp] = ALL) -> Samples:
    total = METRICS[name].start()
    total.update({"y": outputs[rows]}, labels_of(name)[rows], {"y": SCORES[rows]})
    found = total.samples()
    assert found is not None
    assert found.value() == pytest.approx(total.result(), rel=1e-9, nan_ok=True)
    return found


@pytest.mark.parametrize("name", SAMPLED)
@given(data=st.data())
@settings(max_examples=15)
def test_values_are_those_of_the_metric_on_the_samples_drawn(
    name: str, data: st.DataObject
) -> None:
    drawn = np.array(data.draw(st.lists(st.integers(0, 39), min_size=4, max_size=60)))
    times = np.bincount(drawn, minlength=40)[None].astype(np.float64)
    found = samples_of(name, LOW).values(times)[0]
    assert found == pytest.approx(samples_of(name, LOW, drawn).value(), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("name", SAMPLED)
def test_clusters_are_drawn_whole(name: str) -> None:
    group = RNG.integers(0, 6, 40)
    clusters = samples_of(name, LOW).grouped(group)
    assert clusters.count == 6
    times = np.array([[2.0, 0, 1, 0, 0, 3]])
    assert clusters.values(times)[0] == pytest.approx(
        samples_of(name, LOW).values(times[:, group])[0], rel=1e-9
    )


@given(values=st.lists(st.sampled_from([0.0, 1.5, 1.5, -2.0, 7.0]), min_size=5, max_size=30))
def test_ranks_share_ties_as_spearman_does(values: list[float]) -> None:
    first, second = np.array(values), np.arange(len(values), dtype=np.float64) % 4
    found = RankedSamples(first=first, second=second).value()
    rho: Any = None if np.ptp(first) == 0 else spearmanr(first, second)
    wanted = math.nan if rho is None else rho.statistic
    assert found == pytest.approx(wanted, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("count", [60, 400, 30_000])
def test_without_a_pair_that_differs_the_bound_is_that_of_no_event(count: int) -> None:
    assert decision_bound(0, 0, count, 0.95) == pytest.approx(3 / count, rel=0.06)


@given(
    lost=st.integers(0, 40),
    won=st.integers(0, 40),
    confidence=st.sampled_from([0.8, 0.95, 0.999]),
)
def test_the_bound_of_decisions_lies_above_the_loss_and_grows_with_the_confidence(
    lost: int, won: int, confidence: float
) -> None:
    bound = decision_bound(lost, won, 80, confidence)
    assert (lost - won) / 80 <= bound <= 1
    assert decision_bound(lost, won, 80, 0.6) <= bound + 1e-6


@pytest.mark.parametrize("won", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("loss", [0.01, 0.05])
@pytest.mark.parametrize("count", [30, 150])
def test_bounds_of_decisions_are_exact(count: int, loss: float, won: float) -> None:
    """No chance is drawn: the outcomes whose bound is too small are summed."""
    missed, kept = 0.0, cache(decision_bound)
    wins = np.arange(count + 1)
    likely = wins[binom.pmf(wins, count, won) > 1e-6]
    for win in likely:
        rest = binom.pmf(win, count, won)
        at_risk = binom.pmf(np.arange(count - win + 1), count - win, (loss + won) / (1 - won))
        for lost in range(count - win + 1):
            if kept(lost, int(win), count, 0.95) >= loss:
                break
            missed += rest * at_risk[lost]
    assert missed <= 0.05


def scored(values: NDArray[np.float64], ends: tuple[float, float]) -> SummedSamples:
    terms = np.stack([values, np.ones(len(values))], axis=-1)
    return SummedSamples(
        terms=terms, metric=lambda sums: sums[..., 0] / sums[..., 1], score_range=ends
    )


@pytest.mark.parametrize("count", [50, 400, 600])
@pytest.mark.parametrize(
    ("draw", "loss"),
    [
        (lambda rng, n: (rng.random(n) < 0.01) * 1.0, 0.01),
        (lambda rng, n: (rng.random(n) < 0.003) * 1.0, 0.003),
        (lambda rng, n: (rng.random(n) < 0.5) * 1.0, 0.5),
        (lambda rng, n: np.minimum(rng.lognormal(-3, 2, n), 1), 0.1803),
        (lambda rng, n: np.where(rng.random(n) < 0.01, 1, rng.uniform(0, 0.02, n)), 0.0199),
    ],
    ids=["one percent", "three of a thousand", "half", "lognormal", "noise and one percent"],
)
def test_bounds_of_scores_with_a_range_hold(
    count: int, draw: Callable[[np.random.Generator, int], NDArray[np.float64]], loss: float
) -> None:
    """A mean that a few samples decide: the bootstrap was below the loss in up to 86%."""
    rng, runs, false = np.random.default_rng(4), 200, 0
    exact = scored(np.ones(count), (0.0, 1.0))
    for _ in range(runs):
        low = scored(1.0 - draw(rng, count), (0.0, 1.0))
        held = np.arange(count // 2, count)
        found = certify(exact, low, held, higher_is_better=True, confidence=0.95)
        false += found.bound < loss
    assert false <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)


def test_a_cluster_of_many_decisions_counts_for_more() -> None:
    """The bound is of the share of decisions, of which a large cluster has more."""
    sizes, rng = np.arange(1, 101), np.random.default_rng(2)
    group = np.repeat(np.arange(100), sizes)
    exact, low = np.ones(len(group)), (rng.random(len(group)) > 0.02).astype(np.float64)
    clusters = [scored(one, (0.0, 1.0)).grouped(group) for one in (exact, low)]
    held = np.arange(1, 100, 2)
    found = certify(clusters[0], clusters[1], held, higher_is_better=True, confidence=0.95)
    assert found.loss == pytest.approx(1 - clusters[1].part(held).value())
    # Without any loss the largest cluster bounds: 3 / (50 bets of .95 at the mean size).
    assert found.loss < found.bound < found.loss + 3.2 * 100 / (50 * sizes[held].mean()) * 2


@pytest.mark.parametrize("name", SAMPLED)
def test_metrics_have_a_bound_above_their_loss_if_samples_tell_it(name: str) -> None:
    """Of those whose range is not known fewer than 1,200 samples tell nothing."""
    metric = METRICS[name]
    exact = None if metric.ideal == math.inf else samples_of(name, SCORES)
    low, half = samples_of(name, LOW), np.arange(20, 40)
    few, many = (
        certify(
            one and one.part(rows),
            low.part(rows),
            held,
            higher_is_better=metric.higher_is_better,
            confidence=0.95,
        )
        for one, rows, held in (
            (exact, ALL, half),
            (exact, np.tile(ALL, 30), np.arange(600, 1200)),
        )
    )
    known = name in ("top1", "top5", "agreement", "cosine")
    assert math.isfinite(few.bound) == known
    assert few.loss < few.bound
    assert many.loss < many.bound < math.inf
    assert ("if no sample differs over 5 times" in many.method) != known
    assert (few.samples, many.samples) == (20, 600)
    assert many.method in str(many)


def test_where_no_sample_tells_the_models_apart_the_range_bounds_a_mean() -> None:
    same = samples_of("cosine", SCORES)
    found = certify(same, same, ALL[20:], higher_is_better=True, confidence=0.95)
    assert found.loss == 0
    assert found.bound == pytest.approx(2 * -math.log(0.05) / (0.9 * 20), rel=0.1)
    same = scored(np.ones(2000), (0.0, math.inf))
    found = certify(same, same, np.arange(1000), higher_is_better=False, confidence=0.95)
    assert found.bound == math.inf


def test_a_model_of_nan_has_no_bound() -> None:
    exact, low = samples_of("top1", SCORES), samples_of("top1", SCORES * np.nan)
    found = certify(exact, low, ALL[20:], higher_is_better=True, confidence=0.95)
    assert found.bound == math.inf


def test_the_largest_difference_has_no_samples() -> None:
    total = METRICS["max_abs"].start()
    total.update({"y": LOW}, None, {"y": SCORES})
    assert total.samples() is None


def test_what_so_many_samples_can_prove() -> None:
    assert samples_needed(0.01, 0.95, 0.02) == pytest.approx(1337, abs=5)
    assert provable_loss(400, 0.95, 0.02) == pytest.approx(0.0188, abs=0.0005)
    assert provable_loss(400, 0.95, 0.0) == pytest.approx(
        decision_bound(0, 0, 400, 0.95), rel=0.01
    )
    assert provable_loss(samples_needed(0.03, 0.9, 0.1), 0.9, 0.1) <= 0.03


@pytest.mark.parametrize("confidence", [0.5, 1.0, 95, math.nan])
def test_what_is_no_confidence_is_refused(confidence: float) -> None:
    same = samples_of("top1", SCORES)
    with pytest.raises(UsageError, match="is no confidence"):
        certify(same, same, ALL, higher_is_better=True, confidence=confidence)


def test_models_with_other_numbers_of_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="40 samples of the fp32 model beside 39"):
        certify(
            samples_of("top1", SCORES),
            samples_of("top1", LOW, np.arange(39)),
            ALL[20:],
            higher_is_better=True,
            confidence=0.95,
        )
