"""What profiles of a model's two ends say before errors are probed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from finecast.engines.base import Array, Feeds, KernelTime, Session, TensorSpec
from finecast.measure.timing import Demand
from finecast.measure.timing_cache import TimingCache
from finecast.native.profiles import (
    CastRate,
    Profiles,
    measured_cost,
    profiled_in_turns,
)
from finecast.numbers.formats import Format
from tests.graph.text import from_text

WEIGHTS = Format.INT8_WEIGHTS

TWO = """input %0 x fp32
node a relu onnx::Relu fp32 (%0) -> (%1 v1 fp32)
node b relu onnx::Relu fp32 (%1) -> (%2 v2 fp32)
output %2
"""


def profile(high_s: float, low_s: Mapping[Format, float]) -> Profiles:
    def kernels(
        time_s: float, codes: frozenset[str] = frozenset({"int8"})
    ) -> list[KernelTime]:
        product = KernelTime(
            kernel="k", kind="", ops=("product",), format="", time_s=time_s, constants=codes
        )
        return [product, KernelTime(kernel="o", kind="", ops=("o",), format="", time_s=5.0)]

    return Profiles(
        high=kernels(high_s, frozenset()), low={f: kernels(s) for f, s in low_s.items()}
    )


def test_times_of_other_kernels_say_nothing_of_weights() -> None:
    found = profile(0.1, {Format.BF16: 2.0, WEIGHTS: 0.09})
    faster = [replace(k, time_s=k.time_s / 2) for k in found.low[WEIGHTS] if k.kernel == "o"]
    weights = [k for k in found.low[WEIGHTS] if k.kernel == "k"]
    found = replace(found, low={**found.low, WEIGHTS: [*weights, *faster]})
    assert found.without_slow_formats()[1] == (WEIGHTS,)


@pytest.mark.parametrize(
    ("low_s", "slow"),
    [
        ({Format.BF16: 2.0, WEIGHTS: 0.5}, ()),
        ({Format.BF16: 2.0, WEIGHTS: 1.5}, (WEIGHTS,)),  # casts may be what bf16 loses by
        ({WEIGHTS: 1.5}, ()),
    ],
)
def test_weights_that_gain_nothing_are_left_out(
    low_s: dict[Format, float], slow: tuple[Format, ...]
) -> None:
    found, left_out = profile(1.0, low_s).without_slow_formats()
    assert left_out == slow
    assert found.low.keys() == low_s.keys() - set(slow)


@dataclass
class Drifting(Session):
    """A session on a machine that gets slower with each profile that is taken."""

    share: float
    machine: list[float]
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    repeats: list[int] = field(default_factory=list[int])

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return {}

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        self.repeats.append(repeats)
        self.machine.append(self.machine[-1] * 1.01)
        seen = KernelTime(
            kernel="k", kind="", ops=("k",), format="", time_s=self.share * self.machine[-1]
        )
        often = KernelTime(kernel="o", kind="", ops=("o",), format="", time_s=1e-6)
        return [seen, often] if len(self.repeats) % 2 else [seen]


def test_profiles_in_turns_feel_the_same_machine() -> None:
    machine = [1e-2]
    sessions = [Drifting(share, machine) for share in (1.0, 0.5, 0.25)]
    found = profiled_in_turns(sessions, {}, from_text(TWO))
    high, *low = ({k.kernel: k.time_s for k in kernels} for kernels in found)
    for times, share in zip(low, (0.5, 0.25), strict=True):
        # One after the other, each would be measured on a machine slower by 1.01 ** 4.
        assert times["k"] / high["k"] == pytest.approx(share, rel=0.021)
        assert times["o"] == high["o"]  # it is not in every turn
    assert all(sum(s.repeats[1:]) >= 15 for s in sessions)


@dataclass
class Steady(Session):
    """A session whose kernels, one for each op, take these times; it counts its profiles."""

    times_s: Mapping[str, float]
    signature: str = "jit ([1,2]) -> ([1,2])"
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    profiles: int = 0

    def run(self, feeds: Feeds) -> dict[str, Array]:
        return {}

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        self.profiles += 1
        return [
            KernelTime(
                kernel=n, kind="", ops=(n,), format="fp32", time_s=t, signature=self.signature
            )
            for n, t in self.times_s.items()
        ]


def times_of(cache: TimingCache | None, *sessions: Steady) -> list[dict[str, float]]:
    found = profiled_in_turns(sessions, {}, from_text(TWO), cache)
    return [{k.kernel: k.time_s for k in kernels} for kernels in found]


@pytest.fixture
def cache(tmp_path: Path) -> TimingCache:
    made = TimingCache.here("openvino", "CPU", tmp_path / "timing_cache.db")
    assert made is not None
    return made


def test_what_was_profiled_once_needs_no_profile(cache: TimingCache) -> None:
    """Ops of one kind and kernels of one signature have one price, whatever their names."""
    high, low = {"a": 2e-3, "b": 2e-3}, {"a": 1e-3, "b": 1e-3}
    first = times_of(cache, Steady(high), Steady(low, "brgemm"))
    again = Steady({n: 1.1 * t for n, t in high.items()}), Steady(low, "brgemm")
    assert times_of(cache, *again) == first == [high, low]
    assert [s.profiles for s in again] == [1, 1]


def test_what_the_book_lacks_is_profiled(cache: TimingCache) -> None:
    high, low = {"a": 2e-3, "b": 2e-3}, {"a": 1e-3, "b": 1e-3}
    times_of(cache, Steady(high), Steady(low, "brgemm"))
    other = Steady(high), Steady(low, "another")
    assert times_of(cache, *other) == [high, low]
    assert other[0].profiles > 1
    assert times_of(cache, Steady(high, ""), Steady(low, "")) == [high, low]


def test_few_runs_time_the_kernels_that_the_book_lacks(cache: TimingCache) -> None:
    times_of(cache, Steady({"a": 2e-3, "b": 2e-3}))
    mixed = Steady({"a": 3e-3, "b": 3e-3, "more": 3e-4})  # a machine slower by half
    assert times_of(cache, mixed)[0] == pytest.approx({"a": 2e-3, "b": 2e-3, "more": 2e-4})
    assert mixed.profiles == 1


def test_a_quiet_machine_that_contradicts_the_book_is_profiled(
    cache: TimingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy one is not: the cache has the times of a quiet one."""
    times_of(cache, Steady({"a": 2e-3}), Steady({"a": 1e-3}, "brgemm"))
    with monkeypatch.context() as busy:
        busy.setattr(Demand, "is_busy", True)
        told = times_of(cache, Steady({"a": 9e-3}), Steady({"a": 3e-3}, "brgemm"))
        assert told == [{"a": 2e-3}, {"a": 1e-3}]
    told = times_of(cache, Steady({"a": 2e-3}), Steady({"a": 2e-3}, "brgemm"))
    assert told == [{"a": 2e-3}, {"a": 2e-3}]


