"""What a search may ask of a simulated net: each answer has noise and takes simulated time.

This is the seam at which searches are judged. ``subject`` makes a ``Subject`` of it for
``tune``; another search may ask it directly. Laws: answers depend on the net, the seed of the
run and what was asked before, and on nothing else; no clock of this machine is read while a
``Clock`` is in its place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np

from benchmarks.lab import assumptions as assumed
from benchmarks.lab.nets import Net, Outcomes
from finecast.measure import timing
from finecast.measure.racing import Effort, Race
from finecast.native.roundings import Times
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.solver.assignment import Bools, Floats, Ints

FP32 = "fp32"


@dataclass(slots=True)
class Clock:
    """Simulated seconds."""

    now_s: float = 0.0

    def read(self) -> float:
        """The time, as ``time.perf_counter`` gives it."""
        return self.now_s

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Until it ends, finecast reads this clock; all of its time is processor time.

        No other thread may measure a time meanwhile.
        """
        demand = timing.Demand
        with (
            patch.object(time, "perf_counter", self.read),
            patch.object(timing, "used_s", self.read),
            patch.object(demand, "now", lambda: demand(used_s=self.now_s)),
        ):
            yield


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A model that was compiled: each has a speed of its own, and each call has noise."""

    clock: Clock
    label: Ints
    by_hint: bool
    call_s: float
    noise: np.random.Generator
    _drawn: list[float] = field(init=False, default_factory=list[float])

    def call(self) -> None:
        """A call that is timed."""
        if not self._drawn:
            factors = np.exp(assumed.ROUND_NOISE * self.noise.standard_normal(256))
            disturbed = self.noise.random(256) < assumed.DISTURBED_SHARE
            longer = self.noise.exponential(assumed.DISTURBED_FACTOR, 256)
            self._drawn = (factors * (1 + disturbed * longer)).tolist()
        self.clock.spend(self.call_s * self._drawn.pop())


@dataclass(slots=True, kw_only=True)
class Simulation:
    """A net in one run of a search.

    Attributes:
        net: What is true; a search looks at what is asked for here alone.
        seed: The seed of the run's noise.
        clock: What the run has taken.
        plans: Plans that were evaluated, each once, by digest.
        loads: How often each model was compiled.
    """

    net: Net
    seed: int
    clock: Clock = field(default_factory=Clock)
    plans: dict[str, Plan] = field(default_factory=dict[str, Plan])
    loads: dict[str, int] = field(default_factory=dict[str, int])
    _fp32: list[Loaded] = field(init=False, default_factory=list[Loaded])

    @property
    def ops(self) -> int:
        """The ops of the net, with which most costs grow."""
        return len(self.net.graph.nodes)

    def start(self) -> None:
        """Import libraries, and read and load the model."""
        self.clock.spend(assumed.START_S)
        self.fp32()

    def observe(self) -> None:
        """Observe the values on calibration data, as rules need them."""
        self._compile()
        rows = assumed.CALIBRATION
        self.clock.spend(assumed.OBSERVE_SLOWDOWN * rows * self.net.sample_s)

    def predicted(self) -> Times:
        """Times by profiles of fp32 and of the lowest plans, and the errors of these."""
        net, rng = self.net, self._rng("profile")
        planner, rows = net.planner, np.arange(assumed.CALIBRATION)
        profile: dict[Format, Mapping[str, float]] = {}
        errors: dict[Format, float] = {}
        for fmt, kernels in net.profile.items():
            noise = np.exp(assumed.PROFILE_NOISE * rng.standard_normal(len(kernels)))
            seen = np.array([*kernels.values()]) * noise
            profile[fmt] = dict(zip(kernels, seen.tolist(), strict=True))
            plan = planner.highest() if fmt is Format.FP32 else planner.lowest(fmt)
            loaded = self.load(plan)
            self.clock.spend(assumed.PROFILE_RUNS * loaded.call_s)
            if fmt is not Format.FP32:
                errors[fmt] = float(np.mean(self.deviations(loaded, rows) ** 2))
        return Times(
            units=net.units,
            points=net.points,
            cost=net.predicted_cost(profile),
            errors=errors,
        )

    def switch(self, fmt: Format, count: int) -> None:
        """Compile the sessions in which ``count`` roundings to a format are switched."""
        del fmt
        for _ in range(min(count, assumed.PROBE_PARTS)):
            self._compile()

    def probe(self, fmt: Format, on: Bools) -> Floats:
        """What these roundings alone do to rows of calibration data; 0 for none.

        ``on`` has a bool for each of the net's points, then for each unit with constants. The
        mean of the squares is the squared error.
        """
        rows = max(assumed.PROBED_ROWS, min(assumed.PROBED_IN_ALL // max(len(on), 1), 64))
        self.clock.spend(assumed.PROBE_SLOWDOWN * rows * self.net.sample_s)
        return self.net.rounded(fmt, on, np.arange(rows))

    def emulated_error(self, plan: Plan, rows: int = assumed.CALIBRATION) -> float:
        """The squared error of a plan's roundings on calibration data; nothing is compiled."""
        self.clock.spend(assumed.EMULATION_SLOWDOWN * rows * self.net.sample_s)
        label = self.net.label(plan)
        deviations = self.net.deviations(label, np.arange(rows), by_hint=plan.by_hint)
        return float(np.mean(deviations**2))

    def build(self, plan: Plan) -> None:
        """Make the model of a plan."""
        del plan
        self.clock.spend(assumed.BUILD_OP_S * self.ops)

    def load(self, plan: Plan, *, by_hint: bool = False) -> Loaded:
        """Compile the model of a plan; ``by_hint`` is for what a hint chose."""
        by_hint = by_hint or plan.by_hint
        name, net = f"{plan.digest}{' by the hint' if by_hint else ''}", self.net
        self._compile()
        return self._loaded(name, net.label(plan), by_hint=by_hint)

    def fp32(self) -> Loaded:
        """The fp32 model, compiled once."""
        if not self._fp32:
            self._compile()
            nothing = np.zeros(len(self.net.units.members), dtype=np.int64)
            self._fp32.append(self._loaded(FP32, nothing, by_hint=False))
        return self._fp32[0]

    def race(self, models: Mapping[str, Loaded], effort: Effort) -> Race:
        """Models timed in turns with fp32."""
        calls: Mapping[str, Callable[[], object]] = {n: m.call for n, m in models.items()}
        return Race.of(self.fp32().call, calls, effort)

    def evaluate(
        self, loaded: Loaded, plan: Plan | None, samples: Ints | None = None
    ) -> Outcomes:
        """What a plan, or fp32 for None, does to samples; by default to all that there are."""
        net = self.net
        rows = np.arange(net.samples) if samples is None else samples
        assert rows.max(initial=0) < net.samples  # others are the population's
        self.clock.spend(assumed.SAMPLE_OVERHEAD * self._run_s(loaded, len(rows)))
        if plan is not None:
            self.plans[plan.digest] = plan
        return net.outcomes(loaded.label, rows, by_hint=loaded.by_hint)

    def unlabelled(self, loaded: Loaded, rows: Ints) -> Outcomes:
        """The same of rows of calibration data, of which no label is known."""
        self.clock.spend(assumed.SAMPLE_OVERHEAD * self._run_s(loaded, len(rows)))
        return self.net.unlabelled(loaded.label, rows, by_hint=loaded.by_hint)

    def deviations(self, loaded: Loaded, rows: Ints) -> Floats:
        """What a model does to rows of calibration data; their mean square is its error."""
        self.clock.spend(self._run_s(loaded, len(rows)))
        return self.net.deviations(loaded.label, rows, by_hint=loaded.by_hint)

    def _run_s(self, loaded: Loaded, rows: int) -> float:
        return rows * self.net.sample_s * loaded.call_s / self.net.fp32_s

    def _compile(self) -> None:
        self.clock.spend(assumed.COMPILE_S + assumed.COMPILE_OP_S * self.ops)

    def _loaded(self, name: str, label: Ints, *, by_hint: bool) -> Loaded:
        self.loads[name] = self.loads.get(name, 0) + 1
        noise = self._rng("load", name, self.loads[name])
        most = math.log1p(assumed.PROCESS_LIMIT)
        off = float(np.clip(assumed.PROCESS_DEVIATION * noise.standard_normal(), -most, most))
        return Loaded(
            clock=self.clock,
            label=label,
            by_hint=by_hint,
            call_s=self.net.time_s(label, by_hint=by_hint) * math.exp(off),
            noise=noise,
        )

    def _rng(self, *parts: int | str) -> np.random.Generator:
        return self.net.key.rng("run", self.seed, *parts)
