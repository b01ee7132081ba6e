"""The right classes that a user's evaluation function implies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from finecast.data.function_workload import FunctionWorkload
from finecast.data.functions import metric_value
from finecast.data.implied_labels import ImpliedLabels, implied_labels
from finecast.data.metrics import Score, losses_at, on_new_data
from finecast.data.samples import Floats, Indices
from finecast.engines.base import Array, Feeds, Session, calls_of

FOREVER = 1e6
Count = Callable[[Array], float]


class Added(Session):
    """Gives its input and the noise of its rows."""

    inputs = outputs = ()

    def __init__(self, noise: NDArray[np.float32]) -> None:
        self.noise = noise

    def run(self, feeds: Feeds) -> dict[str, Array]:
        (call,) = calls_of(feeds)
        begin = int(call["i"])
        return {
            "y": np.asarray(call["x"], np.float32) + self.noise[begin : begin + len(call["x"])]
        }


def scores(n: int, classes: int, seed: int = 0) -> NDArray[np.float32]:
    """Scores of n decisions; no two of one decision are equal."""
    drawn = np.random.default_rng(seed).standard_normal((n, classes))
    return drawn.astype(np.float32)


def in_calls(rows: Array, calls: int) -> list[Mapping[str, Array]]:
    return [{"y": part} for part in np.array_split(rows, calls)]


def implied(rows: Array, metric: Count, seconds: float = FOREVER) -> ImpliedLabels | None:
    """What a function of all rows of scores implies."""

    def ask(name: str, arrays: Sequence[Array]) -> float:
        assert name == "y"
        return metric(np.concatenate(arrays))

    return implied_labels(metric(rows), in_calls(rows, 5), ask, seconds)


def right_share(labels: Indices) -> Count:
    return lambda rows: float((rows.argmax(axis=-1) == labels).mean())


@given(st.integers(5, 90), st.integers(2, 12), st.floats(0.3, 1), st.integers(0, 10**6))
def test_a_share_of_right_decisions_implies_labels(
    n: int, classes: int, right: float, seed: int
) -> None:
    rows = scores(n, classes, seed)
    rng = np.random.default_rng(seed)
    best = np.argsort(rows, axis=-1)[:, ::-1]
    labels = np.where(rng.random(n) < right, best[:, 0], rng.integers(0, classes, n))
    found = implied(rows, right_share(labels))
    share = (best[:, 0] == labels).sum() - (best[:, 1] == labels).sum()
    if found is None:  # as many decisions would be won as lost, or none is right
        assert share == 0 or not (best[:, 0] == labels).any()
        return
    among = (best[:, :2] == labels[:, None]).any(axis=1)
    assert (found.classes[among] == labels[among]).all()
    assert (found.classes[~among] < 0).all()
    margins = found.score(Score(right_share(labels)(rows)), in_calls(rows, 5)).margins["y"]
    assert ((margins > 0) == (best[:, 0] == labels)).all()


def macro_f1(rows: Array, labels: Indices) -> float:
    decided = rows.argmax(axis=-1)
    each = [
        2
        * ((decided == c) & (labels == c)).sum()
        / ((decided == c).sum() + (labels == c).sum())
        for c in np.unique(labels)
    ]
    return float(np.mean(each))


def auc(rows: Array, labels: Indices) -> float:
    of = rows[:, 0].astype(np.float64)
    return float((of[labels == 0][:, None] > of[labels != 0][None]).mean())


def pairs_right(rows: Array, labels: Indices) -> float:
    """A decision counts only with its neighbour: no sum of single ones."""
    right = (rows.argmax(axis=-1) == labels).reshape(-1, 2)
    return float(right.all(axis=1).mean())


@pytest.mark.parametrize("metric", [macro_f1, auc, pairs_right])
def test_no_other_metric_implies_labels(metric: Callable[[Array, Indices], float]) -> None:
    rows = scores(80, 4)
    labels = rows.argmax(axis=-1)
    labels[::7] = 1
    assert implied(rows, lambda changed: metric(changed, labels)) is None


def test_percent_is_a_share_of_decisions() -> None:
    rows = scores(64, 10)
    labels = rows.argmax(axis=-1)
    labels[:3] = np.argsort(rows[:3], axis=-1)[:, -2]
    share = right_share(labels)
    found = implied(rows, lambda changed: 100 * share(changed))
    assert found is not None
    assert found.whole == 100
    low = rows + scores(64, 10, seed=1) / 20
    exact = found.score(Score(100 * share(rows)), in_calls(rows, 5))
    lower = found.score(Score(100 * share(low)), in_calls(low, 5))
    percent = on_new_data(exact, lower)
    as_share = replace(found, whole=1.0)
    fraction = on_new_data(
        as_share.score(Score(share(rows)), in_calls(rows, 5)),
        as_share.score(Score(share(low)), in_calls(low, 5)),
    )
    assert percent is not None
    assert fraction is not None
    assert percent.loss == pytest.approx(100 * fraction.loss)
    assert percent.deviation == pytest.approx(100 * fraction.deviation)
    lost = losses_at(exact, lower)
    assert lost is not None
    assert lost(1.0) == pytest.approx(float(exact) - percent.cautious)


def test_without_time_it_is_known_how_many_decisions_of_a_group_are_right() -> None:
    """The nearest to their borders are known one by one."""
    rows = scores(3000, 6)
    labels = rows.argmax(axis=-1)
    apart = np.diff(np.sort(rows, axis=-1)[:, -2:])[:, 0]
    rng = np.random.default_rng(1)
    wrong = rng.random(3000) < np.exp(-3 * apart) / 2
    labels[wrong] = np.argsort(rows[wrong], axis=-1)[:, -2]
    found = implied(rows, right_share(labels), seconds=0)
    assert found is not None
    told = found.classes == rows.argmax(axis=-1)
    for begin, end in pairwise((0, 100, 400, 1500, 3000)):
        near = np.argsort(apart)[begin:end]
        assert told[near].mean() == pytest.approx((~wrong)[near].mean(), abs=0.07)
    margins = found.score(Score(right_share(labels)(rows)), in_calls(rows, 5)).margins["y"]
    assert (margins > 0).mean() == pytest.approx(right_share(labels)(rows))


def test_outputs_that_are_no_scores_imply_nothing() -> None:
    def ask(name: str, arrays: Sequence[Array]) -> float:
        raise AssertionError(name, arrays)

    whole = [{"y": np.arange(6).reshape(3, 2)}, {"y": np.arange(6).reshape(3, 2)}]
    assert implied_labels(1.0, whole, ask, FOREVER) is None
    one = [{"y": np.ones((8, 1), np.float32)}]
    assert implied_labels(1.0, one, ask, FOREVER) is None
    assert implied_labels(1.0, [], ask, FOREVER) is None


def test_an_evaluation_function_has_margins() -> None:
    """Those of each model are of the labels that fp32 implies."""
    rows = scores(90, 5)
    labels = rows.argmax(axis=-1)
    labels[::9] = np.argsort(rows[::9], axis=-1)[:, -2]
    batches = [{"x": rows[i : i + 30], "i": np.array(i)} for i in range(0, 90, 30)]

    def evaluate(run: Callable[[Mapping[str, Array]], Mapping[str, Array]]) -> float:
        outputs = np.concatenate([run(feeds)["y"] for feeds in batches])
        return float((outputs.argmax(axis=-1) == labels).mean())

    noise = (scores(90, 5, seed=2) / 10).astype(np.float32)
    exact, low = Added(np.zeros_like(rows)), Added(noise)
    workload = FunctionWorkload(function=evaluate, name="evaluate")
    baseline = workload.evaluate(exact, None)
    assert isinstance(baseline, Score)
    assert margins_of(baseline) == pytest.approx(margins(rows, labels))
    value = workload.evaluate(low, exact)
    assert isinstance(value, Score)
    assert margins_of(value) == pytest.approx(margins(rows + noise, labels))
    other = FunctionWorkload(function=evaluate, name="evaluate")
    other.learn(workload.learned())
    elsewhere = other.evaluate(low, exact)
    assert isinstance(elsewhere, Score)
    assert margins_of(elsewhere) == pytest.approx(margins_of(value))


def margins_of(score: Score) -> Floats:
    return score.margins["y"]


def margins(rows: Array, labels: Indices) -> Floats:
    """The right class' score less the largest other one."""
    wide = rows.astype(np.float64)
    own = np.take_along_axis(wide, labels[:, None], axis=-1)[:, 0]
    np.put_along_axis(wide, labels[:, None], -np.inf, axis=-1)
    return own - wide.max(axis=-1)


def test_a_number_that_is_no_number_has_no_margins() -> None:
    labels = ImpliedLabels(output="y", classes=np.zeros(3, np.intp), whole=1.0)
    value = metric_value(float("nan"), "evaluate")
    assert not labels.score(value, [{"y": scores(3, 2)}]).margins
