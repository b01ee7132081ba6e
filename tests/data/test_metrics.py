from __future__ import annotations

import itertools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import sklearn.metrics as sklearn_metrics
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr, softmax

from finecast.data.metrics import (
    METRICS,
    ONE_HOT,
    Held,
    Scored,
    Scoring,
    get_metric,
)
from finecast.data.samples import Outputs
from finecast.data.scored_outputs import scored_outputs
from finecast.engines.base import Array
from finecast.errors import UsageError
from finecast.planning.free_rows import FreeOutput

DOCS = Path(__file__).parents[2] / "docs"

SCORES = np.random.default_rng(0).standard_normal((12, 7)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 7, 12)
NOISY = SCORES + np.random.default_rng(2).standard_normal((12, 7)).astype(np.float32) / 10


TARGETS = np.random.default_rng(3).standard_normal((12, 7))
DISTANCES = ("mse", "mae")


def labels_for(name: str) -> Array:
    return TARGETS if name in DISTANCES else LABELS


def score(
    name: str, outputs: Array, labels: Array | None = None, reference: Array | None = None
) -> float:
    accumulator = get_metric(name).start()
    expected = None if reference is None else {"y": reference}
    accumulator.update({"y": outputs}, labels, expected)
    return accumulator.result()


@pytest.mark.parametrize("name", list(METRICS))
@given(cuts=st.sets(st.integers(1, 11)))
def test_batching_changes_nothing(name: str, cuts: set[int]) -> None:
    whole = score(name, NOISY, labels_for(name), SCORES)
    accumulator = get_metric(name).start()
    edges = [0, *sorted(cuts), 12]
    for a, b in itertools.pairwise(edges):
        accumulator.update({"y": NOISY[a:b]}, labels_for(name)[a:b], {"y": SCORES[a:b]})
    assert accumulator.result() == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("name", list(METRICS))
def test_a_model_against_itself_is_ideal(name: str) -> None:
    metric = METRICS[name]
    assert metric.needs_reference == (metric.ideal is not None)
    if metric.ideal is not None:
        assert score(name, SCORES, labels_for(name), SCORES) == metric.ideal


@pytest.mark.parametrize("name", list(METRICS))
def test_one_nan_makes_the_result_nan(name: str) -> None:
    broken = SCORES.copy()
    broken[3, 0] = math.nan
    assert math.isnan(score(name, broken, labels_for(name), SCORES))


@pytest.mark.parametrize("name", list(METRICS))
def test_before_the_first_batch_there_is_no_result(name: str) -> None:
    assert math.isnan(get_metric(name).start().result())


@pytest.mark.parametrize("name", list(METRICS))
def test_what_a_metric_needs_is_asked_for(name: str) -> None:
    with pytest.raises(UsageError, match="needs"):
        score(name, SCORES)


@pytest.mark.parametrize("name", list(METRICS))
def test_bf16_outputs_are_taken(name: str) -> None:
    low = SCORES.astype(ml_dtypes.bfloat16)
    assert math.isfinite(score(name, low, labels_for(name), SCORES))


def test_top_k() -> None:
    scores = np.array([[3.0, 2, 1, 0, -1, -2], [0, 1, 2, 3, 4, 5]])
    assert score("top1", scores, np.array([0, 0])) == 0.5
    assert score("top5", scores, np.array([4, 0])) == 0.5
    assert score("top1", scores, np.array([[0], [5]])) == 1.0
    assert score("top1", np.array([4, 2]), np.array([4, 3])) == 0.5
    tokens = np.stack([scores, scores])
    assert score("top1", tokens, np.array([[0, 5], [0, 0]])) == 0.75


@pytest.mark.parametrize("name", [n for n, m in METRICS.items() if m.worst is not None])
def test_the_worst_value_is_that_of_a_model_that_is_always_wrong(name: str) -> None:
    if name == "spearman":
        wrong = score(name, -TARGETS[:, 0], TARGETS[:, 0])
    else:  # the opposite of the reference, and of what is right the least
        wrong = score(name, -SCORES, SCORES.argmax(axis=1), SCORES)
    assert wrong == pytest.approx(METRICS[name].worst)


