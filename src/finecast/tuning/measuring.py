"""Measuring the models of plans beside fp32, by the objective; which formats are worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, TypeAlias

from finecast.data.workload import Workload
from finecast.engines.base import Feeds, Session
from finecast.engines.exact import Exact
from finecast.errors import EngineError
from finecast.measure.racing import Effort, Race
from finecast.native.subject import Built, Origin, Subject
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.pricing import by_memory, by_size, resident_bytes
from finecast.planning.problem import Analysis
from finecast.tuning.goal import Objective

_PRICING: Final[Mapping[Objective, Callable[[Planner, Analysis], Analysis]]] = {
    Objective.SIZE: by_size,
    Objective.MEMORY: by_memory,
}
# Races end as soon as they have told what decides, but not before a time in which a
# disturbance of some tenths of a second is not all that there is of short calls.
BASELINE: Final = Effort(min_time_s=0.3)
# The first races tell which models are faster than fp32, and their speeds as well as they hold
# for another load of the same model.
RANKING: Final = Effort(min_time_s=0.1, settle_s=2.0, known_to=0.1, order=False)
# The last race, between the plan found and those that may be better. Speeds are timed until
# they are known to 4%, which takes more rounds on a busy machine: then two runs of one search
# agree within 5%. No more rounds start after these seconds, or after the time of an evaluation
# on all data, if that is longer: on an idle machine a race ends long before. Models slower
# than fp32 cannot be chosen and get no further rounds. Of two plans the order is not needed,
# only whether the more accurate one is as fast. After 8 s beside a busy process the ratio of
# two plans was known to 5% only, and two runs in ten took another plan than the others. Of two
# plans the more accurate one is taken unless it is known to be slower: where it was taken up
# to 3% slower, runs of MiniLM took turns, and up to 1%, runs of ResNet-20 on some days.
FINAL: Final = Effort(
    min_time_s=2 * BASELINE.min_time_s,
    settle_s=20.0,
    known_to=0.04,
    rounds=11,
    limit=1.0,
    order=False,
    tie=1.0,
)
# The second race of what may be better than the result: the order alone is asked.
DUEL: Final = replace(FINAL, limit=math.inf, order=True, tie=None)
# The result in another process. Its choice is made: only its speed beside fp32 is asked for.
AFRESH: Final = replace(
    BASELINE, settle_s=1.0, known_to=FINAL.known_to, rounds=FINAL.rounds, order=False
)
# Latencies that decide nothing, or only which of nearly equal plans is tried first.
GLANCE: Final = Effort(min_time_s=0.0, rounds=3, warmup=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Costs of models beside fp32 by the objective, and times of a call of the same models.

    Costs in bytes are counted and have no spread.
    """

    costs: Race
    times: Race


@dataclass(frozen=True, slots=True, kw_only=True)
class Racing:
    """Models to be timed beside fp32.

    Attributes:
        models: What each is made from, by name.
        effort: How long they are timed.
        streams: Whether many requests are in flight.
        call: The call of decoding that alone is timed; None for all that the objective times.
    """

    models: Mapping[str, Origin]
    effort: Effort
    streams: bool = False
    call: int | None = None