def test_times_of_a_busy_machine_are_known_on_a_busy_one_alone(
    cache: TimingCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(Demand, "is_busy", True)
        times_of(cache, Steady({"a": 2e-3}))
        again = Steady({"a": 9e-3})
        assert times_of(cache, again) == [{"a": 2e-3}]
    assert times_of(cache, Steady({"a": 1e-3})) == [{"a": 1e-3}]
    monkeypatch.setattr(Demand, "is_busy", True)
    assert times_of(cache, again) == [{"a": 1e-3}], "those of a quiet machine are better"


def test_all_time_of_a_kernel_is_that_of_the_ops_of_the_graph_in_it() -> None:
    """A cast that a plan put into the same kernel is no op of the graph."""
    graph = from_text(TWO)
    one = KernelTime(kernel="k", kind="", ops=("a", "cast", "b"), format="", time_s=4.0)
    other = replace(one, kernel="o", ops=("b",), time_s=1.0)
    profiles = Profiles(high=[one, other], low={Format.BF16: [one]})
    cost = measured_cost(graph, profiles, lambda _: CastRate(), {})
    assert [cost.node_time_s(graph, n, Format.FP32) for n in graph.nodes] == [2.0, 3.0]
    assert [cost.node_time_s(graph, n, Format.BF16) for n in graph.nodes] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("formats", "asked"),
    [
        ((Format.INT8, Format.BF16), Format.BF16),
        ((Format.INT8, WEIGHTS), Format.INT8),
        ((WEIGHTS, Format.FP16), Format.FP16),
    ],
)
def test_casts_cost_what_those_between_floats_do(
    formats: tuple[Format, ...], asked: Format
) -> None:
    profiles = Profiles(high=[], low={fmt: [] for fmt in formats})
    rates = {asked: CastRate(overhead_s=7.0)}
    cost = measured_cost(from_text(TWO), profiles, rates.__getitem__, {})
    assert cost.cast_overhead_s == 7.0
