"""What a workload is identified by, and which feeds it keeps for calibration and timing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.data.datasets import Dataset
from finecast.data.metrics import METRICS
from finecast.data.workload import (
    DataWorkload,
    FunctionWorkload,
    Run,
    metric_value,
    probed,
    spread,
    thinned,
)
from finecast.engines.base import Array, Feeds, Session, TensorSpec, calls_of
from finecast.errors import EngineError, UserCodeError


class Taking(Session):
    """Takes inputs x, y ... of these shapes; ``only`` calls of so many samples, if given."""

    def __init__(self, *shapes: tuple[Any, ...] | None, only: int | None = None) -> None:
        named = zip("xy", shapes, strict=False)
        self.inputs = tuple(TensorSpec(name=n, dtype="fp32", shape=s) for n, s in named)
        self.outputs = ()
        self.only = only

    def run(self, feeds: Feeds) -> dict[str, Any]:
        (call,) = calls_of(feeds)
        if self.only not in (None, len(call["x"])):
            raise EngineError("another batch was compiled in")
        return {}


class Counting(Session):
    """Gives back what it is fed, and counts."""

    inputs = outputs = ()

    def __init__(self) -> None:
        self.runs = 0

    def run(self, feeds: Feeds) -> dict[str, Array]:
        self.runs += 1
        return dict(feeds)


def one(rows: int, value: float = 1.0) -> Feeds:
    return {"x": np.full((rows, 2), value, np.float32)}


def evaluating(*passes: Sequence[Feeds]) -> FunctionWorkload:
    """A user's function that runs other feeds at each call, and at last the same ones.

    Its number is 1 if the model gives back what it is fed.
    """
    waiting = iter(passes)

    def function(run: Run) -> float:
        calls = [(feeds, run(feeds)) for feeds in next(waiting, passes[-1])]
        return float(all(np.array_equal(got["x"], feeds["x"]) for feeds, got in calls))

    return FunctionWorkload(function=function, name="mine")


def comparing(images: Array) -> DataWorkload:
    """Decisions held against those of fp32, in batches of two."""
    return DataWorkload(
        data=Dataset(
            inputs=(TensorSpec(name="x", dtype="fp32", shape=("n", 3)),),
            arrays={"x": images},
            axes={"x": 0},
            labels=None,
            size=len(images),
        ),
        metric=METRICS["agreement"],
        batch=2,
        data_digest="data",
        calibrate=list,
    )


def test_a_metric_that_compares_with_fp32_runs_it_once_on_each_batch() -> None:
    workload = comparing(np.eye(5, 3, dtype=np.float32))
    sessions: list[Any] = [Counting(), Counting(), Counting()]
    exact, *others = sessions
    assert workload.evaluate(exact, None) == 1.0
    assert [workload.evaluate(other, exact) for other in others] == [1.0, 1.0]
    assert [session.runs for session in sessions] == [3, 3, 3]


def test_another_fp32_model_is_run_anew() -> None:
    workload = comparing(np.eye(5, 3, dtype=np.float32))
    sessions: list[Any] = [Counting(), Counting(), Counting()]
    one_model, another, low = sessions
    workload.evaluate(one_model, None)
    workload.evaluate(low, another)
    workload.evaluate(low, one_model)
    assert [session.runs for session in sessions] == [6, 3, 6]


def shapes(feeds: Sequence[Feeds]) -> list[int]:
    return [f["x"].shape[0] for f in feeds]


def test_the_feeds_kept_are_those_of_the_baseline() -> None:
    workload = evaluating([one(1), one(2)], [one(5)], [one(7)])
    session: Any = Counting()
    workload.evaluate(session, None)
    first = shapes(list(workload.calibration()))
    for _ in range(2):
        workload.evaluate(session, None)
    assert shapes(list(workload.calibration())) == first == [2, 1]
    assert shapes(workload.timing()) == [2, 1]


@pytest.mark.parametrize(("rows", "calls"), [(1, 120), (16, 8), (64, 3), (500, 3)])
def test_an_evaluation_s_feeds_calibrate_by_as_many_samples_as_are_probed(
    rows: int, calls: int
) -> None:
    """Errors of nets that are called with one sample differ manyfold from call to call."""
    workload = evaluating([one(rows)] * 360)
    session: Any = Counting()
    workload.evaluate(session, None)
    assert len(list(workload.calibration())) == calls
    assert len(workload.compared()) == 3
    assert len(workload.timing()) == 1  # calls of one shape take as long as each other


def test_feeds_of_megabytes_are_kept() -> None:
    rows = [1 << 17, 1 << 18, 1 << 16]
    workload = evaluating([one(n) for n in rows])
    session: Any = Counting()
    workload.evaluate(session, None)
    assert sorted(shapes(workload.timing())) == sorted(rows)


def test_kept_feeds_are_copies() -> None:
    feeds = one(2, 1.0)
    workload = evaluating([feeds])
    session: Any = Counting()
    workload.evaluate(session, None)
    feeds["x"][:] = 9.0
    assert next(iter(workload.timing()))["x"].max() == 1.0


def test_given_calibration_feeds_come_before_those_of_the_evaluation() -> None:
    workload = replace_calibration(evaluating([one(1)]), lambda: [one(3), one(4)])
    session: Any = Counting()
    workload.evaluate(session, None)
    assert shapes(list(workload.calibration())) == [3, 4]
    assert shapes(workload.timing()) == [4, 3]


def replace_calibration(
    workload: FunctionWorkload, calibrate: Callable[[], Sequence[Feeds]]
) -> FunctionWorkload:
    workload.calibrate = calibrate
    return workload


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5))
def test_a_spread_has_the_largest_and_falls(sizes: list[int], count: int) -> None:
    found = shapes(spread([one(n) for n in sizes], count))
    assert 1 <= len(found) <= count
    assert found[0] == max(sizes)
    assert found == sorted(found, reverse=True)


@given(st.integers(2, 40), st.integers(2, 8))
def test_a_spread_is_even_and_as_close_as_the_count_allows(given: int, count: int) -> None:
    found = shapes(spread([one(n) for n in range(1, given + 1)], count))
    (gap,) = {larger - smaller for larger, smaller in pairwise(found)}
    assert found[-1] <= gap  # what is left after the last is less than a gap
    assert gap == 1 or len(range(0, given, gap - 1)) > count


def test_a_function_that_runs_nothing_says_so() -> None:
    workload = evaluating([])
    session: Any = Counting()
    with pytest.raises(UserCodeError, match="returns 1 and never ran the model"):
        workload.evaluate(session, None)


def test_the_baseline_is_judged_twice_and_run_once() -> None:
    calls: list[float] = []

    def function(run: Run) -> float:
        outputs = [run(one(2, value))["x"] for value in (1.0, 2.0)]
        calls.append(float(sum(y.sum() for y in outputs)))
        outputs[0][:] = 0.0  # what the user does to outputs reaches nobody else
        return calls[-1]

    workload = FunctionWorkload(function=function, name="mine")
    session: Any = Counting()
    assert workload.evaluate(session, None) == 12.0
    assert calls == [12.0, 12.0, -12.0]  # the last on negated outputs: the number follows them
    assert session.runs == 2
    workload.evaluate(session, session)
    assert session.runs == 4


@pytest.mark.parametrize("value", ["0.9", b"1", None, [0.5], object()])
def test_a_metric_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(UserCodeError, match=f"of type {type(value).__name__}, not a number"):
        metric_value(value, "mine")
    assert metric_value(np.float32(0.5), "mine") == 0.5


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_a_baseline_of_infinity_is_refused(value: float) -> None:
    def function(run: Run) -> float:
        run(one(1))
        return value

    session: Any = Counting()
    workload = FunctionWorkload(function=function, name="mine")
    with pytest.raises(UserCodeError, match="inf for the fp32 model"):
        workload.evaluate(session, None)
    # Another model's loss may be infinite: it misses the criterion.
    assert workload.evaluate(session, session) == value


def test_a_metric_that_looks_at_no_output_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def function(run: Run) -> float:
        sys.stdout.write("seen\n")
        run(one(2))
        return 0.9

    session: Any = Counting()
    workload = FunctionWorkload(function=function, name="mine")
    with pytest.raises(UserCodeError, match=r"returns 0\.9 whatever the outputs are"):
        workload.evaluate(session, None)
    assert session.runs == 1
    assert capsys.readouterr().out == "seen\n" * 2


def _first_class(run: Run) -> float:
    """Right if the first is the largest: so it is in zeros, but not in the negatives."""
    scores = run({"x": np.array([[2.0, 1.0]], np.float32)})["x"]
    return float(scores.argmax() == 0)


def _never_right(run: Run) -> float:
    """Wrong, and of zeros right."""
    scores = run({"x": np.array([[-1.0, 1.0, -1.0]], np.float32)})["x"]
    return float((scores == 0).all())


def _until_the_end(run: Run) -> float:
    """Steps whose number depends on the outputs: with others it might never end."""
    steps, value = 0, 3.0
    while value > 0:
        value = float(run({"x": np.array([value], np.float32)})["x"][0]) - 1
        steps += 1
    return float(steps)


def _picky(run: Run) -> float:
    """The same for all outputs that it takes."""
    assert run(one(1, 5.0))["x"].min() > 0
    return 1.0


@pytest.mark.parametrize("function", [_first_class, _never_right, _until_the_end, _picky])
def test_a_metric_that_may_look_at_outputs_is_taken(function: Any) -> None:
    session: Any = Counting()
    FunctionWorkload(function=function, name="mine").evaluate(session, None)
    assert session.runs == (3 if function is _until_the_end else 1)


@pytest.mark.parametrize("unlike", ["in what it returns", "in what it runs"])
def test_a_metric_that_gives_something_else_each_time_is_refused(unlike: str) -> None:
    random = np.random.default_rng(0)

    def function(run: Run) -> float:
        draw = float(random.random())
        outputs = run(one(1, draw if unlike == "in what it runs" else 1.0))
        return float(outputs["x"].sum()) if unlike == "in what it runs" else draw

    session: Any = Counting()
    workload = FunctionWorkload(function=function, name="mine")
    with pytest.raises(UserCodeError, match="different numbers for the same outputs"):
        workload.evaluate(session, None)


@pytest.mark.parametrize(
    ("shape", "other", "rows"),
    [
        (("n", 2), ("n", 2), 8),
        # Rows of unlike inputs, and of fixed ones, belong together: none is left out.
        (("n", 2), ("m", 2), 20),
        ((20, 2), (20, 2), 20),
        # Free dimensions that the model's library does not name.
        (("x.0", 2), ("y.0", 2), 8),
        (("x.0", 2), ("n", 2), 20),
    ],
)
def test_samples_are_left_out_where_all_inputs_share_a_free_dimension(
    shape: tuple[Any, ...], other: tuple[Any, ...], rows: int
) -> None:
    specs = [
        TensorSpec(name="x", dtype="fp32", shape=shape),
        TensorSpec(name="y", dtype="fp32", shape=other),
    ]
    feeds = {"x": np.zeros((20, 2), np.float32), "y": np.zeros((20, 2), np.float32)}
    assert {a.shape[0] for a in thinned(feeds, specs).values()} == {rows}


def test_free_dimensions_without_a_name_and_of_unlike_sizes_are_left_whole() -> None:
    specs = [TensorSpec(name=n, dtype="fp32", shape=(f"{n}.0", 2)) for n in "xy"]
    feeds = {"x": np.zeros((20, 2), np.float32), "y": np.zeros((30, 2), np.float32)}
    assert thinned(feeds, specs) is feeds


@pytest.mark.parametrize(("rows", "calls"), [(1, 8), (3, 3), (8, 1), (20, 1)])
def test_calls_are_probed_until_they_have_the_samples(rows: int, calls: int) -> None:
    session = Taking(("n", 2))
    feeds = [{"x": np.zeros((rows, 2), np.float32)}] * 12
    found = probed(feeds, session)
    assert len(found) == calls
    assert all(len(f["x"]) <= 8 for f in found)


def test_calls_are_left_whole_where_the_model_runs_on_whole_calls_alone() -> None:
    feeds = [{"x": np.zeros((20, 2), np.float32)}] * 12
    found = probed(feeds, Taking(("n", 2), only=20))
    assert [len(f["x"]) for f in found] == [20]


def test_calls_whose_inputs_share_no_dimension_are_a_sample_each() -> None:
    session = Taking(None, None)
    feeds = {"x": np.zeros((1, 64), np.float32), "y": np.zeros((2, 1), np.float32)}
    assert len(probed([feeds] * 12, session)) == 8
    assert len(probed([feeds] * 3, session)) == 3


@pytest.mark.parametrize(
    "change", [{"metric": METRICS["agreement"]}, {"batch": 2}, {"data_digest": "other"}]
)
def test_data_metric_and_batch_identify_a_workload(change: dict[str, Any]) -> None:
    data: Any = Dataset
    workload = DataWorkload(
        data=data,
        metric=METRICS["top1"],
        batch=1,
        data_digest="data",
        calibrate=list,
    )
    assert replace(workload).digest == workload.digest
    assert replace(workload, **change).digest != workload.digest
