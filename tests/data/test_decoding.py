"""Texts decoded token by token, with the state carried from call to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.data.datasets import Dataset
from finecast.data.decoding import Decoding, DecodingSession
from finecast.data.options import DataOptions
from finecast.data.sources import workload_of
from finecast.data.workload import DataWorkload
from finecast.engines.base import (
    Array,
    Feeds,
    Session,
    TensorSpec,
    calls_of,
    untimed_of,
)
from finecast.errors import UsageError
from finecast.measure.timing import Turns, pass_over

CLASSES = 4
IDS = np.random.default_rng(0).integers(0, CLASSES, (3, 9))


def spec(name: str, *shape: int | str, dtype: str = "fp32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


class Counter(Session):
    """Logits are how often each token came so far; the cache has the tokens, in two halves.

    ``rounds`` rounds the cache down to whole numbers of that step.
    """

    inputs: Sequence[TensorSpec] = (
        spec("input_ids", "batch", "length", dtype="int64"),
        spec("attention_mask", "batch", "past + length", dtype="int64"),
        spec("past_0_key", "batch", "past", CLASSES),
        spec("past_0_value", "batch", "past", CLASSES),
    )
    outputs: Sequence[TensorSpec] = (
        spec("logits", "batch", "length", CLASSES),
        spec("last", "batch", CLASSES),
        spec("present_0_key", "batch", "total", CLASSES),
        spec("present_0_value", "batch", "total", CLASSES),
    )

    def __init__(self, lost: float = 0.0) -> None:
        self.lost = lost
        self.lengths: list[int] = []

    def run(self, feeds: Feeds) -> dict[str, Array]:
        new = np.eye(CLASSES, dtype=np.float32)[feeds["input_ids"].astype(int)]
        past = feeds["past_0_key"]
        both = np.concatenate([past, new], axis=1)
        assert feeds["attention_mask"].shape == both.shape[:2]
        assert np.array_equal(feeds["past_0_value"], past)
        self.lengths.append(new.shape[1])
        logits = both.cumsum(axis=1)[:, past.shape[1] :]
        kept = (both.astype(np.float64) - self.lost).astype(np.float32)
        return dict(
            zip(
                [o.name for o in self.outputs],
                (logits, logits[:, -1], kept, kept),
                strict=True,
            )
        )


class Stateful(Session):
    """The same model, which keeps its cache by itself, as OpenVINO's does."""

    inputs = (*Counter.inputs[:2], spec("beam_idx", "batch", dtype="int32"))
    outputs = Counter.outputs[:2]

    def __init__(self) -> None:
        self.inner = Counter()
        self.reset()

    @property
    def keeps_state(self) -> bool:
        return True

    def reset(self) -> None:
        self.past: Array | None = None

    def step(self, feeds: Feeds) -> dict[str, Array]:
        rows = len(feeds["input_ids"])
        assert feeds["beam_idx"].tolist() == list(range(rows))
        past = np.zeros((rows, 0, CLASSES), np.float32) if self.past is None else self.past
        cached = {"past_0_key": past, "past_0_value": past}
        outputs = self.inner.run({**feeds, **cached})
        self.past = outputs["present_0_key"]
        return {name: outputs[name] for name in ("logits", "last")}

    def run(self, feeds: Feeds) -> dict[str, Array]:
        raise AssertionError


def texts(ids: Array = IDS) -> dict[str, Array]:
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def empty(rows: int) -> dict[str, Array]:
    past = np.zeros((rows, 0, CLASSES), np.float32)
    return {"past_0_key": past, "past_0_value": past}


@given(st.integers(1, 8), st.sampled_from([Counter, Stateful]))
def test_steps_give_what_one_call_gives_at_these_positions(steps: int, kind: Any) -> None:
    decoded = DecodingSession(session := kind(), Decoding.of(session, steps, {})).run(texts())
    whole = Counter().run({**texts(), **empty(len(IDS))})
    assert np.array_equal(decoded["logits"], whole["logits"][:, -steps:])
    assert np.array_equal(decoded["last"], whole["last"])
    assert [*decoded] == ["logits", "last"]
    lengths = session.inner.lengths if kind is Stateful else session.lengths
    assert lengths == [IDS.shape[1] - steps] + [1] * steps


