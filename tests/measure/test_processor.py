"""Whether other processes kept this one from the processors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finecast.measure import timing
from finecast.measure.racing import Effort, Race
from finecast.measure.timing import Demand


class Machine:
    """Calls compute, and wait for a processor; stands for the module ``time`` and /proc."""

    def __init__(self, threads: Path) -> None:
        self.now_s = self.used_s = self.waited_s = 0.0
        self._threads = threads
        self.call(0, 0)

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.used_s

    def call(self, used_s: float, waited_s: float, asleep_s: float = 0.0) -> None:
        self.used_s += used_s
        self.waited_s += waited_s
        self.now_s += used_s + waited_s + asleep_s
        for name, share in (("1", 0.75), ("2", 0.25)):
            (self._threads / name).mkdir(exist_ok=True)
            text = f"{self.used_s * share * 1e9:.0f} {self.waited_s * share * 1e9:.0f} 12\n"
            (self._threads / name / "schedstat").write_text(text)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(timing, "_THREADS", tmp_path)
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(timing, "process_time", made.process_time)
    return made


def raced(fp32: Callable[[], None], low: Callable[[], None]) -> Race:
    return Race.of(fp32, {"low": low}, Effort(min_time_s=0.0, rounds=9, warmup=0))


def test_demand_is_of_all_threads(machine: Machine) -> None:
    machine.call(3.0, 1.0)
    before = Demand.now()
    machine.call(2.0, 6.0)
    found = Demand.now().since(before)
    assert (found.used_s, found.waited_s) == pytest.approx((2.0, 6.0))
    assert found.denied == pytest.approx(0.75)
    assert (found + found).total_s == pytest.approx(16.0)


def test_a_thread_that_ends_takes_no_time_back(machine: Machine, tmp_path: Path) -> None:
    machine.call(3.0, 1.0)
    before = Demand.now()
    (tmp_path / "2" / "schedstat").unlink()
    assert Demand.now().since(before).waited_s == 0.0


def test_a_thread_that_ended_takes_no_wait_of_another_one_along(
    machine: Machine, tmp_path: Path
) -> None:
    machine.call(1.0, 8.0)
    before = Demand.now()
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "2" / "schedstat").write_text(f"0 {3e9:.0f} 1\n")
    assert Demand.now().since(before).waited_s == pytest.approx(1.0)


def test_nothing_is_denied_where_the_system_does_not_count(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing, "_THREADS", tmp_path / "absent")
    machine.call(1.0, 9.0)
    assert Demand.now().denied == 0.0


def test_beside_busy_processes_processor_times_are_compared(machine: Machine) -> None:
    race = raced(lambda: machine.call(2.0, 1.0), lambda: machine.call(1.0, 3.0))
    assert race.denied == pytest.approx(4 / 7)
    assert race.speed("low").median == pytest.approx(2.0)
    assert race.latency("low").median_s == pytest.approx(4.0)  # a call took as long


def test_on_an_idle_machine_the_times_of_calls_are_compared(machine: Machine) -> None:
    # the second one is served by fewer threads: its calls last, though they compute less
    race = raced(lambda: machine.call(2.0, 0.0), lambda: machine.call(1.0, 0.1, 0.4))
    assert race.denied == 0.0
    assert race.speed("low").median == pytest.approx(2.0 / 1.5)


def test_calls_that_wait_for_a_device_are_known_by_their_times(machine: Machine) -> None:
    race = raced(lambda: machine.call(0.1, 0.1, 4.0), lambda: machine.call(0.2, 0.2, 1.8))
    assert race.denied == 0.0
    assert race.speed("low").median == pytest.approx(4.2 / 2.2)