@pytest.mark.parametrize("name", ["mse", "mae", "spearman"])
@pytest.mark.parametrize("count", [11, 13, 24])
def test_numbers_that_do_not_fit_say_the_shape(name: str, count: int) -> None:
    with pytest.raises(UsageError, match=r"give one label for each|one number per"):
        score(name, SCORES[:, 0], np.arange(count))


@pytest.mark.parametrize("name", ["top1", "perplexity", "mse"])
def test_labels_that_do_not_fit_say_the_shape(name: str) -> None:
    with pytest.raises(UsageError, match="give one label for each sample"):
        score(name, SCORES[:, 0] if name == "mse" else SCORES, LABELS[:5])
    texts = SCORES.reshape(2, 6, 7)
    each = r"\[6, 7\]" if name == "mse" else r"\[6\]"
    for labels in (LABELS[:2], LABELS[:8].reshape(2, 4)):  # one a text, and too few positions
        with pytest.raises(UsageError, match=rf"give labels of shape {each} for each sample"):
            score(name, texts, labels)


def test_agreement() -> None:
    other = SCORES.copy()
    other[:3] = -other[:3]
    same = (other.argmax(axis=1) == SCORES.argmax(axis=1)).mean()
    assert score("agreement", other, None, SCORES) == pytest.approx(same)
    assert score("agreement", np.array([1, 2]), None, np.array([1, 3])) == 0.5
    with pytest.raises(UsageError, match="no scores per class"):
        score("agreement", SCORES[:, :1], None, SCORES[:, :1])


def test_divergence_is_that_of_scipy_by_text() -> None:
    rng = np.random.default_rng(4)
    reference, got = rng.standard_normal((2, 3, 5, 7)).astype(np.float32)
    p, q = softmax(reference, axis=-1), softmax(got, axis=-1)
    each = rel_entr(p.astype(np.float64), q).sum(axis=-1)
    assert score("kld", got, None, reference) == pytest.approx(each.mean(), rel=1e-5)
    accumulator = get_metric("kld").start()
    accumulator.update({"y": got}, None, {"y": reference})
    texts = accumulator.samples()
    assert texts is not None
    assert texts.count == 3
    assert texts.part(np.array([1])).value() == pytest.approx(each[1].mean(), rel=1e-5)


def test_divergence_of_masked_classes() -> None:
    masked = np.array([[-math.inf, 0.0, 1.0], [2.0, -math.inf, 1.0]])
    assert score("kld", masked, None, masked) == 0.0
    # A class that the fp32 model never takes costs only the chances that go to it.
    assert 0 < score("kld", np.where(np.isinf(masked), 0.0, masked), None, masked) < 1
    assert score("kld", masked, None, np.where(np.isinf(masked), 0.0, masked)) == math.inf
    with pytest.raises(UsageError, match="probabilities"):
        score("kld", softmax(SCORES, axis=-1), None, SCORES)
    with pytest.raises(UsageError, match="several classes"):
        score("kld", SCORES[:, :1], None, SCORES[:, :1])


@pytest.mark.parametrize("name", ["kld", "same_top1"])
def test_padding_does_not_count_beside_fp32(name: str) -> None:
    kept = np.array([0, 3, 4])
    labels = np.full(12, -100)
    labels[kept] = LABELS[kept]
    other = np.where(labels[:, None] == -100, -SCORES, NOISY)
    alone = score(name, NOISY[kept], None, SCORES[kept])
    assert score(name, other, labels, SCORES) == pytest.approx(alone)
    assert score(name, other, None, SCORES) != pytest.approx(alone)
    assert score(name, other, labels[:, None], SCORES) == pytest.approx(alone)
    with pytest.raises(UsageError, match=r"for what does not count.*or leave them out"):
        score(name, other, labels[:10], SCORES)
    assert score(name, other, kept, SCORES) == score(name, other, None, SCORES)


