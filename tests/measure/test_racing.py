from __future__ import annotations

import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finecast.errors import EngineError
from finecast.measure.racing import Effort, Interval, Race


@dataclass
class Clock:
    """Time that only calls move; stands for the module ``time``."""

    now_s: float = 128.0
    calls: list[str] = field(default_factory=list[str])

    def perf_counter(self) -> float:
        return self.now_s

    process_time = staticmethod(time.process_time)

    def taking(self, name: str, times: Iterator[float]) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            self.now_s += next(times)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("finecast.measure.timing.time", made)
    return made


def noisy(mean_s: float, noise: float, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield mean_s * float(np.exp(noise * rng.standard_normal()))


def calls_of(clock: Clock, noise: float, **means: float) -> dict[str, Callable[[], None]]:
    return {
        name: clock.taking(name, noisy(mean, noise, seed))
        for seed, (name, mean) in enumerate(means.items())
    }


def effort(rounds: int, settle_s: float = 0.0, warmup: int = 0) -> Effort:
    return Effort(min_time_s=0.0, settle_s=settle_s, rounds=rounds, warmup=warmup)


def test_each_round_runs_all_once(clock: Clock) -> None:
    Race(calls=calls_of(clock, 0.0, fp32=1.0, low=2.0)).run(effort(3, warmup=1))
    rounds = [sorted(clock.calls[i : i + 2]) for i in range(0, len(clock.calls), 2)]
    assert rounds == [["fp32", "low"]] * 4


def test_joined_rounds_give_the_middle_of_the_processes(clock: Clock) -> None:
    """However many rounds one of them had; and an interval that has them all."""
    races: list[Race] = []
    for low_s, rounds in ((0.5, 30), (0.4, 5), (0.8, 5)):
        race = Race(calls=calls_of(clock, 0.0, fp32=1.0, low=low_s, here=0.1))
        race.run(effort(rounds))
        races.append(race)
    first, *others = races
    for other in others:
        del other._samples["here"]  # it raced in the first process alone
        first.join(pickle.loads(pickle.dumps(other)))
    speed = first.speed("low")
    assert (speed.low, speed.median, speed.high) == pytest.approx((1.25, 2.0, 2.5))
    assert first.speed("here").median == pytest.approx(10.0)
    assert first.speeds("low") == pytest.approx((2.0, 2.5, 1.25))
    assert first.speeds("here") == pytest.approx((10.0,))


def test_the_order_goes_on_to_change_where_a_race_goes_on(clock: Clock) -> None:
    race = Race(calls=calls_of(clock, 0.2, fp32=1.0, low=0.97), matters=1.0001)
    race.run(effort(8, settle_s=100.0))
    first = clock.calls[16::2]
    assert len(first) > 12
    assert set(first) == {"fp32", "low"}


def test_what_is_settled_takes_no_more_rounds(clock: Clock) -> None:
    found = Race(calls=calls_of(clock, 0.05, fp32=3.0, slow=2.0, one=1.0, near=1.04))
    found.run(effort(7, settle_s=10_000))
    assert clock.calls.count("slow") == 7
    assert clock.calls.count("one") == clock.calls.count("near") > 7
    assert found.slowdown("one").median < found.slowdown("near").median
    assert not found.unsettled()


def test_the_anchor_is_in_every_round(clock: Clock) -> None:
    found = Race(calls=calls_of(clock, 0.05, fp32=3.0, one=1.0, near=1.04))
    found.run(effort(7, settle_s=10_000))
    assert clock.calls.count("fp32") == clock.calls.count("one")


def test_equals_are_not_raced_for_ever(clock: Clock) -> None:
    found = Race(calls=calls_of(clock, 0.05, fp32=3.0, one=1.0, same=1.0))
    found.run(effort(7, settle_s=1e9))
    assert found.unsettled() == set()
    assert found.latency("one").runs < 1000


def test_a_speed_that_is_to_be_known_takes_rounds_until_it_is(clock: Clock) -> None:
    wanted = replace(effort(5, settle_s=1e6), known_to=0.05)
    race = Race(calls=calls_of(clock, 0.3, fp32=2.0, low=1.0))
    race.run(wanted)
    assert race.slowdown("low").spread <= 0.05
    quiet = Race(calls=calls_of(clock, 0.001, fp32=2.0, low=1.0))
    clock.calls.clear()
    quiet.run(wanted)
    assert len(clock.calls) == 2 * 5


@pytest.mark.parametrize(
    ("fine", "errors", "goes_on"),
    [
        (1.03, {"fine": 1.0, "coarse": 2.0}, True),
        (1.40, {"fine": 1.0, "coarse": 2.0}, False),  # clearly slower
        (0.70, {"fine": 1.0, "coarse": 2.0}, False),  # clearly as fast
        (1.20, {"fine": 2.0, "coarse": 1.0}, False),  # slower, and less accurate
        (1.03, {"coarse": 1.0}, False),  # stands beside them, and is not chosen
    ],
)
def test_whether_a_more_accurate_one_is_as_fast_takes_rounds_until_it_is_known(
    clock: Clock, fine: float, errors: dict[str, float], *, goes_on: bool
) -> None:
    race = Race(calls=calls_of(clock, 0.05, fp32=2.0, coarse=1.0, fine=fine))
    race.run(replace(effort(7, settle_s=1e6), order=False, limit=1.5, errors=errors, tie=1.03))
    assert (race.latency("fine").runs > 7) == goes_on
    ratio = race.between("fine", "coarse")
    assert not goes_on or ratio.low > 1.03 or ratio.high < 1.03 or ratio.spread <= 0.008


@pytest.mark.parametrize(("fine", "as_fast"), [(1.0, True), (1.029, True), (1.07, False)])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_runs_agree_whether_a_more_accurate_one_is_as_fast(
    clock: Clock, fine: float, noise: float, *, as_fast: bool
) -> None:
    wanted = replace(effort(11, settle_s=1e6), order=False, limit=1.5, tie=1.03)
    wanted = replace(wanted, errors={"fine": 1.0, "coarse": 2.0})
    told: list[bool] = []
    for seed in range(20):
        means = {"fp32": 2.0, "coarse": 1.0, "fine": fine}
        draws = {n: noisy(m, noise, 3 * seed + i) for i, (n, m) in enumerate(means.items())}
        race = Race(calls={n: clock.taking(n, times) for n, times in draws.items()})
        race.run(wanted)
        told.append(race.is_as_fast("fine", "coarse", 1.03))
    assert told.count(as_fast) >= 19


def test_a_ratio_that_noise_leaves_open_may_be_small(clock: Clock) -> None:
    """Unless what was seen of it is far above."""
    for fine, as_fast in ((1.04, True), (1.2, False)):
        race = Race(calls=calls_of(clock, 0.2, fp32=2.0, coarse=1.0, fine=fine))
        race.run(effort(9))
        assert race.between("fine", "coarse").spread > 0.05
        assert race.is_as_fast("fine", "coarse", 1.03) == as_fast


def test_what_cannot_be_chosen_any_more_takes_no_more_rounds(clock: Clock) -> None:
    """A more accurate plan than the one found, once it is known to be slower than that."""
    means = {"fp32": 2.0, "found": 1.0, "slower": 1.2}
    race = Race(calls=calls_of(clock, 0.1, **means))
    wanted = replace(effort(9, settle_s=1e6), order=False, known_to=0.01, tie=1.03)
    race.run(replace(wanted, errors={"found": 2.0, "slower": 1.0}, sure="found"))
    counts = Counter(clock.calls)
    assert counts["slower"] < counts["found"] == counts["fp32"]
    assert race.slowdown("found").spread <= 0.01 < race.slowdown("slower").spread


def test_seconds_bound_it(clock: Clock) -> None:
    def turns(mean_s: float, phase: int) -> Iterator[float]:
        for turn in range(10_000):
            yield mean_s * (2.0 if (turn + phase) % 3 == 0 else 1.0)

    calls = {n: clock.taking(n, turns(1.0, i)) for i, n in enumerate(("fp32", "one"))}
    found = Race(calls=calls)
    start = clock.now_s
    found.run(effort(5, settle_s=50.0))
    assert found.unsettled()
    assert 60 < clock.now_s - start < 100


def test_a_disturbance_of_whole_rounds_changes_no_speed(clock: Clock) -> None:
    def disturbed(mean_s: float) -> Iterator[float]:
        for turn in range(1000):
            yield mean_s * (10.0 if 10 <= turn < 24 else 1.0)

    calls = {n: clock.taking(n, disturbed(m)) for n, m in {"fp32": 2.0, "low": 1.0}.items()}
    found = Race(calls=calls)
    found.run(effort(25))
    slower = found.slowdown("low")
    assert (slower.low, slower.median, slower.high) == pytest.approx((0.5, 0.5, 0.5))
    assert found.speed("low").median == pytest.approx(2.0)


def test_a_time_is_stated_beside_the_anchor(clock: Clock) -> None:
    # All take longer later, when only "low" and "near" are still raced.
    def slower(mean_s: float, noise: Iterator[float]) -> Iterator[float]:
        for turn in range(10_000):
            yield mean_s * next(noise) * (1.0 if turn < 7 else 3.0)

    means = {"fp32": 4.0, "settled": 2.0, "low": 1.0, "near": 1.05}
    calls = {
        n: clock.taking(n, slower(m, noisy(1.0, 0.05, seed)))
        for seed, (n, m) in enumerate(means.items())
    }
    found = Race(calls=calls)
    found.run(effort(7, settle_s=10_000))
    assert found.latency("settled").runs == 7 < found.latency("low").runs
    assert found.latency_s("settled") / found.latency_s("low") == pytest.approx(2.0, rel=0.1)


def test_times_travel_and_what_was_called_does_not(clock: Clock) -> None:
    race = Race(calls=calls_of(clock, 0.05, fp32=1.0, a=0.9, b=1.2))
    race.run(effort(rounds=5))
    there = pickle.loads(pickle.dumps(race))
    for one, other in (("a", "fp32"), ("a", "b")):
        assert there.between(one, other) == race.between(one, other)
    assert there.latency("b") == race.latency("b")
    assert there.unsettled() == race.unsettled()
    with pytest.raises(AssertionError, match="call nothing"):
        there.run(effort(rounds=5))


def test_stated_times_are_settled_and_called_by_nobody() -> None:
    found = Race.stated(3.0, {"low": 1.0, "same": 1.0})
    assert found.unsettled() == set()
    assert (found.latency_s("low"), found.speed("low").median) == (1.0, 3.0)
    assert found.names == {"low", "same"}


@settings(max_examples=50, deadline=None)
@given(
    low=st.floats(0.5, 2.0),
    widths=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    matters=st.floats(1.0, 1.2),
)
def test_settled_is_known_order_or_no_matter(
    low: float, widths: tuple[float, float], matters: float
) -> None:
    one = Interval(low=low, median=low + widths[0], high=low + sum(widths))
    surely_apart = one.low > 1 or one.high < 1
    surely_near = max(one.high, 1 / one.low) <= matters
    assert one.settles(matters) == (surely_apart or surely_near)


def test_what_is_far_too_slow_leaves(clock: Clock) -> None:
    race = Race(calls=calls_of(clock, 0.01, fp32=1.0, slow=2.0, near=1.02, low=0.5))
    race.run(replace(effort(9), limit=0.98))
    counts = Counter(clock.calls)
    assert counts["slow"] < counts["near"] == counts["low"] == counts["fp32"] == 9
    assert race.speed("slow").median == pytest.approx(0.5, rel=0.05)


def test_one_fast_round_keeps_it(clock: Clock) -> None:
    calls = calls_of(clock, 0.0, fp32=1.0, low=0.5)
    calls["disturbed"] = clock.taking("disturbed", iter([9.0, 9.0, *[0.5] * 7]))
    Race(calls=calls).run(replace(effort(9), limit=0.98))
    assert clock.calls.count("disturbed") == 9


def test_what_another_one_beats_in_time_and_error_leaves(clock: Clock) -> None:
    """Not what is slower and more accurate, nor what has no error: an engine's own model."""
    means = {
        "fp32": 1.0,
        "fast": 0.5,
        "beaten": 0.6,
        "equal": 0.51,
        "accurate": 0.7,
        "own": 0.8,
    }
    race = Race(calls=calls_of(clock, 0.002, **means))
    errors = {"fast": 2.0, "beaten": 2.0, "equal": 3.0, "accurate": 1.0}
    race.run(replace(effort(9), errors=errors))
    counts = Counter(clock.calls)
    assert counts.pop("beaten") == 3
    assert set(counts.values()) == {9}
    assert race.slowdown("beaten").median == pytest.approx(0.6, rel=0.02)


def test_what_left_takes_no_rounds_to_settle(clock: Clock) -> None:
    means = {"fp32": 1.0, "fast": 0.5, "beaten": 0.6, "near": 0.601}
    race = Race(calls=calls_of(clock, 0.01, **means), matters=1.0001)
    errors = {"fast": 1.0, "beaten": 2.0, "near": 3.0}
    race.run(replace(effort(9, settle_s=99.0), errors=errors))
    assert clock.calls.count("beaten") == clock.calls.count("near") == 3


def test_what_turns_out_slower_and_no_more_exact_takes_no_more_rounds(clock: Clock) -> None:
    """Nor does what is not chosen: how fast an engine's own model is need not be known."""
    means = {"fp32": 1.0, "fast": 0.5, "beaten": 0.51, "accurate": 0.6, "own": 0.7}
    race = Race(calls=calls_of(clock, 0.02, **means))
    errors = {"fast": 2.0, "beaten": 2.0, "accurate": 1.0}
    race.run(replace(effort(7, settle_s=1e6), order=False, errors=errors, known_to=0.004))
    counts = Counter(clock.calls)
    assert counts["own"] == 7 <= counts["beaten"] < min(counts["fast"], counts["accurate"])
    assert race.slowdown("fast").spread <= 0.004
    assert race.slowdown("accurate").spread <= 0.004


def test_long_calls_are_warmed_up_once(clock: Clock) -> None:
    Race(calls=calls_of(clock, 0.0, fp32=1.0, low=0.01)).run(effort(7, warmup=3))
    assert (clock.calls.count("fp32"), clock.calls.count("low")) == (8, 10)


def test_the_order_of_two_that_are_too_slow_is_not_settled(clock: Clock) -> None:
    """Noise leaves open which of the two is the faster one, and it does not matter."""
    means = {"fp32": 1.0, "one": 1.2, "other": 1.201, "low": 0.5}
    rounds: list[int] = []
    for limit in (math.inf, 0.98):
        clock.calls.clear()
        race = Race(calls=calls_of(clock, 0.02, **means), matters=1.0001)
        race.run(replace(effort(30, settle_s=400.0), limit=limit))
        rounds.append(clock.calls.count("fp32"))
    assert rounds[1] <= 30 < rounds[0]


def test_how_slow_what_is_too_slow_is_takes_no_rounds(clock: Clock) -> None:
    race = Race(calls=calls_of(clock, 0.1, fp32=1.0, slow=2.0, low=0.5))
    race.run(replace(effort(9, settle_s=1e4), limit=1.0, known_to=0.02))
    assert clock.calls.count("slow") == 3
    assert clock.calls.count("low") > 9


def test_nothing_is_timed_once_all_are_too_slow(clock: Clock) -> None:
    Race(calls=calls_of(clock, 0.0, fp32=1.0, slow=2.0)).run(replace(effort(9), limit=0.98))
    assert clock.calls.count("fp32") < 9


@pytest.mark.parametrize(("used_s", "calls"), [(30.0, 1), (3.0, 7), (0.0, 7)])
def test_what_takes_several_times_the_limit_runs_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, used_s: float, calls: int
) -> None:
    """If it computed for so long: else another process, or a device, may have."""
    computed = 0.0

    def slow() -> None:
        nonlocal computed
        clock.calls.append("slow")
        clock.now_s += 10.0 if clock.calls.count("slow") == 1 else 1.0
        computed += used_s

    def anchor() -> None:
        nonlocal computed
        clock.now_s += 1.0
        computed += used_s and 3.0

    monkeypatch.setattr("finecast.measure.timing.used_s", lambda: computed)
    race = Race(calls={"fp32": anchor, "slow": slow})
    race.run(replace(effort(7), limit=1.0))
    assert clock.calls.count("slow") == calls


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.floats(0.0, 2.0))
def test_a_speed_is_the_quotient_of_the_times_told(rounds: int, noise: float) -> None:
    with pytest.MonkeyPatch.context() as patched:
        clock = Clock()
        patched.setattr("finecast.measure.timing.time", clock)
        race = Race(calls=calls_of(clock, noise, fp32=2.0, low=1.0))
        race.run(effort(rounds=rounds))
    told, back = race.latency_s("fp32") / race.latency_s("low"), race.slowdown("low")
    assert race.speed("low").median == pytest.approx(told)
    assert race.speed("low").low == pytest.approx(1 / back.high)


@pytest.mark.parametrize("lasts", [0, 1, 3, 5])
def test_what_fails_leaves_the_race(clock: Clock, lasts: int) -> None:
    """In the first run, in a later warm-up, or in a round; another process is told, too."""

    def failing(name: str) -> Callable[[], None]:
        whole = clock.taking(name, noisy(1.0, 0.0, 0))

        def call() -> None:
            if clock.calls.count(name) == lasts:
                raise EngineError("out of memory")
            whole()

        return call

    calls = calls_of(clock, 0.01, fp32=2.0, low=1.0)
    found = Race(calls={**calls, "weak": failing("weak")})
    found.run(effort(7, settle_s=5.0, warmup=3))
    race = pickle.loads(pickle.dumps(found))
    assert race.names == {"low"}
    assert race.speed("low").median == pytest.approx(2.0, rel=0.05)
    assert race.failed["weak"].what == "out of memory"
    with pytest.raises(EngineError, match="out of memory"):
        race.speed("weak")
    with pytest.raises(EngineError, match="out of memory"):
        Race(calls={**calls, "fp32": failing("anchor")}).run(effort(7, warmup=3))
