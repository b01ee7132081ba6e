"""Roundings switched on in sessions of a few give what one session of all gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finecast.engines.base import Array, Feeds, KernelTime, Session, TensorSpec
from finecast.errors import EngineError
from finecast.native.roundings import SwitchedProbe, part_size
from finecast.numbers.formats import Format
from finecast.planning.points import SWITCH, Switch
from finecast.planning.sensitivity import measure


@dataclass
class Toy(Session):
    """A session that adds what its switches have; each session sums in an order of its own."""

    added: Sequence[float]
    off_by: float
    inputs: Sequence[TensorSpec] = (TensorSpec(name=SWITCH, dtype="bool", shape=(None,)),)
    outputs: Sequence[TensorSpec] = ()
    runs: int = 0

    def run(self, feeds: Feeds) -> dict[str, Array]:
        self.runs += 1
        on = np.asarray(feeds[SWITCH])
        assert on.shape == (len(self.added),)
        y = np.concatenate([[1.0 + self.off_by], np.sqrt(self.added) * on])
        wide = np.zeros(1 + WIDTH)
        first = round(self.off_by * 1e6)
        wide[0], wide[1 + first : 1 + first + len(self.added)] = y[0], y[1:]
        return {"y": wide, "class": np.array([3])}

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        return []


WIDTH = 40


class Loads:
    """Sessions by the part of the switches that they were loaded with."""

    def __init__(self, errors: Sequence[float]) -> None:
        self.errors = errors
        self.sessions: list[Toy] = []

    def __call__(self, some: Sequence[Switch]) -> Toy:
        ids = [next(iter(s.ports))[0] for s in some]
        first = ids[0] if ids else 0
        assert ids == list(range(first, first + len(ids)))
        self.sessions.append(Toy([self.errors[k] for k in ids], off_by=first * 1e-6))
        return self.sessions[-1]


def probe_of(errors: Sequence[float], size: int) -> tuple[SwitchedProbe, Loads]:
    """A probe whose parts have ``size`` switches, whatever loading took."""
    loads = Loads(errors)
    rounded = [Switch(ports={(k, 0): Format.BF16}) for k in range(len(errors))]
    probe = SwitchedProbe(loads, rounded, [{}])
    probe(np.zeros(len(errors), dtype=bool))
    probe.size = size
    return probe, loads


ERRORS = st.lists(st.floats(1e-3, 1, allow_subnormal=False), min_size=1, max_size=WIDTH)


@given(ERRORS, st.integers(1, WIDTH + 1))
def test_each_rounding_brings_what_it_brings_in_the_session_of_all(
    errors: list[float], size: int
) -> None:
    probe, loads = probe_of(errors, size)
    found = measure(len(errors), probe)
    assert found.values == pytest.approx(np.array(errors), rel=1e-6)
    assert found.total == pytest.approx(sum(errors))
    parts = -(-len(errors) // size)
    assert len(loads.sessions) == (1 if parts == 1 else 1 + parts)


@given(ERRORS, st.integers(1, WIDTH + 1), st.data())
def test_any_roundings_can_be_on_in_any_order(
    errors: list[float], size: int, data: st.DataObject
) -> None:
    probe, _ = probe_of(errors, size)
    (exact, _) = probe(np.zeros(len(errors), dtype=bool))
    for _ in range(4):
        on = np.array(
            data.draw(st.lists(st.booleans(), min_size=len(errors), max_size=len(errors)))
        )
        y, chosen = probe(on)
        moved = y.astype(np.float64) - exact.astype(np.float64)
        assert moved == pytest.approx(
            np.concatenate([[0.0], np.sqrt(errors) * on, np.zeros(WIDTH - len(errors))]),
            abs=1e-9,
        )
        assert chosen.tolist() == [3]


def test_the_shape_of_an_output_may_follow_from_the_numbers() -> None:
    class Selecting(Toy):
        def run(self, feeds: Feeds) -> dict[str, Array]:
            on = int(np.asarray(feeds[SWITCH]).sum())
            return {"y": np.ones(3 + round(self.off_by * 1e6) + on)}

    rounded = [Switch(ports={(k, 0): Format.BF16}) for k in range(4)]
    probe = SwitchedProbe(
        lambda some: Selecting([1.0] * len(some), next(iter(some[0].ports))[0] * 1e-6),
        rounded,
        [{}],
    )
    probe(np.zeros(4, dtype=bool))
    probe.size = 2
    assert probe(np.array([False, False, False, True]))[0].shape == (6,)


@given(ERRORS, st.integers(1, WIDTH + 1), st.integers(0, WIDTH))
def test_a_part_that_the_engine_refuses_takes_the_session_of_all(
    errors: list[float], size: int, refused: int
) -> None:
    """OpenVINO compiles some stateful decoders with all roundings, but not with a few."""
    probe, loads = probe_of(errors, size)
    load = probe.load

    def fussy(some: Sequence[Switch]) -> Session:
        ids = [next(iter(s.ports))[0] for s in some]
        if refused in ids and len(ids) < len(errors):
            raise EngineError("Invalid graph status")
        return load(some)

    probe.load = fussy
    found = measure(len(errors), probe)
    assert found.values == pytest.approx(np.array(errors), rel=1e-6)
    parts = -(-len(errors) // size)
    assert len(loads.sessions) <= 2 + parts  # the refused part is not tried at each probe


def test_what_the_engine_refuses_with_all_roundings_is_an_error() -> None:
    def load(some: Sequence[Switch]) -> Session:
        raise EngineError("no kernel")

    probe = SwitchedProbe(load, [Switch(ports={(0, 0): Format.BF16})], [{}])
    with pytest.raises(EngineError, match="no kernel"):
        probe(np.array([True]))


def test_what_is_known_with_nothing_on_is_not_run_again() -> None:
    probe, loads = probe_of([0.5, 0.5], 2)
    (session,) = loads.sessions
    before = session.runs
    probe(np.zeros(2, dtype=bool))
    assert session.runs == before


def test_a_slow_first_run_decides_no_size() -> None:
    """Kernels are made in it: of 5,000 roundings it took 60 times as long as others."""

    class Slow(Toy):
        def run(self, feeds: Feeds) -> dict[str, Array]:
            time.sleep(0 if self.runs else 0.05)
            return super().run(feeds)

    count = 12
    rounded = [Switch(ports={(k, 0): Format.BF16}) for k in range(count)]
    probe = SwitchedProbe(lambda some: Slow([1.0] * len(some), 0.0), rounded, [{}])
    probe(np.zeros(count, dtype=bool))
    assert probe.size == count


def test_there_may_be_nothing_to_round() -> None:
    probe, _ = probe_of([], 1)
    assert measure(0, probe).total == 0


@pytest.mark.parametrize(
    ("count", "load_s", "run_s", "size"),
    [
        (142, 1.0, 1.4, 16),  # ResNet-50: nine sessions, each loaded in a second
        (100, 0.05, 0.002, 100),  # short runs: loading would cost more than it saves
        (2, 0.1, 10.0, 2),  # nothing to divide
        (100, 0.0, 0.0, 100),
    ],
)
def test_parts_are_as_large_as_loading_is_dear(
    count: int, load_s: float, run_s: float, size: int
) -> None:
    assert part_size(count, load_s, run_s) == size
