"""The judge's nets, whose plans were all evaluated, with noise added to what a search sees.

What is true of a plan is what ``judge_nets`` computed of it: the SNR, by numpy's fp16 rounding
between ops that ONNX Runtime computes one at a time, and the sum of stated times. Nothing of
finecast takes part in either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from benchmarks import judge_nets
from benchmarks.judge_nets import JudgeNet
from benchmarks.lab import assumptions as assumed
from benchmarks.lab.architectures import Sketch
from benchmarks.lab.kept import kept
from benchmarks.lab.nets import Best, Key, Net, Outcomes
from finecast.data.criterion import Criterion
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.planning.planner import Planner
from finecast.planning.points import RoundingPoints, rounding_points
from finecast.planning.units import make_units
from finecast.rules import Permission
from finecast.rules.policy import Policy
from finecast.solver.assignment import Bools, Floats, Ints

# Seeds of nets that only the last run sees. The judge's own figures are of seeds below 100.
_FIRST_HELD_OUT = 5000
# All decimals below this are no error: two sums of the same numbers differ by more.
_LEAST = 1e-30


@dataclass(kw_only=True)
class EnumeratedNet(Net):
    """A net of 10 to 14 ops.

    Attributes:
        judged: The net.
        squared: The squared relative output error of each mask; bit i: op i is in fp16.
        seconds: The time of each mask.
        allowed: The squared error that is allowed.
    """

    judged: JudgeNet
    squared: NDArray[np.float64]
    seconds: NDArray[np.float64]
    allowed: float
    _noise: dict[tuple[int, str], Floats] = field(
        init=False, default_factory=dict[tuple[int, str], Floats]
    )

    def time_s(self, label: Ints, *, by_hint: bool = False) -> float:
        """The stated time."""
        return float(self.seconds[self._mask(label)])

    def rounded(self, fmt: Format, on: Bools, rows: Ints) -> Floats:
        """The net is run with these values rounded, and others not."""
        if not on.any():
            return np.zeros(len(rows))
        exact = self._exact
        off = self._run(fmt, on) - exact
        power = np.square(exact).sum() / len(exact)
        errors = np.sqrt(np.square(off).sum(axis=1) / power)
        return errors[rows % len(errors)]

    def deviations(self, label: Ints, rows: Ints, *, by_hint: bool = False) -> Floats:
        """The enumerated error, with noise that each row of a plan has again and again."""
        squared = self.squared[self._mask(label)]
        noise = self._seen(label, "calibration", assumed.CALIBRATION, 1.0)
        return math.sqrt(min(squared, 1e12)) * np.sqrt(noise[rows])

    def outcomes(self, label: Ints, samples: Ints, *, by_hint: bool = False) -> Outcomes:
        """Errors alone: nothing is decided."""
        most = assumed.JUDGE_METRIC_NOISE * math.sqrt(self.samples)
        noise = self._seen(label, "samples", self.samples, most)
        squared = min(float(self.squared[self._mask(label)]), 1e12)
        return Outcomes(samples=samples, errors=squared * noise[samples])

    def value(self, outcomes: Outcomes) -> float:
        """The SNR in dB."""
        error = float(outcomes.errors.mean())
        return -10 * math.log10(error) if error > _LEAST else math.inf

    @property
    def baseline(self) -> float:
        """That of fp32."""
        return math.inf

    def losses(self, labels: Ints, *, by_hint: bool = False) -> Floats:
        """Enumerated squared errors over the allowed one."""
        return np.array([self.squared[self._mask(label)] for label in labels]) / self.allowed

    @cached_property
    def best(self) -> Best:
        """The fastest of all plans that keep the SNR."""
        kept = np.flatnonzero(self.squared <= self.allowed)
        mask = int(kept[self.seconds[kept].argmin()])
        label = np.array([mask >> members[0] & 1 for members in self.units.members])
        return Best(label=label, by_hint=False, time_s=float(self.seconds[mask]))

    def _mask(self, label: Ints) -> int:
        low = np.flatnonzero(label)
        return sum(1 << n for unit in low for n in self.units.members[unit])

    def _seen(self, label: Ints, what: str, count: int, deviation: float) -> Floats:
        """Factors of squared errors of single rows, of mean 1 up to chance."""
        mask = self._mask(label)
        if (mask, what) not in self._noise:
            rng = self.key.rng(what, mask)
            width = math.sqrt(math.log1p(deviation**2))
            logs = width * rng.standard_normal(count) - width**2 / 2
            self._noise[mask, what] = np.exp(logs)
        return self._noise[mask, what]

    @cached_property
    def _exact(self) -> Floats:
        return self.judged.run([False] * len(self.judged.ops)).astype(np.float64)

    def _run(self, fmt: Format, on: Bools) -> Floats:
        """The output with some values rounded where they are read."""
        points = self.points[fmt]
        places = {
            p for point, o in zip(points.points, on, strict=False) if o for p in point.places
        }
        constants = {
            node
            for ports, o in zip(points.weights, on[len(points.points) :], strict=True)
            if o
            for node in ports
        }
        values = [self.judged.x]
        for number, op in enumerate(self.judged.ops):
            read = [
                judge_nets.rounded(values[r]) if (number, port) in places else values[r]
                for port, r in enumerate(op.reads)
            ]
            low = number in constants
            values.append(judge_nets.computed(op, read, low_weight=low))
        last = values[-1]
        return (judge_nets.rounded(last) if (None, 0) in places else last).astype(np.float64)


def draw(key: Key) -> EnumeratedNet:
    """The enumerated net of a key."""
    judged = judge_nets.draw(key.seed + (_FIRST_HELD_OUT if key.held_out else 0))
    name = f"judge/{judged.seed}"
    snr_db = kept(name, ["judge_nets.py"], lambda: {"snr_db": judged.snrs_db()})["snr_db"]
    seconds = assumed.TIME_SCALE * judged.times_s()
    rng = key.rng("criterion")
    finite = snr_db[np.isfinite(snr_db)]
    required_db = round(float(np.quantile(finite, rng.uniform(0.5, 0.99))), 2)
    graph = _graph(judged, key.name)
    formats = frozenset({Format.FP32, Format.FP16})
    permissions = {n.id: Permission(formats=formats, reasons=()) for n in graph.nodes}
    units = make_units(graph, permissions, [Format.FP16])
    points: Mapping[Format, RoundingPoints] = {Format.FP16: rounding_points(graph, units)}
    planner = Planner(
        graph=graph,
        policy=Policy(formats=(Format.FP16,)),
        permissions=permissions,
        engine="simulated",
    )
    times = key.rng("times")
    cast_s = assumed.TIME_SCALE * judged.cast_s
    cast_s *= math.exp(assumed.CAST_DEVIATION * times.standard_normal())
    return EnumeratedNet(
        key=key,
        architecture="judge",
        planner=planner,
        units=units,
        points=points,
        metric="snr_db",
        criterion=Criterion(tolerance=required_db),
        profile=_profile(judged, graph, times),
        cost_of_casts=(cast_s, math.inf),
        samples=int(key.rng("samples").integers(*assumed.SAMPLES)),
        sample_s=float(seconds[0]) / assumed.JUDGE_ROWS,
        judged=judged,
        squared=np.where(np.isneginf(snr_db), np.inf, 10 ** (-snr_db / 10)),
        seconds=seconds,
        allowed=10 ** (-required_db / 10),
    )


def _graph(judged: JudgeNet, digest: str) -> Graph:
    """The net's graph; value i of the net is what its op i - 1 gives."""
    sketch, rows = Sketch(), judge_nets.ROWS
    values, widths = [sketch.input(rows, judged.x.shape[1])], judged.widths
    for number, op in enumerate(judged.ops):
        weight = () if op.weight is None else (op.weight.shape[0], op.weight.shape[1])
        reads = [values[r] for r in op.reads]
        shape = rows, widths[number + 1]
        values.append(sketch.op(op.kind.lower(), *reads, shape=shape, weight=weight))
    return sketch.finish(digest)


def _profile(
    judged: JudgeNet, graph: Graph, rng: np.random.Generator
) -> Mapping[Format, Mapping[str, float]]:
    """Stated times of ops, off by a factor of their kernels' family and one of their own."""
    times: dict[Format, Mapping[str, float]] = {}
    for fmt in (Format.FP32, Format.FP16):
        family = {n.op: assumed.FAMILY_CORRECTION * rng.standard_normal() for n in graph.nodes}
        times[fmt] = {
            n.name: assumed.TIME_SCALE
            * judged.op_s(n.id, fmt.label)
            * math.exp(family[n.op] + assumed.KERNEL_CORRECTION * rng.standard_normal())
            for n in graph.nodes
        }
    return times