# Times models on another machine, unless it cannot; and what there is to tell of it.
Racer: TypeAlias = Callable[[Racing], "tuple[Race | None, Sequence[str]]"]
# Times models on some calls in other processes of this machine, one after the other.
Afresh: TypeAlias = Callable[[Racing, Sequence[Feeds]], Sequence[Race]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Measures the models of one subject by ``objective``.

    Attributes:
        objective: What is measured.
        subject: What was tuned.
        workload: The data.
        racer: Times models in place of this process; None for none.
        afresh: Times models in other processes; None where these cannot load them.
        errors: The relative output errors of plans that were measured, by digest.
    """

    objective: Objective
    subject: Subject
    workload: Workload
    racer: Racer | None = None
    afresh: Afresh | None = None
    errors: dict[str, float] = field(init=False, repr=False, default_factory=dict[str, float])
    _exact: list[Exact] = field(init=False, repr=False, default_factory=list[Exact])

    def check(self) -> None:
        """Refuse an objective that cannot be measured here.

        Raises:
            UsageError: If it is throughput, and requests run one at a time.
        """
        if self.objective is Objective.THROUGHPUT:
            self.subject.check_streams()

    def priced(self, planner: Planner, analysis: Analysis) -> Analysis:
        """``analysis`` with its costs in the objective's unit: seconds or bytes."""
        pricing = _PRICING.get(self.objective)
        return analysis if pricing is None else pricing(planner, analysis)

    def measure(
        self,
        built: Mapping[str, Built],
        effort: Effort,
        planner: Planner,
        analysis: Analysis | None,
    ) -> Measurements:
        """Measure ``built``; models that cannot be loaded are left out."""
        if self.objective.of_latency:
            race = self.race(built, effort)
            return Measurements(costs=race, times=race)
        times = self.race(built, GLANCE)
        loaded = {name: one for name, one in built.items() if name in times.names}
        if self.objective is Objective.THROUGHPUT:
            race = self.race(loaded, effort, streams=True)
            return Measurements(costs=race, times=times)
        fp32, costs = self._bytes(loaded, planner, analysis)
        return Measurements(costs=Race.stated(fp32, costs), times=times)

    def race(
        self,
        built: Mapping[str, Built],
        effort: Effort,
        *,
        streams: bool = False,
        call: int | None = None,
    ) -> Race:
        """Time ``built`` beside fp32, all on one machine; see ``Racing``."""
        subject = self.subject
        if self.racer is not None:
            origins = {name: one.origin for name, one in built.items()}
            racing = Racing(models=origins, effort=effort, streams=streams, call=call)
            race, notes = self.racer(racing)
            subject.tell(*notes)
            if race is not None:
                return race
        workload = self.workload if call is None else self.workload.of_call(call)
        return (subject.streamed if streams else subject.times)(built, workload, effort)

    def confirmed(
        self, measurements: Measurements, built: Mapping[str, Built], allowed_s: float
    ) -> Measurements:
        """``measurements``, with what ``built`` took in other processes.

        In each process memory lies elsewhere, by which one file is faster or slower by up to
        15% than in another one. Costs that are counted are the same everywhere. Nothing is
        timed again if ``allowed_s``, the time left for it, is none.
        """
        if self.afresh is None or not self.objective.of_time or allowed_s <= 0:
            return measurements
        origins = {name: one.origin for name, one in built.items()}
        streams = self.objective is Objective.THROUGHPUT
        racing = Racing(models=origins, effort=AFRESH, streams=streams)
        for race in self.afresh(racing, self.workload.timing()):
            measurements.costs.join(race)
        return measurements

    def exact(self) -> Exact:
        """The fp32 model's outputs on the timed feeds; it runs there once."""
        subject, workload = self.subject, self.workload
        if not self._exact:
            self._exact.append(subject.exact(workload, subject.feeds(workload)))
        return self._exact[0]

    def told(self) -> Exact:
        """The fp32 model's outputs where errors were predicted, for those of the result."""
        return self.subject.exact(self.workload, self.subject.told_on(self.workload))

    def output_error(self, built: Built) -> float:
        """The relative error of a model's worst output on the timed feeds, against fp32."""
        return self.exact().error(self.session(built))

    def plan_error(self, plan: Plan) -> float:
        """The same of the model of ``plan``, measured once; infinite if it does not run.

        The model runs where a dry run loads it: it is compiled once, and never timed.
        """
        if plan.digest not in self.errors:
            try:
                session = self.subject.tried(self.subject.model.build(plan))
                self.errors[plan.digest] = self.exact().error(session)
            except EngineError:
                return math.inf
        return self.errors[plan.digest]

    def session(self, built: Built) -> Session:
        """A session of a model in the configuration that is measured and recommended.

        Raises:
            EngineError: If there are no kernels for it.
        """
        if self.objective is Objective.THROUGHPUT:
            return self.subject.stream_session(built)
        return self.subject.session(built)

    def _bytes(
        self, built: Mapping[str, Built], planner: Planner, analysis: Analysis | None
    ) -> tuple[float, Mapping[str, float]]:
        """Bytes of the fp32 model, and of each of ``built``; NaN without an analysis."""
        if self.objective is Objective.SIZE:
            sizes = {name: float(one.size_bytes) for name, one in built.items()}
            return float(self.subject.model.size_bytes), sizes
        if analysis is None:
            return math.nan, dict.fromkeys(built, math.nan)
        resident = partial(resident_bytes, planner, analysis)
        takes = {name: float(resident(one.plan.formats)) for name, one in built.items()}
        return float(resident({})), takes
