"""A simulated net as ``tune`` asks for it: a ``Subject``, its ``Examined`` and its data."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Final, Self, cast

import numpy as np

from benchmarks.lab import assumptions as assumed
from benchmarks.lab.nets import Net, Outcomes
from benchmarks.lab.simulation import Loaded, Simulation
from finecast.data.metrics import Score
from finecast.data.workload import Workload
from finecast.engines.base import Array, Feeds, Session, TensorSpec
from finecast.engines.probe import Speed
from finecast.errors import Unfit
from finecast.frontends.prepared import PreparedModel
from finecast.graph import Graph
from finecast.measure.racing import Effort, Race
from finecast.native.model import OpenedModel
from finecast.native.roundings import Times
from finecast.native.subject import Built, Examined, Hinted, Subject, UserRules
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import Analysis
from finecast.planning.sensitivity import ProbeOptions, Sensitivity, measure
from finecast.progress import Progress
from finecast.rules.policy import Policy
from finecast.solver.assignment import Bools

# As ``native/engine_subject.py`` has them: then errors are not measured one by one.
_HARMLESS: Final = 0.25
_MINOR: Final = 0.25
_FEW_PROBES: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """What ``tune`` asks of the model itself."""

    simulation: Simulation
    name: str
    digest: str
    model: object = None
    size_bytes: int = 1 << 20

    def check_policy(self, policy: Policy) -> None:
        """Every policy fits."""

    def notes(self, planner: Planner) -> Sequence[str]:
        """None."""
        del planner
        return ()

    def reference_name(self, graph: Graph) -> str:
        """The baseline is fp32."""
        del graph
        return Format.FP32.label

    def build(self, plan: Plan) -> Built:
        """The model of a plan, which is not compiled yet."""
        self.simulation.build(plan)
        return Built(model=None, plan=plan, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSession(Session):
    """A loaded model: its feeds are numbers of calibration rows, its output 1 and what is off.

    So the relative error of the output is the model's.
    """

    simulation: Simulation
    loaded: Loaded
    plan: Plan | None = None
    inputs: Sequence[TensorSpec] = (TensorSpec(name="x", dtype="int64", shape=("n",)),)
    outputs: Sequence[TensorSpec] = (TensorSpec(name="y", dtype="fp64", shape=("n",)),)

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """What the rows give."""
        rows = np.asarray(feeds["x"], dtype=np.int64)
        return {"y": 1 + self.simulation.deviations(self.loaded, rows)}


def score(net: Net, outcomes: Outcomes) -> Score:
    """The metric by the outcomes of samples, with the margins of decisions."""
    margins = outcomes.margins
    if margins is not None and outcomes.shifts is not None:
        margins = margins + outcomes.shifts
    if margins is not None and outcomes.right is not None and outcomes.second is not None:
        wrong = np.where(outcomes.second, -margins, -np.inf)
        margins = np.where(outcomes.right, margins, wrong)
    return Score(net.value(outcomes), margins={} if margins is None else {"y": margins})


@dataclass(slots=True, kw_only=True)
class SimulatedWorkload(Workload):
    """The samples that a search sees."""

    simulation: Simulation

    @property
    def higher_is_better(self) -> bool:
        """Of all metrics that are drawn."""
        return True

    @property
    def order(self) -> int:
        """As the metrics of that name have it."""
        return 2 if self.simulation.net.metric == "cosine" else 1

    @property
    def digest(self) -> str:
        """The net's name."""
        return self.simulation.net.key.name

    def evaluate(self, session: Session, reference: Session | None) -> float:
        """The metric on all samples."""
        assert isinstance(session, SimulatedSession)
        plan = None if reference is None else session.plan
        outcomes = self.simulation.evaluate(session.loaded, plan)
        self.samples = len(outcomes.samples)
        return score(self.simulation.net, outcomes)

    def calibration(self) -> Iterable[Feeds]:
        """All rows in one call."""
        return [{"x": np.arange(assumed.CALIBRATION)}]

    def timing(self) -> Sequence[Feeds]:
        """A call of a few rows."""
        return [{"x": np.arange(assumed.TIMED_ROWS)}]


