"""What the search makes least of: with the toy engine of ``test_tuning``, at stated times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finecast
from finecast.engines.base import Feeds, Loadable, Session
from finecast.errors import UsageError
from finecast.measure.study import Study
from finecast.naming import member_of
from finecast.numbers.formats import Format
from finecast.tuning.goal import Objective, takes
from tests.tuning.test_tuning import Bench, ToyEngine, bench

__all__ = ["bench"]


def test_what_is_no_objective_says_what_is_near() -> None:
    assert member_of(Objective, " SIZE ", what="objective") is Objective.SIZE
    with pytest.raises(UsageError, match=r"'latncy'.*latency"):
        member_of(Objective, "latncy", what="objective")


def test_a_smaller_model_may_be_slower(bench: Bench) -> None:
    """Where low ops take twice the time nothing is faster, and all the same it is smaller."""
    bench.engine.gain = 0.5
    assert not bench.tune().improved
    outcome = bench.tune(objective=Objective.SIZE)
    assert outcome.improved
    assert outcome.objective is Objective.SIZE
    assert outcome.tuned.cost == outcome.tuned.size_bytes < outcome.baseline.size_bytes
    assert outcome.gain == outcome.baseline.size_bytes / outcome.tuned.size_bytes
    assert outcome.gain_spread == 0.0
    assert outcome.speedup < 1 < outcome.gain  # the latency is told all the same
    assert outcome.tuned.latency_s > outcome.baseline.latency_s
    decided = {r.text for r in outcome.plan.reasons if r.rule == "decision"}
    assert any("MB stored" in text for text in decided)


def test_less_memory_is_told_as_an_estimate(bench: Bench) -> None:
    bench.engine.gain = 0.5
    outcome = bench.tune(objective=Objective.MEMORY)
    assert outcome.improved
    assert outcome.tuned.cost < outcome.baseline.cost
    weights = 4 * (8 * 3 * 9 + 8 * 8 * 9 + 4 * 8)
    # Two maps of 8 channels are alive at once: what a convolution reads, and what it gives.
    assert outcome.baseline.cost == weights + 2 * 4 * 16 * 8 * 8 * 8
    assert outcome.gain == outcome.baseline.cost / outcome.tuned.cost


@pytest.mark.parametrize("objective", [Objective.SIZE, Objective.MEMORY])
def test_a_plan_that_is_not_as_good_as_asked_for(bench: Bench, objective: Objective) -> None:
    outcome = bench.tune(objective=objective, min_speedup=2.5)  # fp16 is half of fp32
    assert not outcome.improved
    assert f"no plan is x2.5 {objective.words.as_good} as fp32" in outcome.why
    assert "of what fp32 takes" in outcome.why
    assert outcome.gain == outcome.speedup == 1.0


def test_trials_of_one_objective_are_not_another_s(bench: Bench, tmp_path: Path) -> None:
    study = Study(tmp_path / "study.db")
    assert bench.tune(study=study).reused == 0
    small = bench.tune(study=study, objective=Objective.SIZE)
    assert small.reused == 0
    assert bench.tune(study=study, objective=Objective.SIZE).reused == len(small.trials)
    assert bench.tune(study=study).reused == 1


@dataclass
class ToyStreams:
    """Two requests at once; in a low format the second one costs nothing."""

    session: Session
    engine: StreamingToy
    low: bool
    requests: int = 2
    served: int = 0

    def serve(self, feeds: Sequence[Feeds]) -> None:
        start_s = self.engine.clock.now_s
        for one in feeds:
            self.session.run(one)
        took_s = self.engine.clock.now_s - start_s
        self.engine.clock.now_s = start_s + took_s / (4 if self.low else 1)
        self.served += len(feeds)


@dataclass(eq=False)
class StreamingToy(ToyEngine):
    """As slow in a low format, one request after the other; under load four times as fast."""

    serves_streams: bool = True

    def load_streams(self, model: Loadable, fmt: Format = Format.FP32) -> ToyStreams:
        del fmt
        session = self.load(model)
        low = any(k.format == "fp16" for k in self.kernels(session.proto))
        return ToyStreams(session, self, low)

    def as_one_stream(self) -> StreamingToy:
        return self

    def on_one_thread(self) -> StreamingToy:
        return self


def test_throughput_is_that_of_requests_in_flight(bench: Bench) -> None:
    engine = StreamingToy(bench.engine.clock, gain=0.9)
    assert not bench.tune(engine=engine).improved
    outcome = bench.tune(engine=engine, objective=Objective.THROUGHPUT)
    assert outcome.improved
    # Low, seven ops and two casts: slower alone, and under load of a quarter of the time.
    low_s = 7e-3 / 0.9 + 2e-4
    assert outcome.tuned.latency_s == pytest.approx(low_s)
    assert outcome.tuned.cost == pytest.approx(low_s / 4)
    assert outcome.baseline.cost == pytest.approx(7e-3)
    assert outcome.gain == pytest.approx(7e-3 / (low_s / 4))
    assert outcome.speedup < 1


def test_throughput_is_refused_where_requests_run_one_by_one(bench: Bench) -> None:
    with pytest.raises(UsageError, match="toy:CPU is run with one request at a time"):
        bench.tune(objective=Objective.THROUGHPUT)
    data = {"x": np.ones((2, 3, 8, 8), np.float32)}
    with pytest.raises(UsageError, match="trn1 is run with one request at a time"):
        finecast.tune(
            bench.model, data=data, metric="cosine", target="trn1", objective="throughput"
        )


def test_on_a_device_that_is_not_here_bytes_count_as_well(bench: Bench) -> None:
    for objective in ("size", "memory"):
        outcome = finecast.tune(
            bench.model, data=bench.data, metric="top1", target="trn1", objective=objective
        )
        assert outcome.improved
        assert outcome.target == "trn1"
        assert outcome.tuned.cost < outcome.baseline.cost


def test_numbers_that_a_device_widens_take_the_memory_of_fp32(bench: Bench) -> None:
    """bf16 counted as half of the memory on a CPU whose engine loads it as fp32."""
    given: dict[str, Any] = {"data": bench.data, "metric": "top1", "policy": "all:bf16"}
    memory = finecast.tune(bench.model, target="avx2", objective="memory", **given)
    assert not memory.improved
    assert finecast.tune(bench.model, target="avx2", objective="size", **given).improved
    assert finecast.tune(bench.model, target="trn1", objective="memory", **given).improved


def test_a_format_that_is_slow_here_may_be_small(bench: Bench) -> None:
    """Formats without gain in speed are left out where speed is asked for alone."""
    engine = replace(bench.engine, gain=0.5)
    outcome = bench.tune(
        engine=engine, objective=Objective.SIZE, policy="auto:fp16,bf16", tolerance=0.5
    )
    assert outcome.improved
    assert "left out" not in outcome.why


def test_a_gain_that_does_not_count_says_what_would() -> None:
    assert takes(0.982, 1.02) == "takes 0.982 of what fp32 takes, and at most 0.98 counts"
    assert takes(1.3, 1.02) == "takes 1.3 times what fp32 takes"