def test_what_the_cache_loses_shows_in_the_steps_only() -> None:
    low = Counter(lost=0.25)
    decoded = DecodingSession(low, Decoding.of(low, 3, {})).run(texts())["logits"]
    whole = low.run({**texts(), **empty(len(IDS))})["logits"][:, -3:]
    assert np.array_equal(whole, Counter().run({**texts(), **empty(3)})["logits"][:, -3:])
    lost = np.subtract(whole, decoded)[0, :, 0]
    # A token in the cache of a step was written anew by every call since it came.
    assert lost.tolist() == [0.25 * 6, 0.25 * (2 * 6 + 1), 0.25 * (3 * 6 + 2 + 1)]


def test_the_feeds_of_a_first_call_and_of_a_step() -> None:
    session = Counter(lost=0.25)
    first, step = Decoding.of(session, 4, {}).phases(session, texts())
    assert [first[n].shape[1] for n in first] == [5, 5, 0, 0]
    assert [step[n].shape[1] for n in step] == [1, 9, 8, 8]
    assert session.lengths == [8, 1]
    kept = Stateful()
    first, step = Decoding.of(kept, 4, {}).phases(kept, texts())
    assert first["input_ids"].shape == (3, 5)
    assert [call["input_ids"].shape[1] for call in calls_of(step)] == [8, 1]
    assert untimed_of(step) == 1