def test_spearman_sees_only_ranks() -> None:
    values = np.array([1.0, 5.0, 2.0, 9.0])
    assert score("spearman", values, np.exp(values)) == pytest.approx(1)
    assert score("spearman", -values[:, None], values) == pytest.approx(-1)
    assert math.isnan(score("spearman", np.ones(4), values))
    with pytest.raises(UsageError, match="one number per sample"):
        score("spearman", values, values[:2])


def test_cosine_is_the_mean_over_samples() -> None:
    reference = np.array([[1.0, 0], [1, 0], [0, 0], [0, 0]])
    outputs = np.array([[2.0, 0], [0, 1], [0, 0], [1, 0]])
    assert score("cosine", outputs, None, reference) == pytest.approx(0.5)


def test_snr_counts_power() -> None:
    assert score("snr_db", np.array([[1.1]]), None, np.array([[1.0]])) == pytest.approx(20)
    assert score("snr_db", np.array([[1.0]]), None, np.array([[0.0]])) == -math.inf


def test_each_output_has_its_distance_and_the_worst_is_the_result() -> None:
    a, b = np.array([1.0, 2.0]), np.array([5, 6])
    given, exact = {"a": a, "i": b, "c": a + 1}, {"a": a, "i": b, "c": a - 1}
    metric = get_metric("max_abs")
    scoring = Scoring(metric, scored_outputs(metric, (), {}, exact))
    scoring.update(given, None, exact)
    assert scoring.result() == 2
    assert [*scoring.result().outputs.items()] == [("c", 2.0), ("a", 0.0)]


def test_what_copies_an_input_is_scored_only_by_name() -> None:
    """A cache that came in, with a row behind it, is far nearer to itself than the logits."""
    past = np.random.default_rng(0).standard_normal((2, 9, 4)).astype(np.float32)
    present = np.concatenate([past, past[:, :1] + 1], axis=1)
    exact = {"present": present, "logits": SCORES}
    low = {"present": present * np.float32(1.001), "logits": NOISY}
    for name in ("snr_db", "cosine", "max_abs", "agreement"):
        metric = get_metric(name)
        found = {
            of: scored_outputs(metric, of, {"past": past}, exact) for of in ((), ("present",))
        }
        names = {of: [str(one) for one in scored] for of, scored in found.items()}
        assert names == {(): ["logits"], ("present",): ["present"]}
        scoring = Scoring(metric, found[()])
        scoring.update(low, None, exact)
        assert scoring.result() == score(name, NOISY, None, SCORES)


def test_of_many_outputs_the_worst_is_named_first() -> None:
    """Pooled, a large output's power would hide the noise of a small one."""
    metric = get_metric("snr_db")
    exact = {"large": 1000 * SCORES, "small": SCORES}
    scoring = Scoring(metric, scored_outputs(metric, (), {}, exact))
    scoring.update({"large": 1000 * SCORES + 1, "small": NOISY}, None, exact)
    assert next(iter(scoring.result().outputs)) == "small"
    assert scoring.result() == pytest.approx(score("snr_db", NOISY, None, SCORES))


BOXES = np.random.default_rng(4).uniform(10, 640, (8, 40, 4))
CLASSES = np.random.default_rng(5).beta(1, 9, (8, 40, 20))
SHUFFLED = np.where(np.arange(40)[:, None] % 3, CLASSES, CLASSES[..., ::-1])


def detections(boxes: Array, scores: Array, axis: int = -1) -> dict[str, Array]:
    return {"y": np.moveaxis(np.concatenate([boxes, scores], axis=-1), -1, axis)}


def by_slice(
    name: str,
    got: Outputs,
    exact: Outputs,
    labels: Array | None = None,
    axis: int | None = None,
) -> tuple[dict[str, float], tuple[str, ...]]:
    metric = get_metric(name)
    scoring = Scoring(metric, scored_outputs(metric, (), {}, exact, axis))
    scoring.update(got, labels, exact)
    return dict(scoring.result().outputs), scoring.doubts()


