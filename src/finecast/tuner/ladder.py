"""The documented flow in one go: every rung emulated, timed by the model, judged.

Each rung has a session built for it: that evaluates two to three times faster than a
switched one, and is loaded in a second. Laws: the recommendation passes the
criterion; no passing rung is faster by the model; a per-op plan is offered only where it
passes on all data and is faster than the recommended rung.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from finecast.cost import RooflineCost
from finecast.emulation import Emulation
from finecast.engines import get_engine
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.emulator import (
    EmulatorEngine,
    prepare,
    setting_of,
)
from finecast.errors import ModelError
from finecast.facts import ValueFacts
from finecast.formats import Format
from finecast.frontends.onnx import OnnxFile, Prepared
from finecast.frontends.onnx.emulation import Setting
from finecast.measure.criterion import Criterion
from finecast.measure.observe import first_nonfinite, observe
from finecast.neuron import Rung
from finecast.progress import Progress, silent
from finecast.sensitivity import squared_error
from finecast.tuner.modelled import modelled_time_s
from finecast.tuner.workload import Workload

# Formats that ONNX can state by a cast and every Neuron compiler respects.
STATED: Final = (Format.BF16, Format.FP16)
CALIBRATION_FEEDS: Final = 8
"""Batches that sensitivities are measured on: each op is run on all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult:
    """One rung: its metric, its relative output error on calibration data, its time."""

    rung: Rung
    metric: float
    error: float
    time_s: float
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderOutcome:
    """All rungs, most accurate first, and the one to use; None where none passes."""

    baseline: float
    rungs: tuple[RungResult, ...]
    best: RungResult | None

    @property
    def fastest_s(self) -> float:
        """Modelled time of the fastest rung."""
        return min(r.time_s for r in self.rungs)


@dataclass(slots=True, kw_only=True)
class LadderWalk:
    """A model on one target: what all rungs share, made once."""

    file: OnnxFile
    workload: Workload
    criterion: Criterion
    rungs: Sequence[Rung]
    progress: Progress = silent
    prepared: Prepared = field(init=False)
    reference: Session = field(init=False)
    baseline: float = field(init=False)
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        """Evaluate the fp32 model, and see what its values are.

        Raises:
            ModelError: If its metric is NaN.
        """
        self.progress("fp32", 0, 1)
        # What rewrites the model (accumulation) is the same on all rungs.
        self.prepared = prepare(self.file, self.rungs[0].options.emulation())
        self.reference = get_engine("onnxruntime").load(self.file.path)
        self.baseline = self.workload.evaluate(self.reference, None)
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = [a for f in self.feeds for a in self.reference.run(f).values()]
        self.facts = observe(self.prepared, lambda: self.feeds)
        if math.isnan(self.baseline):
            node = first_nonfinite(self.prepared.graph, self.facts)
            raise ModelError(
                "the fp32 model gives NaN" + (f", first at {node}" if node else ""),
                where=str(self.file.path),
                fix="check the data and the metric with the fp32 model first",
            )
        self.progress("fp32", 1, 1)

    def walk(self) -> LadderOutcome:
        """Evaluate every rung on all data."""
        results: list[RungResult] = []
        for done, rung in enumerate(self.rungs):
            self.progress(rung.name, done, len(self.rungs))
            results.append(self._judge(rung, rung.options.emulation()))
        self.progress("rungs", len(self.rungs), len(self.rungs))
        passing = [r for r in results if r.passed]
        best = min(passing, key=lambda r: (r.time_s, r.error)) if passing else None
        return LadderOutcome(baseline=self.baseline, rungs=tuple(results), best=best)

    def evaluate(self, emulation: Emulation, setting: Setting) -> tuple[float, float]:
        """Metric on all data, and relative output error on calibration data."""
        engine = EmulatorEngine(emulation=emulation)
        session = engine.session(self.prepared, fixed=setting)
        outputs = [a for f in self.feeds for a in session.run(f).values()]
        error = math.sqrt(squared_error(outputs, self.exact))
        session.apply(setting)  # the stream of samples starts anew
        return self.workload.evaluate(session, self.reference), error

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The target's roofline with the observed shapes."""
        shapes = {i: f.shape for i, f in self.facts.items()}
        return RooflineCost(target=emulation.target, shapes=shapes)

    def _judge(self, rung: Rung, emulation: Emulation) -> RungResult:
        graph = self.prepared.graph
        setting = setting_of(graph, emulation)
        same = self._leaves_alone(emulation, setting)
        metric, error = (self.baseline, 0.0) if same else self.evaluate(emulation, setting)
        return RungResult(
            rung=rung,
            metric=metric,
            error=error,
            time_s=modelled_time_s(graph, self.cost(emulation), emulation, setting),
            passed=self.criterion.passes(metric, self.baseline),
        )

    def _leaves_alone(self, emulation: Emulation, setting: Setting) -> bool:
        """Whether the device computes just what fp32 does: there is nothing to evaluate."""
        if setting.reads or emulation.relayout not in (None, Format.FP32):
            return False
        graph = self.prepared.graph
        exact = all(emulation.own_read(n) is Format.FP32 for n in graph.float_nodes)
        transposed = emulation.relayout is not None and any(
            f.infs for f in self.facts.values()
        )
        return exact and not transposed
