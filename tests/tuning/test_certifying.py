"""Plans chosen on one half of the samples and certified on the other."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.data.certificates import Certificate
from finecast.data.criterion import Criterion
from finecast.data.metrics import METRICS, Score, Scored, Scoring
from finecast.engines import get_engine
from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.tuning.certifying import Certifier, certifier_of
from finecast.tuning.goal import Budget, Goal
from tests.engines.emulator import models
from tests.tuning.test_trials import candidate, trials

COUNT = 2000


def score(right: Array) -> Score:
    """The top-1 of a model that is right on some samples."""
    scoring = Scoring(METRICS["top1"], [Scored(output="y")])
    scores = np.stack([np.logical_not(right), right], axis=-1).astype(np.float32)
    scoring.update({"y": scores}, np.ones(len(right), np.int64), None)
    return scoring.result()


def certifier(exact: Array, drop: float = 0.01) -> Certifier:
    found = certifier_of(Criterion(max_drop=drop, confidence=0.95), score(exact))
    assert found is not None
    return found


def losing(exact: Array, lost: float, seed: int) -> Array:
    """A model that is wrong on that share of the samples on which ``exact`` is right."""
    return np.logical_and(exact, np.random.default_rng(seed).random(len(exact)) >= lost)


RIGHT = np.random.default_rng(0).random(COUNT) < 0.9


def test_a_model_that_loses_nothing_is_certified() -> None:
    of = certifier(RIGHT)
    assert of.passes(score(RIGHT))
    found = of.certificate(score(RIGHT))
    assert of.holds(found)
    assert found.samples == COUNT // 2
    assert found.loss == 0


def test_what_passes_on_the_samples_but_is_not_proven_is_told() -> None:
    of = certifier(RIGHT)
    low = score(losing(RIGHT, 0.008, 1))
    assert of.passes(low)
    found = of.certificate(low)
    assert not of.holds(found)
    text = of.why_not(found, low)
    assert "could not be certified" in text
    assert "to guarantee 0.01, give about 2,670 samples in all" in text


@pytest.mark.parametrize(
    ("differing", "said"), [(0.005, ""), (0.05, ", as 5% of predictions")]
)
def test_as_many_samples_are_asked_for_after_the_search_as_before(
    differing: float, said: str
) -> None:
    """More only for a plan that differs on more samples than expected, and that is said."""
    exact = RIGHT[:800]
    of = certifier(exact)
    low = exact.copy()
    every = round(1 / differing)
    low[::every] = ~low[::every]
    before = re.findall(r"give about ([\d,]+) samples in all", of.expectation)
    text = of.why_not(of.certificate(score(low)), score(low))
    after = re.findall(r"give about ([\d,]+) samples in all", text)
    assert said in text
    assert len(before) == len(after) == 1
    assert (before == after) == (not said)
    assert int(before[0].replace(",", "")) <= int(after[0].replace(",", ""))


def test_the_half_that_certifies_leads_no_search() -> None:
    """The metric that tells which plan is tried next is of the half that chooses alone."""
    of, low = certifier(RIGHT), RIGHT.copy()
    choosing, held = of._halves
    low[held] = False
    assert of.passes(score(low))
    assert of.chosen(score(low)) == of.chosen(score(RIGHT)) == RIGHT[choosing].mean()
    criterion, worse = Criterion(max_drop=0.01, confidence=0.95), RIGHT.copy()
    worse[choosing[:40]] = False
    found: list[float | None] = []
    for right in (worse, np.where(np.isin(np.arange(COUNT), held), False, worse)):
        made = trials({"a": score(right)}, [candidate("a", 0.5, 1.0)])
        made.baseline, made.certifier = score(RIGHT), of
        made.budget = Budget(goal=Goal(criterion=criterion))
        assert not made.has_passed(candidate("a", 0.5, 1.0))
        found.append(made.allowed_error())
    assert found[0] == found[1] is not None


def test_testing_ends_with_the_first_plan_that_fails() -> None:
    of = certifier(RIGHT)
    scores = {
        "exact": score(RIGHT),
        "bad": score(losing(RIGHT, 0.03, 2)),
        "good": score(losing(RIGHT, 0.0005, 3)),
    }
    found = of.certified(scores, ["exact", "bad", "good"])
    assert [*found] == ["exact", "bad"]
    assert [of.holds(one) for one in found.values()] == [True, False]


def _selected(of: Certifier, scores: dict[str, Score], order: list[str]) -> list[str]:
    passed = [name for name in order if of.passes(scores[name])]
    return [n for n, one in of.certified(scores, passed).items() if of.holds(one)]


def test_promises_made_after_a_selection_hold() -> None:
    """Of eight plans near the boundary one that loses too much is certified in 5% at most."""
    rng, runs, count, false = np.random.default_rng(7), 400, 600, 0
    lost = {"a": 0.012, "b": 0.0201, "c": 0.021, "d": 0.03}
    for _ in range(runs):
        exact = rng.random(count) < 0.9
        of = certifier(exact, drop=0.018)  # 2% of the 90% that are right
        scores = {
            name: score(exact & (rng.random(count) >= share)) for name, share in lost.items()
        }
        false += any(lost[name] > 0.02 for name in _selected(of, scores, [*lost]))
    assert false <= 0.05 * runs + 3 * math.sqrt(0.05 * 0.95 * runs)


def test_one_percent_of_the_samples_lost_is_caught() -> None:
    """The whole data hide it in no mean: an op harmful on few samples fails by its bound."""
    of = certifier(RIGHT, drop=0.005)
    found = of.certificate(score(losing(RIGHT, 0.01, 4)))
    assert not of.holds(found)


def test_what_is_provable_is_said_before_the_search() -> None:
    text = certifier(RIGHT[:800]).expectation
    assert "400 samples choose a plan, 400 certify it" in text
    assert "these can guarantee a loss of at most 0.019 if 2% of predictions change" in text
    assert text.endswith("to guarantee 0.01, give about 2,670 samples in all")


def test_a_metric_without_samples_cannot_be_certified() -> None:
    with pytest.raises(UsageError, match="return an array with a value for each sample"):
        certifier_of(Criterion(confidence=0.95), 0.8)
    with pytest.raises(UsageError, match="30 samples are too few"):
        certifier(RIGHT[:30])


def errors(values: Array) -> Score:
    """The mean squared error, whose range is not known."""
    scoring = Scoring(METRICS["mse"], [Scored(output="y")])
    scoring.update({"y": np.sqrt(values)[:, None]}, np.zeros((len(values), 1)), None)
    return scoring.result()


def test_a_metric_without_a_known_range_takes_many_samples_or_a_range() -> None:
    """What is seldom may lose any amount: few samples cannot bound it."""
    criterion = Criterion(max_drop=0.2, confidence=0.95, higher_is_better=False)
    exact, low = (np.full(1200, 0.1, np.float32) for _ in range(2))
    low[::100] += 0.5
    with pytest.raises(UsageError, match="1199 samples prove nothing") as refused:
        certifier_of(criterion, errors(exact[1:]))
    assert "score_range, as 0:1; or give at least 1200" in str(refused.value)
    many = certifier_of(criterion, errors(exact))
    assert many is not None
    found = many.certificate(errors(low))
    assert many.holds(found)
    assert "if no sample differs over 5 times as much as the worst of yours" in str(found)
    few = certifier_of(replace(criterion, score_range=(0, 1)), errors(exact[:400]))
    assert few is not None
    assert "these can guarantee a loss of at most 0.019 if hardly any" in few.expectation
    found = few.certificate(errors(low[:400]))
    assert few.holds(found)
    assert "scores in a range of 1" in str(found)
    with pytest.raises(UsageError, match=r"sample 0 scores 0\.6, which is not in 0:0\.5"):
        certifier_of(replace(criterion, score_range="0:0.5"), errors(low))


@pytest.mark.parametrize("stated", ["1", "0:inf", "1:0", "a:b", (0, 1, 2)])
def test_what_is_no_range_is_refused(stated: Any) -> None:
    with pytest.raises(UsageError, match="is no range of scores"):
        Criterion(confidence=0.95, score_range=stated)
    with pytest.raises(UsageError, match="counts for a certificate alone"):
        Criterion(score_range=(0, 1))


def test_tune_gives_a_certificate(tmp_path: Path) -> None:
    model, data = labelled(tmp_path)
    done = finecast.tune(
        model,
        tmp_path / "low.onnx",
        data=data,
        metric="top1",
        confidence=0.95,
        tolerance=0.05,
        objective="size",
    )
    assert done.improved
    assert isinstance(done.certificate, Certificate)
    found = json.loads(json.dumps(done.to_dict()))["certificate"]
    assert found["confidence"] == 0.95
    assert found["samples"] == 200
    assert found["loss"] <= found["bound"] <= 0.05 * done.baseline.metric
    assert str(done.certificate) in str(done)


def test_a_loss_that_cannot_be_proven_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    model, data = labelled(tmp_path)
    options: dict[str, Any] = {"metric": "top1", "objective": "size", "tolerance": 0.012}
    assert finecast.tune(model, tmp_path / "a.onnx", data=data, **options).improved
    done = finecast.tune(model, tmp_path / "b.onnx", data=data, confidence=0.95, **options)
    assert not done.improved
    assert "no plan is certified" in done.why
    assert "could not be certified" in done.why


def test_values_by_sample_of_a_users_function_are_certified(tmp_path: Path) -> None:
    model, data = labelled(tmp_path)
    arrays = dict(np.load(data))

    def each(run: Callable[..., dict[str, Array]]) -> Array:
        return run({"x": arrays["x"]})["y"].argmax(-1) == arrays["label"]

    options: dict[str, Any] = {"confidence": 0.9, "tolerance": 0.05, "objective": "size"}
    done = finecast.tune(model, tmp_path / "a.onnx", evaluate=each, **options)
    assert done.certificate is not None
    assert done.certificate.method == "exact bound of decisions"
    with pytest.raises(UsageError, match="one number, of no sample"):
        finecast.tune(
            model, tmp_path / "b.onnx", evaluate=lambda run: float(each(run).mean()), **options
        )


def test_clusters_are_halved_and_drawn_whole() -> None:
    """Samples of a cluster that are lost together prove less than as many independent ones."""
    rng, clusters, each = np.random.default_rng(3), 100, 8
    groups = np.repeat(np.arange(clusters), each)
    exact = np.ones(clusters * each, np.bool_)
    low = exact & np.repeat(rng.random(clusters) >= 0.03, each)
    criterion = Criterion(max_drop=0.05, confidence=0.95)
    alone, whole = (certifier_of(criterion, score(exact), of) for of in (None, groups))
    assert alone is not None
    assert whole is not None
    found = whole.certificate(score(low))
    assert found.samples == clusters // 2
    assert found.method == "betting bound of scores in a range of 1"
    assert found.bound > alone.certificate(score(low)).bound
    assert "50 clusters of samples choose a plan, 50 certify it" in whole.expectation


def test_promises_on_clusters_hold() -> None:
    """A plan at the boundary: clusters keep the promise that single samples break."""
    rng, runs, clusters, each = np.random.default_rng(5), 200, 120, 10
    groups = np.repeat(np.arange(clusters), each)
    exact = np.ones(clusters * each, np.bool_)
    criterion = Criterion(max_drop=0.0999, confidence=0.95)
    ways = [certifier_of(criterion, score(exact), of) for of in (None, groups)]
    false = [0, 0]
    for _ in range(runs):
        # Each cluster loses a share of its own; 10% are lost on the whole population.
        share = rng.beta(0.3, 2.7, size=clusters)
        low = score(exact & (rng.random(clusters * each) >= np.repeat(share, each)))
        for way, of in enumerate(ways):
            assert of is not None
            false[way] += of.holds(of.certificate(low))
    limit = 0.05 * runs + 3 * math.sqrt(0.05 * 0.95 * runs)
    assert false[1] <= limit < false[0]


def test_clusters_are_named_by_an_array_of_the_data(tmp_path: Path) -> None:
    model, data = labelled(tmp_path)
    arrays = dict(np.load(data))
    texts = np.array([f"text {i // 4}" for i in range(400)])
    options: dict[str, Any] = {"metric": "top1", "tolerance": 0.1, "objective": "size"}

    def tuned(arrays: dict[str, Array], **more: Any) -> finecast.Result:
        return finecast.tune(model, data=arrays, groups="text", **options, **more)

    done = tuned({**arrays, "text": texts}, confidence=0.9)
    found = done.certificate
    assert found is None or found.samples == 50
    assert found is not None or "clusters" in done.why
    with pytest.raises(UsageError, match="clusters count for a certificate"):
        tuned({**arrays, "text": texts})
    with pytest.raises(UsageError, match="unknown array 'text'"):
        tuned({**arrays}, confidence=0.9)
    with pytest.raises(UsageError, match="100 samples have a cluster"):
        tuned({**arrays, "text": texts[:100]}, confidence=0.9)


def test_copies_of_samples_are_told(tmp_path: Path) -> None:
    """They prove no more than one of them, and stand in both halves."""
    model, data = labelled(tmp_path)
    arrays = {name: np.repeat(array[:100], 4, axis=0) for name, array in np.load(data).items()}
    options: dict[str, Any] = {"metric": "top1", "tolerance": 0.1, "objective": "size"}
    done = finecast.tune(model, data=arrays, confidence=0.9, **options)
    assert any(text.startswith("300 of 400 samples have the inputs") for text in done.warnings)
    clusters = {**arrays, "text": np.arange(400) // 4}
    done = finecast.tune(model, data=clusters, groups="text", confidence=0.9, **options)
    assert not any("samples have the inputs" in text for text in done.warnings)


@pytest.mark.parametrize("verb", ["ladder", "blame"])
def test_verbs_that_certify_nothing_take_no_confidence(tmp_path: Path, verb: str) -> None:
    model, data = labelled(tmp_path)
    given: Any = "trn1"
    if verb == "ladder":
        given = pytest.importorskip("finecast_neuron.compilers").ladder("trn1")
    asked = Criterion(confidence=0.95)
    with pytest.raises(UsageError, match="only tune certifies"):
        getattr(finecast, verb)(model, given, data=data, metric="top1", criterion=asked)
    with pytest.raises(UsageError, match="confidence"):
        getattr(finecast, verb)(model, given, data=data, metric="top1", confidence=0.95)


def labelled(folder: Path) -> tuple[Path, Path]:
    """A perceptron, and 400 samples that have the labels it gives them."""
    model = models.mlp(folder / "mlp.onnx")
    x = np.random.default_rng(0).normal(size=(400, 16)).astype(np.float32)
    found = get_engine("onnxruntime").load(model).run({"x": x})
    np.savez(folder / "data.npz", x=x, label=found["y"].argmax(-1))
    return model, folder / "data.npz"