class Renamed(Session):
    """A model with other names of the ports of its state."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.inputs = (spec("ids", "b", "n", dtype="int64"), *self._state(inputs))
        self.outputs = (spec("logits", "b", "n", 4), *self._state(outputs))

    @staticmethod
    def _state(names: Sequence[str]) -> Sequence[TensorSpec]:
        return tuple(spec(name, "b", 2, f"of_{name}", 8) for name in names)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        raise AssertionError


@pytest.mark.parametrize(
    ("inputs", "outputs", "patterns"),
    [
        ("past_key_values.0.key past_key_values.0.value", "present.0.value present.0.key", {}),
        ("past_key_self_0 past_value_self_0", "present_value_self_0 present_key_self_0", {}),
        ("k.0.in v.0.in", "v.0.out k.0.out", {"*.in": "*.out"}),
        ("a b", "d c", {"a": "c", "b": "d"}),
    ],
)
def test_state_is_found_by_name_or_named(
    inputs: str, outputs: str, patterns: Mapping[str, str]
) -> None:
    found = Decoding.of(Renamed(inputs.split(), outputs.split()), 1, patterns)
    assert found.state == dict(zip(inputs.split(), outputs.split()[::-1], strict=True))
    assert [one.name for one in found.inputs] == ["ids"]


@pytest.mark.parametrize(
    ("name", "output", "patterns", "message"),
    [
        ("past_0", "present_1", {}, "no output becomes the input 'past_0'"),
        ("cache", "cache_out", {}, "no input is called a past.*: leave it out, or say which"),
        ("mask", "", {}, r"no input is called a past[^:]*: leave it out$"),
        ("cache", "out", {"cash*": "out*"}, r"unknown input 'cash\*'.*use one of ids, cache"),
        ("cache", "out", {"cache": "cash"}, "unknown output 'cash'.*use one of logits, out"),
    ],
)
def test_state_that_is_not_there_is_an_error(
    name: str, output: str, patterns: Mapping[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Decoding.of(Renamed([name] if output else [], [output] * bool(output)), 1, patterns)


def test_a_model_that_keeps_its_state_is_named_none() -> None:
    with pytest.raises(UsageError, match=r"keeps its state itself.*leave it out"):
        Decoding.of(Stateful(), 1, {"past_*": "present_*"})


LEFT_OUT = "state leaves out past_0_value: say which output each becomes"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({}, {}, "'past_0_key' is missing.*give decode_steps N"),
        ({"decode_steps": 3}, empty(3), "'past_0_key' is not taken.*leave it out"),
        ({"decode_steps": 3, "state": {"past_0_key": "present_0_key"}}, {}, LEFT_OUT),
    ],
)
def test_arrays_of_the_state_are_explained(
    options: dict[str, Any], given: dict[str, Array], message: str, streamed: bool
) -> None:
    feeds: Any = {**texts(), **given}
    stated = DataOptions(data=[feeds] if streamed else feeds, **options)
    with pytest.raises(UsageError, match=message):
        workload_of(stated, Counter()).evaluate(Counter(), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_steps": 9}, "9 positions, and 9 are decoded"),
        ({"state": ["past*=present*"]}, "give decode_steps"),
        ({"decode_steps": 1, "data": None, "evaluate": lambda run: 1.0}, "calls the model by"),
    ],
)
def test_options_without_effect_are_errors(options: dict[str, Any], message: str) -> None:
    stated: dict[str, Any] = {"data": texts(), **options}
    given = DataOptions(**stated)
    with pytest.raises(UsageError, match=message):
        workload_of(given, Counter()).evaluate(Counter(), None)


@pytest.mark.parametrize("given", ["past", "past*=present", "=present"])
def test_a_malformed_state_says_how_to_write_it(given: Any) -> None:
    state: Any = [given]
    with pytest.raises(UsageError, match=r"past\.\*=present\.\*"):
        DataOptions(decode_steps=1, state=state)


def test_calls_are_timed_apart_where_texts_are_decoded() -> None:
    whole: dict[str, Array] = {**texts(), **empty(len(IDS))}
    workload = workload_of(DataOptions(data=whole), Counter())
    assert not workload.decodes
    with pytest.raises(UsageError, match=r"decode.steps: they are calls of decoding"):
        workload.of_call(0)


def test_a_kept_state_is_made_before_a_step_is_timed() -> None:
    workload = workload_of(DataOptions(data=texts(), decode_steps=2), Stateful())
    (first,), (step,) = (workload.of_call(number).timing() for number in (0, 1))
    assert first["input_ids"].shape == (3, 7)
    (both,) = workload.timing()
    assert len(calls_of(both)) == 2
    assert not untimed_of(both)
    session = Stateful()
    turns = Turns({"step": pass_over(session, [step])})
    turns.round(["step"])
    assert session.inner.lengths == [8, 1]


def test_a_workload_scores_the_steps_by_text() -> None:
    labels = np.where(np.arange(9) < 6, CLASSES - 1, IDS)  # those of the first call are wrong
    options = DataOptions(
        data={**texts(), "label": labels}, decode_steps=3, batch=2, metric="agreement"
    )
    exact, low = Counter(), Counter(lost=0.25)
    workload = workload_of(options, exact)
    assert isinstance(workload, DataWorkload)
    assert workload.evaluate(exact, None) == 1.0
    score = workload.evaluate(low, exact)
    assert score.samples["logits"].count == len(IDS)
    assert workload.of == ("logits",)
    assert [len(feeds["input_ids"]) for feeds in workload.timing()] == [2, 2]
    assert len([*workload.calibration()]) == 4
    alone = [workload.of_call(number) for number in (0, 1)]
    assert [one.timing()[0]["input_ids"].shape[1] for one in alone] == [6, 1]
    assert [len(one.of_call(1).timing()) for one in alone] == [1, 1]
    by_label = workload_of(
        DataOptions(data=options.data, decode_steps=3, metric="top1"), exact
    )
    assert isinstance(by_label, DataWorkload)
    assert isinstance(by_label.data, Dataset)
    one_call = exact.run({**texts(), **empty(3)})["logits"][:, 6:]
    right = (one_call.argmax(axis=-1) == IDS[:, 6:]).mean()
    assert by_label.evaluate(exact, None) == pytest.approx(right)
    assert by_label.digest != workload.digest
    of_steps = replace(by_label, data=replace(by_label.data, labels=labels[:, 6:]))
    assert of_steps.evaluate(exact, None) == pytest.approx(right)


@pytest.mark.parametrize("metric", ["perplexity", "top1", "kld"])
@pytest.mark.parametrize("positions", [2, 8, 12])
def test_labels_of_other_positions_than_the_texts_are_refused(
    metric: str, positions: int
) -> None:
    labels = np.zeros((len(IDS), positions), int)
    options = DataOptions(data={**texts(), "label": labels}, decode_steps=3, metric=metric)
    workload = workload_of(options, exact := Counter())
    told = f"have {positions} positions, and the texts 9.*each of the 9 .*of the last 3"
    with pytest.raises(UsageError, match=told):
        workload.evaluate(exact, None)