@pytest.mark.parametrize(
    ("axis", "boxes", "classes"),
    [(-1, "y[:, :, 0:4]", "y[:, :, 4:24]"), (1, "y[:, 0:4]", "y[:, 4:24]")],
    ids=["channels last", "channels first"],
)
def test_boxes_in_pixels_decide_no_class(axis: int, boxes: str, classes: str) -> None:
    """The largest number of all is a box's: by it other classes would agree altogether."""
    exact = detections(BOXES, CLASSES, axis)
    same = float((SHUFFLED.argmax(-1) == CLASSES.argmax(-1)).mean())
    assert by_slice("agreement", detections(BOXES, SHUFFLED, axis), exact)[0] == {
        classes: pytest.approx(same),
        boxes: 1.0,
    }
    off = np.where(np.arange(40)[:, None] % 2, 1.01, 1.05) * BOXES
    assert by_slice("agreement", detections(off, CLASSES, axis), exact)[0] == {
        boxes: 0.5,
        classes: 1.0,
    }
    logits = detections(BOXES, 4 * CLASSES - 3, axis)
    found, _ = by_slice("kld", detections(BOXES, 4 * SHUFFLED - 3, axis), logits)
    assert [*found] == [classes]
    assert found[classes] == pytest.approx(
        score("kld", 4 * SHUFFLED - 3, None, 4 * CLASSES - 3)
    )
    _, doubts = by_slice("kld", exact, exact)
    assert "as chances of a Sigmoid" in doubts[0]


LOGITS = 4 * CLASSES - 3
ANY = np.random.default_rng(8).uniform(0, 1, (8, 40, 4))


def scored(
    name: str, outputs: Outputs, of: tuple[str, ...] = ()
) -> tuple[list[tuple[str, Held]], str]:
    """What a metric is of, and what it says of that."""
    found = scored_outputs(get_metric(name), of, {"x": np.zeros((8, 3))}, outputs)
    return [(str(one), one.held) for one in found], "".join(one.doubt for one in found)


def test_boxes_in_an_output_of_their_own_decide_no_class() -> None:
    """The first output counted: which of four coordinates is the largest."""
    of_both = [("scores", Held.SCORES), ("boxes", Held.NUMBERS)]
    first = {"boxes": BOXES, "scores": CLASSES}
    found, doubt = scored("agreement", first)
    assert found == of_both
    assert "agreement is of output 'scores' and of the boxes in 'boxes'" in doubt
    assert "--of" in doubt
    assert scored("agreement", {"scores": CLASSES, "boxes": BOXES}) == (of_both, "")
    assert scored("agreement", first, ("scores",)) == (of_both[:1], "")
    assert scored("agreement", first, ("boxes",)) == (of_both[1:], "")
    same = float((SHUFFLED.argmax(-1) == CLASSES.argmax(-1)).mean())
    off = np.where(np.arange(40)[:, None] % 2, 1.01, 1.05) * BOXES
    assert by_slice("agreement", {"boxes": off, "scores": SHUFFLED}, first)[0] == {
        "scores": pytest.approx(same),
        "boxes": 0.5,
    }
    swapped = {n: np.swapaxes(a, 1, 2) for n, a in first.items()}
    other = {n: np.swapaxes(a, 1, 2) for n, a in {**first, "scores": SHUFFLED}.items()}
    assert by_slice("agreement", other, swapped)[0]["scores"] == pytest.approx(same)


def test_what_only_its_form_shows_is_told() -> None:
    found, doubt = scored("agreement", {"boxes": ANY, "logits": LOGITS})
    assert found[0] == ("logits", Held.SCORES)
    assert "'boxes' seems by its form to hold coordinates: name others with --of" in doubt
    deltas = np.random.default_rng(9).standard_normal((8, 40, 4))
    found, doubt = scored("agreement", {"deltas": deltas, "logits": LOGITS})
    assert found == [("deltas", Held.SCORES)]
    assert "name the output of scores: --of logits" in doubt
    found, doubt = scored("agreement", detections(ANY, 0.05 * CLASSES))
    assert found == [("y", Held.SCORES)]
    assert "one of the first 4, as where boxes lie beside scores" in doubt
    heads = {"a": deltas[:, 0], "b": LOGITS[:, 0]}
    assert scored("agreement", heads) == ([("a", Held.SCORES)], "")