@dataclass(slots=True, kw_only=True)
class SimulatedSubject(Subject):
    """A simulated net and what runs it."""

    simulation: Simulation

    @classmethod
    def of(cls, simulation: Simulation) -> SimulatedSubject:
        """The net of a simulation that was started."""
        key = simulation.net.key
        model = SimulatedModel(simulation=simulation, name=key.name, digest=key.name)
        return cls(
            simulation=simulation,
            model=cast("OpenedModel", model),
            reference=SimulatedSession(simulation=simulation, loaded=simulation.fp32()),
        )

    @property
    def runner(self) -> str:
        """The lab."""
        return "simulated"

    @property
    def formats(self) -> tuple[Format, ...]:
        """The low formats of the net."""
        return self.simulation.net.formats[1:]

    def check_formats(self, policy: Policy) -> None:
        """All are simulated."""

    def speed(self, fmt: Format) -> Speed:
        """Short probes gain."""
        return Speed(gains=True, text=f"{fmt.label} is simulated")

    def examine(
        self, policy: Policy, user_rules: UserRules, workload: Workload, progress: Progress
    ) -> SimulatedExamined:
        """Observe values; the rules' verdicts are drawn with the net."""
        del policy, user_rules
        self.simulation.observe()
        return SimulatedExamined(
            planner=self.simulation.net.planner,
            subject=self,
            workload=workload,
            progress=progress,
        )

    def session(self, built: Built) -> Session:
        """The model of a plan, compiled once."""
        if built.loaded is None:
            built.loaded = self._compiled(built.plan)
        return built.loaded

    def _compiled(self, plan: Plan, *, by_hint: bool = False) -> SimulatedSession:
        loaded = self.simulation.load(plan, by_hint=by_hint)
        return SimulatedSession(simulation=self.simulation, loaded=loaded, plan=plan)

    def times(self, built: Mapping[str, Built], workload: Workload, effort: Effort) -> Race:
        """A race of compiled models beside fp32."""
        models: dict[str, Loaded] = {}
        for name, one in built.items():
            session = self.session(one)
            assert isinstance(session, SimulatedSession)
            models[name] = session.loaded
        return self.simulation.race(models, effort)

    def hints(self, planner: Planner) -> Sequence[Hinted]:
        """The model under the engine's hint, if it has one."""
        del planner
        net = self.simulation.net
        if net.hinted is None:
            return ()
        return [
            Hinted(
                model=None,
                plan=net.hinted,
                size_bytes=1 << 20,
                loaded=self._compiled(net.hinted, by_hint=True),
                format=net.formats[1],
                exact=net.hinted_exact or net.hinted,
            )
        ]

    def by_hint(self, plan: Plan) -> Plan | None:
        """The same by the hint, where the model can be made so."""
        if plan.by_hint or not self.simulation.net.states_by_hint or len(plan.low_floats) != 1:
            return None
        return replace(plan, by_hint=True)

    def told_on(self, workload: Workload) -> Sequence[Feeds]:
        """All calibration rows."""
        return [*workload.calibration()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedExamined(Examined):
    """A simulated net whose ops the rules have judged."""

    planner: Planner
    subject: SimulatedSubject
    workload: Workload
    progress: Progress
    _timed: list[Times] = field(init=False, repr=False, default_factory=list[Times])

    def prior(self, *, of_time: bool = True) -> Analysis:
        """Predicted times, and even errors."""
        del of_time
        times = self._times()
        return self._analysis(
            times, {f: Sensitivity.even(at, times.errors[f]) for f, at in times.points.items()}
        )

    def outline(self, formats: Collection[Format], *, of_time: bool = True) -> Analysis:
        """Predicted times, and the largest errors."""
        del of_time
        times = self._times()
        return self._analysis(
            times,
            {
                fmt: self._probed(fmt, _FEW_PROBES)
                if fmt in formats
                else Sensitivity.even(at, times.errors[fmt])
                for fmt, at in times.points.items()
            },
        )

    def without(self, unfit: Unfit) -> Self:
        """This without formats of some ops."""
        return replace(self, planner=self.planner.without(unfit))

    def analysis(
        self, *, of_time: bool = True, lost: Mapping[Format, float] = MappingProxyType({})
    ) -> Analysis:
        """Predicted times, and sensitivities by probes of each rounding."""
        del of_time
        times = self._times()
        self.progress("sensitivity", 0, 1)
        sensitivities = {
            fmt: Sensitivity.even(where, times.errors[fmt])
            if self._is_minor(fmt, lost, times.errors)
            else self._probed(fmt)
            for fmt, where in times.points.items()
        }
        return self._analysis(times, sensitivities)

    def _times(self) -> Times:
        if not self._timed:
            self.progress("profile", 0, 1)
            self._timed.append(self.subject.simulation.predicted())
        return self._timed[0]

    def _analysis(self, times: Times, errors: Mapping[Format, Sensitivity]) -> Analysis:
        # Of the prepared model only the types of ports are asked, which all stay.
        prepared = cast("PreparedModel", SimpleNamespace(resolve_io=dict))
        return times.analysis(prepared, self.planner, errors)

    def _probed(self, fmt: Format, most: int | None = None) -> Sensitivity:
        simulation = self.subject.simulation
        points = simulation.net.points[fmt]
        count = len(points.points) + len(points.weights)
        simulation.switch(fmt, count if most is None else 1)

        def probe(on: Bools) -> Sequence[Array]:
            return [1 + simulation.probe(fmt, on)]

        count, weights = len(points.points), len(points.weights)
        return measure(
            count,
            probe,
            weights=weights,
            shared=[at for _, at in points.shared],
            most=most,
            probing=ProbeOptions(on_probe=partial(self.progress, "sensitivity")),
        )

    def _is_minor(
        self, fmt: Format, lost: Mapping[Format, float], errors: Mapping[Format, float]
    ) -> bool:
        """Whether it decides nothing which ops in a format lose most, as of engines."""
        share, error = lost.get(fmt, math.inf), errors[fmt]
        beside = error / (max(errors.values()) or 1.0)
        return share <= (_HARMLESS if beside > _MINOR else 1.0)
