"""A user's function judges the baseline; which of its feeds are kept to calibrate and time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

from finecast.data.function_workload import FunctionWorkload, Run
from finecast.data.functions import metric_value
from finecast.engines.base import Feeds, TensorSpec
from finecast.errors import UsageError, UserCodeError
from tests.data.test_workload import Counting, one, shapes


def evaluating(*passes: Sequence[Feeds]) -> FunctionWorkload:
    """A user's function that runs other feeds at each call, and at last the same ones.

    Its number is 1 if the model gives back what it is fed.
    """
    waiting = iter(passes)

    def function(run: Run) -> float:
        calls = [(feeds, run(feeds)) for feeds in next(waiting, passes[-1])]
        return float(all(np.array_equal(got["x"], feeds["x"]) for feeds, got in calls))

    return FunctionWorkload(function=function, name="mine")


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


@pytest.mark.parametrize("low", [False, True])
def test_an_evaluation_may_feed_tensors(low: bool) -> None:
    """As a DataLoader gives them; those of bfloat16 are numbers of fp32."""
    torch = pytest.importorskip("torch")
    rows = torch.ones(2, 3, dtype=torch.bfloat16 if low else torch.float32)
    seen: list[Any] = []

    def function(run: Run) -> float:
        seen.append(run({"x": rows.requires_grad_()})["x"])
        return float(seen[-1].mean())

    session: Any = Counting()
    workload = FunctionWorkload(function=function, name="mine")
    workload.evaluate(session, None)
    kept = workload.timing()[0]["x"]
    for array in (kept, seen[0]):
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float32


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


@pytest.mark.parametrize("value", [
        "0.9", b"1", None, [0.5], object(), True, np.bool_(0), torch.tensor(True), 1j,
        np.complex64(1), (0.5, torch.tensor(0.1)), {"accuracy": 0.5}, np.ones((2, 2)),
        torch.ones(2, 2), np.array([]),
    ],
)  # fmt: skip
def test_a_metric_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(UserCodeError, match=f"of type {type(value).__name__}, not a number"):
        metric_value(value, "mine")


def test_of_several_values_the_error_asks_for_the_one_to_keep() -> None:
    with pytest.raises(UserCodeError, match=r"returns \(0\.9, 0\.1\).*the one to keep"):
        metric_value((0.9, 0.1), "mine")


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.5), np.array([0.5]), np.array(0.5), torch.tensor(0.5),
        torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.bfloat16),
        torch.tensor([0.0, 1.0], requires_grad=True),
        np.array([True, False]), torch.tensor([1, 0]), ml_dtypes.bfloat16(0.5),
    ],
)  # fmt: skip
def test_a_metric_may_be_a_number_of_any_library_or_one_for_each_sample(value: object) -> None:
    assert metric_value(value, "mine") == 0.5


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


class Summing(Counting):
    """A model of the inputs that are named, which gives back the first."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        shape = ("batch", 2)
        self.inputs = [TensorSpec(name=n, dtype="fp32", shape=shape) for n in names]

    def run(self, feeds: Feeds) -> dict[str, Any]:
        return {"y": feeds[self.inputs[0].name]}


def test_a_model_with_one_input_takes_its_array_alone() -> None:
    array, session = np.ones((3, 2), np.float32), Summing("x")
    run = Run(cast("Any", session), remember=True)
    np.testing.assert_array_equal(run(array)["y"], array)
    np.testing.assert_array_equal(run(array.tolist())["y"], array)
    assert [*run.seen()[0]] == ["x"]


@pytest.mark.parametrize("given", [np.ones((3, 2), np.float32), [1, 2], None])
def test_a_model_with_several_inputs_takes_them_by_name(given: object) -> None:
    run = Run(cast("Any", Summing("x", "z")))
    with pytest.raises(UsageError, match=r"the model has 2 inputs.*'x', 'z'"):
        run(given)