@pytest.mark.parametrize("name", ["top1", "top5", "f1", "perplexity", "kld"])
def test_other_metrics_of_classes_are_of_the_scores_alone(name: str) -> None:
    found, doubt = scored(name, {"boxes": BOXES, "scores": LOGITS})
    assert found == [("scores", Held.SCORES)]
    assert f"{name} is of output 'scores', as output 'boxes' holds coordinates" in doubt
    after = {"boxes": BOXES, "scores": CLASSES[..., 0], "labels": LABELS_OF_ROWS}
    if name == "kld":
        with pytest.raises(UsageError, match=r"those of 'boxes' are coordinates.*of OUTPUT"):
            scored(name, after)
    else:
        assert scored(name, after)[0] == [("labels", Held.SCORES)]


LABELS_OF_ROWS = np.random.default_rng(10).integers(0, 80, (8, 40))


def test_class_numbers_in_an_output_of_their_own_agree_where_they_are_equal() -> None:
    first, score = BOXES[..., :2] / 1280, CLASSES[..., 0]
    boxes = np.concatenate([first, first + BOXES[..., 2:] / 1280], axis=-1)
    changed = LABELS_OF_ROWS + (np.arange(40) % 4 == 0)
    for dtype in (np.int64, np.float32):
        exact = {"boxes": boxes, "scores": score, "labels": LABELS_OF_ROWS.astype(dtype)}
        got = {**exact, "labels": changed.astype(dtype), "scores": score * 1.001}
        found, _ = by_slice("agreement", got, exact)
        assert found == {"labels": 0.75, "scores": 1.0, "boxes": 1.0}
    count = np.full((8, 1), 40)
    count[0] = 9
    found, _ = by_slice("agreement", {"n": 0 * count + 40, **exact}, {"n": count, **exact})
    assert found == {"n": 0.875, "labels": 1.0, "scores": 1.0, "boxes": 1.0}


@pytest.mark.parametrize("name", ["top1", "top5", "f1", "perplexity"])
def test_labels_are_of_the_classes_beside_boxes(name: str) -> None:
    labels = np.random.default_rng(6).integers(0, 20, (8, 40))
    found, doubts = by_slice(
        name, detections(BOXES, CLASSES), detections(BOXES, CLASSES), labels
    )
    assert found == {"y[:, :, 4:24]": pytest.approx(score(name, CLASSES, labels))}
    assert "labels are the numbers of its classes, from 0" in doubts[-1]


def test_what_one_metric_is_of_several_units_is_told() -> None:
    exact = detections(BOXES, CLASSES)
    for name, told in (("mse", True), ("mae", True), ("spearman", False)):
        labels = exact["y"] if told else np.arange(8)
        found, doubts = by_slice(name, exact, exact, labels)
        assert [*found] == ["y"]
        assert any("the largest decide it" in doubt for doubt in doubts) == told


def test_rows_without_scores_of_several_classes_are_near_or_not() -> None:
    """After NMS a row has a box, a score and the number of a class.

    A class number beside pixels was one of them: 3 in place of 4 was near.
    """
    numbers = np.random.default_rng(6).integers(1, 80, (8, 40, 1))
    rows = np.concatenate([BOXES, CLASSES[..., :1], numbers], axis=-1)
    far = rows * np.where(np.arange(40)[:, None] % 4, 1.0, 1.1)
    assert by_slice("agreement", {"y": far}, {"y": rows})[0] == {
        "y[:, :, 0:4]": 0.75,
        "y[:, :, 4]": 0.75,
        "y[:, :, 5]": 0.75,
    }
    other = rows + (np.arange(6) == 5) * (np.arange(40) % 5 == 0)[:, None]
    assert by_slice("agreement", {"y": other}, {"y": rows})[0] == {
        "y[:, :, 5]": 0.8,
        "y[:, :, 0:4]": 1.0,
        "y[:, :, 4]": 1.0,
    }
    with pytest.raises(UsageError, match="no slice of output 'y' holds scores of several"):
        by_slice("kld", {"y": rows}, {"y": rows})


