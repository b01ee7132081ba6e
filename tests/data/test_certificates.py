"""Certificates: bounds that hold as often as they say, on samples that were drawn anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, bootstrap, norm, spearmanr

from finecast.data.certificates import (
    certify,
    provable_loss,
    samples_needed,
    score_bound,
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


def test_without_a_pair_that_differs_the_bound_is_the_rule_of_its_formula() -> None:
    right = np.ones(400, dtype=bool)
    z = 1.6448536269514722
    assert score_bound(right, right, 0.95) == pytest.approx(z**2 / (400 + z**2), rel=1e-4)


@given(
    pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80),
    confidence=st.sampled_from([0.8, 0.95, 0.999]),
)
def test_the_score_bound_lies_above_the_loss_and_grows_with_the_confidence(
    pairs: list[tuple[bool, bool]], confidence: float
) -> None:
    exact, low = (np.array(side) for side in zip(*pairs, strict=True))
    bound = score_bound(exact, low, confidence)
    assert exact.mean() - low.mean() <= bound <= 1
    assert score_bound(exact, low, 0.6) <= bound + 1e-6
    # Where the test just does not reject, its statistic is the quantile: Tango's equation (6).
    n, b, c = len(exact), int((exact & ~low).sum()), int((low & ~exact).sum())
    if 0 < bound < 1:
        half = (2 * n + c - b) * bound - b - c
        share = (math.sqrt(half**2 + 8 * n * c * bound * (1 - bound)) - half) / (4 * n)
        z = (n * bound - (b - c)) / math.sqrt(n * (2 * share + bound * (1 - bound)))
        assert norm.cdf(z) == pytest.approx(confidence, abs=1e-4)


def test_a_bound_of_decisions_fails_as_often_as_it_says() -> None:
    # 2.5% of the pairs are lost and 1.5% won: exactly 1 point is lost, the boundary.
    count, trials, rng = 800, 2000, np.random.default_rng(5)
    false = 0
    for lost, won in zip(
        rng.binomial(count, 0.025, trials), rng.binomial(count, 0.015, trials), strict=True
    ):
        exact, low = np.ones(count, dtype=bool), np.ones(count, dtype=bool)
        low[:lost] = False
        exact[count - won :] = False
        false += score_bound(exact, low, 0.95) < 0.01
    assert false <= binom.ppf(0.999, trials, 0.05)
    assert false >= binom.ppf(0.001, trials, 0.05) / 2  # nor is it far too careful


def test_the_bootstrap_is_that_of_scipy() -> None:
    errors = RNG.exponential(size=60)
    terms = np.stack([errors, np.ones(60)], axis=-1)
    samples = SummedSamples(terms=terms, metric=lambda sums: sums[..., 0] / sums[..., 1])
    zero = SummedSamples(terms=terms * [0, 1], metric=samples.metric)
    found = certify(zero, samples, higher_is_better=False, confidence=0.9)
    wanted: Any = bootstrap(
        (errors,), np.mean, confidence_level=0.9, alternative="less", method="BCa", rng=1
    )
    assert found.loss == pytest.approx(errors.mean())
    assert found.bound == pytest.approx(wanted.confidence_interval.high, rel=0.03)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_metric_has_a_bound_above_its_loss(name: str) -> None:
    metric = METRICS[name]
    exact = None if metric.ideal == math.inf else samples_of(name, SCORES)
    found = certify(
        exact,
        samples_of(name, LOW),
        higher_is_better=metric.higher_is_better,
        confidence=0.95,
    )
    assert math.isfinite(found.bound)
    assert found.loss < found.bound
    assert found.samples == 40
    assert found.method in str(found)


def test_where_no_sample_tells_the_models_apart_a_mean_has_no_bound() -> None:
    same = samples_of("cosine", SCORES)
    found = certify(same, same, higher_is_better=True, confidence=0.95)
    assert (found.loss, found.bound) == (0, math.inf)


def test_the_largest_difference_has_no_samples() -> None:
    total = METRICS["max_abs"].start()
    total.update({"y": LOW}, None, {"y": SCORES})
    assert total.samples() is None


def test_what_so_many_samples_can_prove() -> None:
    assert samples_needed(0.01, 0.95) == pytest.approx(1240, abs=5)
    assert provable_loss(400, 0.95) == pytest.approx(0.018, abs=0.0005)
    assert provable_loss(samples_needed(0.03, 0.9, 0.1), 0.9, 0.1) <= 0.03


@pytest.mark.parametrize("confidence", [0.5, 1.0, 95, math.nan])
def test_what_is_no_confidence_is_refused(confidence: float) -> None:
    same = samples_of("top1", SCORES)
    with pytest.raises(UsageError, match="is no confidence"):
        certify(same, same, higher_is_better=True, confidence=confidence)


def test_models_with_other_numbers_of_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="40 samples of the fp32 model beside 39"):
        certify(
            samples_of("top1", SCORES),
            samples_of("top1", LOW, np.arange(39)),
            higher_is_better=True,
            confidence=0.95,
        )
