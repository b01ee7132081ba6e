"""What samples tell of a metric of numbers on data that nobody looked at."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from finecast.data.metrics import METRICS, Score, Scored, Scoring, on_new_data
from finecast.data.samples import deviation_of_difference, mean_samples

Floats = NDArray[np.float64]
CLASSES = 8


def scores(seed: int, count: int, error: float) -> tuple[Floats, Floats, Floats]:
    """Outputs of fp32 and of another model, and numbers that fp32 is near to."""
    rng = np.random.default_rng(seed)
    exact = 3 * rng.standard_normal((count, CLASSES))
    off = (
        error * rng.standard_normal((count, CLASSES)) * np.exp(rng.standard_normal((count, 1)))
    )
    return exact, exact + off, exact + rng.standard_normal((count, CLASSES))


def judged(name: str, seed: int, count: int, error: float) -> tuple[Score, Score]:
    """The metric of fp32 and of the other model."""
    metric = METRICS[name]
    exact, low, near = scores(seed, count, error)
    labels = near.argmax(axis=1) if metric.of_classes else near
    if name == "spearman":
        exact, low, labels = exact[:, :1], low[:, :1], near[:, 0]
    found: list[Score] = []
    for outputs in (exact, low):
        scoring = Scoring(metric, [Scored(output="y")])
        scoring.update({"y": outputs}, labels, {"y": exact})
        found.append(scoring.result())
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((one, 0.3) for one in ("snr_db", "cosine", "mse", "mae", "perplexity", "kld")),
        ("spearman", 0.3),
        ("f1", 1.0),
        ("top5", 2.0),
    ],
)
def test_the_deviation_is_that_of_data_drawn_anew(name: str, error: float) -> None:
    """Over data sets the metrics are as far apart as one of them tells."""
    higher = METRICS[name].higher_is_better
    drawn: list[float] = []
    told: list[float] = []
    for seed in range(60):
        exact, low = judged(name, seed, 150, error)
        expected = on_new_data(exact, low, higher_is_better=higher)
        assert expected is not None
        assert expected.metric == low
        assert expected.cautious == low
        drawn.append(float(low) if math.isinf(exact) else expected.loss)
        told.append(expected.deviation)
    assert 0.65 < np.mean(told) / np.std(drawn) < 1.5


def test_two_models_are_compared_on_the_same_samples() -> None:
    """Samples differ far more among one another than the models do on one of them."""
    exact, low = judged("mse", 0, 400, 0.01)
    expected = on_new_data(exact, low, higher_is_better=False)
    assert expected is not None
    each = low.samples["y"].scores()
    assert each is not None
    alone = (each.totals / each.weights).std() / 20
    assert expected.deviation < alone / 10


def test_more_samples_tell_more() -> None:
    few, many = (on_new_data(*judged("snr_db", 1, count, 0.1)) for count in (100, 10_000))
    assert few is not None
    assert many is not None
    assert many.deviation < few.deviation / 3


@pytest.mark.parametrize("changed", [0, 9, 10])
def test_few_samples_that_differ_tell_nothing(changed: int) -> None:
    """Of no changed sample it is not known that none changes elsewhere."""
    right = np.ones(500)
    low = np.ones(500)
    low[:changed] = 0
    off = deviation_of_difference(mean_samples(right), mean_samples(low))
    assert (off is None) == (changed < 10)
    if off is not None:
        assert off == pytest.approx(math.sqrt(0.02 * 0.98 / 500), rel=0.1)


def test_what_has_no_finite_metric_tells_nothing() -> None:
    """Nothing differs; or one sample alone makes the noise; or NaN."""
    exact, low = judged("snr_db", 0, 50, 0.0)
    assert on_new_data(exact, low) is None
    outputs = np.ones((50, 2))
    for number in (2.0, math.nan):
        scoring = Scoring(METRICS["snr_db"], [Scored(output="y")])
        off = outputs.copy()
        off[3] = number
        scoring.update({"y": off}, None, {"y": outputs})
        assert on_new_data(exact, scoring.result()) is None


def test_the_worst_output_counts() -> None:
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((100, 4))
    pair: list[Score] = []
    for error in (0.0, 0.1):
        scoring = Scoring(METRICS["cosine"], [Scored(output="a"), Scored(output="b")])
        low = {
            "a": exact + error * rng.standard_normal(exact.shape) / 10,
            "b": exact + error * rng.standard_normal(exact.shape),
        }
        scoring.update(low, None, {"a": exact, "b": exact})
        pair.append(scoring.result())
    expected = on_new_data(*pair)
    assert expected is not None
    assert next(iter(pair[1].outputs)) == "b"
    alone = deviation_of_difference(pair[0].samples["b"], pair[1].samples["b"])
    assert expected.deviation == alone