def test_an_axis_that_is_named_hides_no_class() -> None:
    """Each score by itself is near, where the largest one is of another class."""
    exact, got = detections(BOXES, CLASSES), detections(BOXES, SHUFFLED)
    assert by_slice("agreement", got, exact, axis=2) == by_slice("agreement", got, exact)
    normalized = detections(BOXES / 640, CLASSES)
    found, doubts = by_slice("agreement", normalized, normalized, axis=2)
    assert [*found] == ["y"]
    assert "which numbers of output 'y' are scores is not known" in doubts[-1]
    text = {"y": np.random.default_rng(7).standard_normal((8, 3, 20))}
    changed = {"y": text["y"] * [[1.0], [1.0], [-1.0]]}
    found, _ = by_slice("agreement", changed, text, axis=1)
    assert found == {"y[:, 2]": 0.0, "y[:, 0]": 1.0, "y[:, 1]": 1.0}
    found, _ = by_slice("top1", text, text, np.zeros((8, 3), np.int64), axis=1)
    assert [*found] == ["y"]


def test_agreement_of_rows_is_what_the_page_says() -> None:
    """Of 100 rows 90 have their partner among 100 others: 90 / 110."""
    free = (FreeOutput(name="y", axes=(0,), group=0),)
    rows = np.stack([np.arange(100), np.zeros(100)], axis=1).astype(np.int64)
    other = rows.copy()
    other[90:, 1] = 1
    metric = get_metric("agreement")
    scoring = Scoring(metric, scored_outputs(metric, (), {}, {"y": rows}, None, free), free)
    scoring.update({"y": other}, None, {"y": rows})
    assert scoring.result() == pytest.approx(0.818, abs=5e-4)
    assert ".818 where 90 of 100 rows" in (DOCS / "reference/metrics.md").read_text()


@pytest.mark.parametrize("name", ["cosine", "snr_db", "max_abs"])
def test_masked_logits_count_where_they_differ(name: str) -> None:
    masked = np.array([[-math.inf, 1.0]])
    assert score(name, masked, None, masked) == METRICS[name].ideal
    if name != "cosine":
        worst = {"snr_db": -math.inf, "max_abs": math.inf}[name]
        assert score(name, np.array([[0.0, 1.0]]), None, masked) == worst
        assert score(name, np.array([[math.inf, 1.0]]), None, masked) == worst


@pytest.mark.parametrize("name", ["cosine", "snr_db", "max_abs"])
@pytest.mark.parametrize("expected", [math.inf, -math.inf, 1.0])
def test_nan_is_nan_whatever_was_expected(name: str, expected: float) -> None:
    got = np.array([[math.nan, 1.0]])
    assert math.isnan(score(name, got, None, np.array([[expected, 1.0]])))


@pytest.mark.parametrize("name", ["cosine", "snr_db", "max_abs"])
def test_outputs_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"has shape \[11, 7\], the fp32 model's \[12, 7\]"):
        score(name, SCORES[:11], None, SCORES)


def test_detections_of_another_number_agree_nowhere() -> None:
    boxes = np.zeros((5, 3), np.int64)
    for others in (boxes[:4], boxes[:0], np.zeros((6, 3), np.int64)):
        assert score("agreement", others, None, boxes) == 0
    assert score("agreement", boxes, None, boxes) == 1


@pytest.mark.parametrize("name", ["cosine", "snr_db", "max_abs"])
def test_a_batch_without_detections_counts_for_nothing(name: str) -> None:
    accumulator = get_metric(name).start()
    for rows in (0, 12):
        accumulator.update({"y": NOISY[:rows]}, None, {"y": SCORES[:rows]})
    assert accumulator.result() == pytest.approx(score(name, NOISY, None, SCORES))


def test_unknown_metrics_list_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"\(metric\): did you mean top1\? use one of top1"):
        get_metric("topp1")
    assert get_metric(" Accuracy ") is METRICS["top1"]


def test_one_hot_labels_are_classes_and_100_does_not_count() -> None:
    hot = np.eye(7)[LABELS]
    for name in ("top1", "top5", "f1", "perplexity"):
        assert score(name, SCORES, hot) == score(name, SCORES, LABELS)
        padded = np.append(LABELS, [-100, -100])
        assert score(name, np.r_[SCORES, SCORES[:2]], padded) == score(name, SCORES, LABELS)


