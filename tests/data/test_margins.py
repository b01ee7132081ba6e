"""What margins of decisions tell of data that nobody looked at."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.data.margins import Margins
from finecast.data.metrics import Score, Scored, Scoring, get_metric, on_new_data

Floats = NDArray[np.float64]


def population(seed: int, count: int, noise: float) -> tuple[Floats, Floats]:
    """Margins of fp32 and of a model whose scores are off by ``noise``."""
    rng = np.random.default_rng(seed)
    exact = rng.exponential(size=count) * np.where(rng.random(count) < 0.85, 1.0, -1.0)
    return exact, exact + noise * rng.standard_normal(count)


def lost(exact: Floats, low: Floats) -> float:
    return float((exact > 0).mean() - (low > 0).mean())


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_margins_tell_more_of_other_data_than_a_count_does(noise: float) -> None:
    """The loss of the population is known better by the margins of a sample of it."""
    true = lost(*population(0, 1_000_000, noise))
    counted: list[float] = []
    expected: list[float] = []
    for seed in range(1, 201):
        exact, low = population(seed, 150, noise)
        margins = Margins.of(exact, low)
        assert margins is not None
        counted.append(lost(exact, low) - true)
        expected.append(margins.loss(lost(exact, low))[0] - true)
    by_count, by_margins = (float(np.sqrt(np.mean(np.square(e)))) for e in (counted, expected))
    assert by_margins < 0.7 * by_count
    assert abs(np.mean(expected)) < 0.5 * by_count


@given(st.integers(0, 1000), st.floats(0.01, 1.0))
def test_larger_moves_change_more_decisions(seed: int, noise: float) -> None:
    exact, low = population(seed, 100, noise)
    scaled = [Margins.of(exact, exact + scale * (low - exact)) for scale in (0.5, 1.0, 2.0)]
    changed = [margins.expected()[0] for margins in scaled if margins is not None]
    assert len(changed) == 3
    assert all(small <= large for small, large in pairwise(changed))
    assert all(0 <= count <= 100.001 for count in changed)


def test_moves_far_below_all_margins_change_few_decisions_elsewhere() -> None:
    """No decision changes here; of very many samples some have as small a margin."""
    noise = 1e-4
    exact, low = population(7, 200, noise)
    margins = Margins.of(exact, low)
    assert margins is not None
    first, second = population(0, 4_000_000, noise)
    true = float(((first > 0) != (second > 0)).mean())
    assert margins.expected()[0] / 200 == pytest.approx(true, rel=0.5)


@given(st.floats(0.1, 10.0), st.integers(32, 500))
def test_decisions_whose_margins_are_alike_are_safe(margin: float, samples: int) -> None:
    """Moves of a hundredth of all margins are not expected to change a decision."""
    exact = np.full(samples, margin)
    low = exact + 0.01 * margin * np.random.default_rng(0).standard_normal(samples)
    margins = Margins.of(exact, low)
    assert margins is not None
    assert margins.loss(0.0)[0] < 1e-3


@pytest.mark.parametrize("middle", [0.0, 1.0, None])
@pytest.mark.parametrize("right", [1.0, 0.85])
def test_the_deviation_that_is_told_is_that_of_samples(
    middle: float | None, right: float
) -> None:
    """Margins lie denser next to the border than elsewhere, or sparser."""

    def drawn(seed: int, count: int) -> tuple[Floats, Floats]:
        rng = np.random.default_rng(seed)
        normal = np.abs((middle or 0.0) + rng.standard_normal(count))
        sizes = rng.exponential(size=count) if middle is None else normal
        exact = sizes * np.where(rng.random(count) < right, 1.0, -1.0)
        return exact, exact + 0.1 * rng.standard_normal(count)

    true = lost(*drawn(0, 1_000_000))
    off: list[float] = []
    for seed in range(1, 201):
        exact, low = drawn(seed, 120)
        margins = Margins.of(exact, low)
        assert margins is not None
        loss, deviation = margins.loss(lost(exact, low))
        off.append((loss - true) / deviation)
    assert 0.4 < np.sqrt(np.mean(np.square(off))) < 1.3


def test_a_model_that_changes_nothing_is_expected_to_lose_nothing() -> None:
    exact, _ = population(3, 100, 0.0)
    margins = Margins.of(exact, exact)
    assert margins is not None
    assert margins.loss(0.0)[0] == 0.0


def test_a_tie_that_nothing_moves_stays_as_it_is() -> None:
    margins = Margins.of(np.zeros(8), np.zeros(8))
    assert margins is not None
    assert margins.loss(0.0)[0] == 0.0


def test_without_margins_nothing_is_known() -> None:
    nowhere = np.full(5, -np.inf)
    assert Margins.of(nowhere, nowhere) is None
    assert on_new_data(Score(0.9), Score(0.8)) is None
    assert on_new_data(0.9, 0.8) is None


@pytest.mark.parametrize("name", ["top1", "agreement"])
def test_metrics_of_decisions_keep_margins(name: str) -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((40, 5))
    low = scores + 0.01 * rng.standard_normal(scores.shape)
    labels = scores.argmax(axis=1)
    labels[:4] = (labels[:4] + 1) % 5
    labels[5] = -100
    scored: list[Score] = []
    for outputs in (scores, low):
        scoring = Scoring(get_metric(name), [Scored(output="y")])
        for part in (slice(0, 30), slice(30, 40)):
            scoring.update({"y": outputs[part]}, labels[part], {"y": scores[part]})
        scored.append(scoring.result())
    exact = scored[0].margins["y"]
    assert len(exact) == 39  # one has no label
    ahead = np.sort(scores, axis=1)
    right = np.delete(ahead[:, -1] - ahead[:, -2], 5)
    np.testing.assert_allclose(exact[4:], right[4:])
    assert (exact[:4] < 0).all() == (name == "top1")
    assert abs(scored[1].margins["y"] - exact).max() < 0.1
    expected = on_new_data(*scored)
    assert expected is not None
    assert 0 <= expected.loss < 0.05


def test_decisions_that_are_made_already_have_no_margins() -> None:
    scoring = Scoring(get_metric("top1"), [Scored(output="y")])
    scoring.update({"y": np.arange(10)}, np.arange(10), None)
    assert not scoring.result().margins
