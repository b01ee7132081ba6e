"""How the models of plans stand beside fp32, by what the search makes least of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, runtime_checkable

from finecast.errors import UsageError
from finecast.measure.racing import Effort, Race
from finecast.pipeline.objective import Objective
from finecast.pipeline.subject import Built, Subject
from finecast.pipeline.workload import Workload
from finecast.planning.planner import Planner
from finecast.planning.pricing import by_memory, by_size, resident_bytes
from finecast.planning.problem import Analysis

_PRICING: Final[Mapping[Objective, Callable[[Planner, Analysis], Analysis]]] = {
    Objective.SIZE: by_size,
    Objective.MEMORY: by_memory,
}
# Of so many models; of fewer a shorter time tells as much. Which of them are faster than fp32
# is settled, not their order.
RANKING: Final = Effort(min_time_s=3.0, settle_s=6.0, order=False)
RANKED: Final = 10
# Between the plan found and those that may be better, so far as they are known by then. What
# is told of a plan is known to 3% on a busy machine, too, so that runs of the same search
# agree within 5%: there it takes more rounds. But what stands beside it and is slower than
# fp32 is no choice, and takes none.
FINAL: Final = Effort(min_time_s=2.0, settle_s=20.0, known_to=0.03, limit=1.0)
BASELINE: Final = Effort(min_time_s=0.5)
# Latencies that only stand beside what decides.
_BESIDE: Final = Effort(min_time_s=0.0, rounds=3, warmup=1)


def ranking(count: int) -> Effort:
    """How long ``count`` models of plans are timed beside fp32."""
    share = min(1.0, (count + 1) / RANKED)
    return replace(RANKING, min_time_s=share * RANKING.min_time_s)


@runtime_checkable
class Streaming(Protocol):
    """A subject that can be run with several requests in flight."""

    def check_streams(self) -> None:
        """Raise UsageError if what runs it takes one request at a time."""
        ...

    def streamed(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """Each model timed in turns with the fp32 model, as many requests at once as is best.

        The times are those of a call: of all the requests' time, its share.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Models beside fp32: ``costs`` are what the objective counts, ``times`` those of a call.

    Both are of the same models; a cost that is bytes was counted, and does not spread.
    """

    costs: Race
    times: Race


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Measures the models of one subject by ``objective``."""

    objective: Objective
    subject: Subject
    workload: Workload

    def check(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            UsageError: If several requests at once are asked for of what takes one.
        """
        if self.objective is not Objective.THROUGHPUT:
            return
        if not isinstance(self.subject, Streaming):
            where = self.subject.target or self.subject.runner
            raise no_streams(where)
        self.subject.check_streams()

    def priced(self, planner: Planner, analysis: Analysis) -> Analysis:
        """``analysis`` by what plans are to have least of."""
        pricing = _PRICING.get(self.objective)
        return analysis if pricing is None else pricing(planner, analysis)

    def stand(
        self,
        built: Mapping[str, Built],
        effort: Effort,
        planner: Planner,
        analysis: Analysis | None,
    ) -> Standing:
        """How ``built`` stand; those that cannot be loaded are left out."""
        subject, workload = self.subject, self.workload
        if self.objective is Objective.LATENCY:
            race = subject.times(built, workload, effort)
            return Standing(costs=race, times=race)
        times = subject.times(built, workload, _BESIDE)
        there = {name: one for name, one in built.items() if name in times.names}
        if self.objective is Objective.THROUGHPUT:
            assert isinstance(subject, Streaming)
            race = subject.streamed(there, workload, effort)
            return Standing(costs=race, times=times)
        fp32, costs = self._bytes(there, planner, analysis)
        return Standing(costs=Race.stated(fp32, costs), times=times)

    def _bytes(
        self, built: Mapping[str, Built], planner: Planner, analysis: Analysis | None
    ) -> tuple[float, Mapping[str, float]]:
        """Of the fp32 model, and of each other."""
        if self.objective is Objective.SIZE:
            sizes = {name: float(one.size_bytes) for name, one in built.items()}
            return float(self.subject.model.size_bytes), sizes
        if analysis is None:
            return math.nan, dict.fromkeys(built, math.nan)
        resident = partial(resident_bytes, planner, analysis)
        takes = {name: float(resident(one.plan.formats)) for name, one in built.items()}
        return float(resident({})), takes


def no_streams(where: str) -> UsageError:
    """What to raise where requests run one by one."""
    return UsageError(
        f"{where} is run with one request at a time here: its throughput is not measured",
        where="--objective throughput",
        fix="use --objective latency, or a model that OpenVINO or ONNX Runtime runs",
    )