def test_one_hot_rows_of_100_do_not_count() -> None:
    padded = np.r_[np.eye(7)[LABELS], np.full((2, 7), -100)].astype(np.float32)
    for name in ("top1", "f1", "perplexity"):
        found = score(name, np.r_[SCORES, SCORES[:2]], padded)
        assert found == score(name, SCORES, LABELS)


@pytest.mark.parametrize("name", ["top1", "f1"])
def test_one_hot_labels_of_a_model_that_decides(name: str) -> None:
    """They were refused, or compared with quantized scores number by number."""
    decided, hot = SCORES.argmax(axis=1), np.eye(7, dtype=np.float32)[LABELS]
    right = score(name, decided, LABELS)
    assert score(name, decided, hot) == right
    padded = np.append(LABELS, -100)
    assert score(name, np.append(decided, 0), padded) == right
    quantized = np.round(20 * (SCORES - SCORES.min())).astype(np.uint8)
    assert score(name, quantized, hot) == score(name, quantized, LABELS)
    assert score(name, hot.astype(int), hot.astype(int)) == 1  # several decisions a sample
    with pytest.raises(UsageError, match="a share of each"):
        score(name, decided, 0.9 * hot)


def test_one_hot_labels_are_said_to_be_read_as_classes() -> None:
    for name, metric in METRICS.items():
        scoring = Scoring(metric, [Scored(output="y")])
        if metric.needs_labels and name != "spearman":
            scoring.update({"y": SCORES}, np.eye(7)[LABELS].astype(np.float32), None)
            assert (ONE_HOT in scoring.doubts()) == metric.of_classes
            assert metric.of_classes == (name in ("top1", "top5", "f1", "perplexity"))


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (np.array(["cat"] * 12), "text: the labels are such as"),
        (LABELS + 1, "label 7 is no class of output 'y', which scores 7"),
        (LABELS[:, None] + 1, r"labels seem to start at 1 \(labels\): subtract 1"),
        (np.eye(8)[LABELS + 1], "mark one of 8 classes, and output 'y' scores 7"),
        (LABELS - 1, "label -1 is no class"),
        (LABELS + 0.5, "is no class"),
        (np.full(12, math.nan), "label nan is no class"),
        (np.full((12, 7), 1 / 7), r"a share of each: labels\[0\] is 0.143, .*, \.\.\. "),
        (0.9 * np.eye(7)[LABELS] + 0.1 / 7, "a share of each"),
        (
            np.eye(7)[LABELS] * (np.arange(12) != 3)[:, None],
            r"mark 0 classes: labels\[3\] is 0",
        ),
    ],
)
@pytest.mark.parametrize("name", ["top1", "top5", "f1", "perplexity"])
def test_labels_that_are_no_classes_are_refused(name: str, labels: Array, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        score(name, SCORES, labels)


@pytest.mark.parametrize("name", ["spearman", "mse", "mae"])
@pytest.mark.parametrize("bad", [np.array(["a"] * 12), np.full(12, math.nan)])
def test_labels_that_are_no_numbers_are_refused(name: str, bad: Array) -> None:
    with pytest.raises(UsageError, match="a number for each sample"):
        score(name, SCORES[:, 0], bad)


def test_against_scikit_learn() -> None:
    decided = SCORES.argmax(axis=1)
    macro = sklearn_metrics.f1_score(LABELS, decided, average="macro")
    assert score("f1", SCORES, LABELS) == pytest.approx(macro)
    assert score("f1", decided, LABELS) == pytest.approx(macro)
    right = sklearn_metrics.accuracy_score(LABELS, decided)
    assert score("accuracy", SCORES, LABELS) == pytest.approx(right)
    square = sklearn_metrics.mean_squared_error(TARGETS, SCORES)
    assert score("mse", SCORES, TARGETS) == pytest.approx(square)
    absolute = sklearn_metrics.mean_absolute_error(TARGETS, SCORES)
    assert score("mae", SCORES, TARGETS) == pytest.approx(absolute)
    shares = np.exp(SCORES) / np.exp(SCORES).sum(axis=1, keepdims=True)
    loss = sklearn_metrics.log_loss(LABELS, shares, labels=range(7))
    assert score("perplexity", SCORES, LABELS) == pytest.approx(math.exp(loss), rel=1e-5)
    with pytest.raises(UsageError, match="needs logits"):
        score("perplexity", shares, LABELS)


@pytest.mark.parametrize(
    "name", ["top1", "top5", "f1", "perplexity", "mse", "mae", "spearman"]
)
def test_scores_in_text_are_refused(name: str) -> None:
    scores = np.array([["a", "b"], ["c", "d"], ["e", "f"]])
    labels = np.zeros((3, 2)) if name in DISTANCES else np.arange(3) % 2
    with pytest.raises(UsageError, match=rf"{name} needs numbers, and output 'y' is text"):
        score(name, scores, labels)


def test_decisions_in_text_have_labels_in_text() -> None:
    said, labels = np.array(["a", "b"], object), np.array(["a", "c"])
    assert score("top1", said, labels) == 0.5
    assert score("top1", said, labels.astype("S")) == 0.5
    with pytest.raises(UsageError, match="compares numbers with text"):
        score("top1", said, np.array([1, 2]))


def doubts(name: str, outputs: Array, labels: Array | None = None) -> tuple[str, ...]:
    accumulator = get_metric(name).start()
    accumulator.update({"y": outputs}, labels, {"y": outputs})
    return accumulator.doubts()


def test_what_a_baseline_says_little_of_is_told() -> None:
    many = np.random.default_rng(0).standard_normal((400, 4)).astype(np.float32)
    guessed = np.random.default_rng(1).integers(0, 4, 400)
    assert "level of guessing among 4 classes" in doubts("top1", many, guessed)[0]
    assert not doubts("top1", many, many.argmax(axis=1))
    assert "unrelated numbers" in doubts("spearman", many[:, 0], guessed)[0]
    assert not doubts("spearman", many[:, 0], many[:, 0])
    assert "guessing among 4 classes" in doubts("perplexity", many, guessed)[0]
    assert not doubts("perplexity", 5 * many, many.argmax(axis=1))
    assert "rests on 12 decisions" in doubts("top1", SCORES, SCORES.argmax(axis=1))[0]
    skewed = np.where(np.arange(400) < 380, 1, many.argmax(axis=1))
    found = doubts("top1", many + 2 * np.eye(4, dtype=np.float32)[1], skewed)
    assert "always to name the commonest labels gives 0.9" in found[0]
    assert not doubts("top1", many + 9 * np.eye(4, dtype=np.float32)[skewed], skewed)
    same = np.tile(SCORES[:1], (40, 1))
    assert "decides alike" in doubts("agreement", same)[0]
    mostly = np.where(np.arange(40) < 30, same[0].argmax(), 0)
    assert "decides alike" in doubts("top1", same, mostly)[0]
    assert "decides alike" in doubts("top1", same.argmax(axis=1), mostly)[0]
    assert "one class" in doubts("f1", many, np.zeros(400, int))[0]
    assert "rests on one sample" in doubts("cosine", SCORES[:1])[0]


@pytest.mark.parametrize("name", ["top1", "top5", "f1", "agreement", "spearman"])
def test_one_decision_says_nothing(name: str) -> None:
    with pytest.raises(UsageError, match="over 1 decision says nothing"):
        doubts(name, SCORES[:1], LABELS[:1])


@pytest.mark.parametrize("name", ["top1", "top5", "f1", "agreement", "perplexity", "kld"])
def test_labels_none_of_which_counts_are_said_to_be_so(name: str) -> None:
    accumulator = get_metric(name).start()
    accumulator.update({"y": SCORES}, np.full(12, -100), {"y": SCORES})
    with pytest.raises(UsageError, match=f"{name} is over no decision: all labels are -100"):
        accumulator.doubts()


def test_top5_of_five_classes_is_no_metric() -> None:
    with pytest.raises(UsageError, match="top5 of 5 classes is right whatever"):
        doubts("top5", SCORES[:, :5], LABELS % 5)
