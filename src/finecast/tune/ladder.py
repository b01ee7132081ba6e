"""The documented flow in one go: every rung emulated, timed by the model, judged.

One switched session serves all rungs of a format. Laws: the recommendation passes the
criterion; no passing rung is faster by the model; a per-op plan is offered only where it
passes on all data and is faster than the recommended rung.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final

import numpy as np

from finecast.cost import RooflineCost
from finecast.emulation import Emulation
from finecast.engines import get_engine
from finecast.engines.base import Array, Feeds, Session
from finecast.engines.emulator import (
    EmulatorEngine,
    EmulatorSession,
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
from finecast.policy import Scope
from finecast.progress import Progress, silent
from finecast.sensitivity import squared_error
from finecast.tune.modelled import modelled_time_s
from finecast.tune.workload import Workload

# Formats that ONNX can state by a cast and every Neuron compiler respects.
STATED: Final = (Format.BF16, Format.FP16)
CALIBRATION_FEEDS: Final = 8
"""Batches that sensitivities are measured on: each op is run on all of them."""

# A low format and the format that transposes round to.
_Key = tuple[Format, Format | None]


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
    progress: Progress = silent
    reference: Session = field(init=False)
    baseline: float = field(init=False)
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: list[Array] = field(init=False)
    relayouts: dict[Format, Format | None] = field(
        default_factory=dict[Format, "Format | None"]
    )
    sessions: dict[_Key, tuple[Prepared, EmulatorSession]] = field(
        default_factory=dict["_Key", tuple[Prepared, EmulatorSession]]
    )

    def __post_init__(self) -> None:
        """Evaluate the fp32 model, and see what its values are.

        Raises:
            ModelError: If its metric is NaN.
        """
        self.progress("fp32", 0, 1)
        self.reference = get_engine("onnxruntime").load(self.file.path)
        self.baseline = self.workload.evaluate(self.reference, None)
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        self.exact = [a for f in self.feeds for a in self.reference.run(f).values()]
        self.progress("fp32", 1, 1)

    def walk(self, rungs: Sequence[Rung]) -> LadderOutcome:
        """Evaluate every rung on all data."""
        emulations = [r.options.emulation() for r in rungs]
        for one in emulations:
            if one.relayout is not None and not _own_format(one):
                self.relayouts.setdefault(one.format, one.relayout)
        first, _ = self.session(emulations[0])
        self.facts = observe(first, lambda: self.feeds)
        if math.isnan(self.baseline):
            node = first_nonfinite(first.graph, self.facts)
            raise ModelError(
                "the fp32 model gives NaN" + (f", first at {node}" if node else ""),
                where=str(self.file.path),
                fix="check the data and the metric with the fp32 model first",
            )
        results: list[RungResult] = []
        for done, (rung, emulation) in enumerate(zip(rungs, emulations, strict=True)):
            self.progress(rung.name, done, len(rungs))
            results.append(self._judge(rung, emulation))
        self.progress("rungs", len(rungs), len(rungs))
        passing = [r for r in results if r.passed]
        best = min(passing, key=lambda r: (r.time_s, r.error)) if passing else None
        return LadderOutcome(baseline=self.baseline, rungs=tuple(results), best=best)

    def session(self, emulation: Emulation) -> tuple[Prepared, EmulatorSession]:
        """The switched session for the emulation's format, made when first asked for.

        Where transposes change nothing (byte moves, or a format that values have already)
        the relayout of another rung does not matter: its switch is off.
        """
        acts = emulation.relayout is not None and not _own_format(emulation)
        shared = self.relayouts.get(emulation.format, emulation.relayout)
        relayout = emulation.relayout if acts else shared
        key = emulation.format, relayout
        if key not in self.sessions:
            common = replace(emulation, scope=Scope.NONE, relayout=relayout)
            prepared = prepare(self.file, common)
            session = EmulatorEngine(emulation=common).session(prepared)
            self.sessions[key] = prepared, session
        return self.sessions[key]

    def evaluate(
        self, emulation: Emulation, setting: Setting, *, all_data: bool = True
    ) -> tuple[float, float]:
        """Metric on all data (NaN if not asked for) and relative error on calibration data."""
        _, session = self.session(emulation)
        session.apply(setting)
        outputs = [a for f in self.feeds for a in session.run(f).values()]
        error = math.sqrt(squared_error(outputs, self.exact))
        session.apply(setting)
        with np.errstate(all="ignore"):  # what overflows here would overflow there
            metric = self.workload.evaluate(session, self.reference) if all_data else math.nan
        return metric, error

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The target's roofline with the observed shapes."""
        shapes = {i: f.shape for i, f in self.facts.items()}
        return RooflineCost(target=emulation.target, shapes=shapes)

    def _judge(self, rung: Rung, emulation: Emulation) -> RungResult:
        prepared, _ = self.session(emulation)
        setting = rung_setting(prepared, emulation)
        metric, error = self.evaluate(emulation, setting)
        return RungResult(
            rung=rung,
            metric=metric,
            error=error,
            time_s=modelled_time_s(prepared.graph, self.cost(emulation), emulation, setting),
            passed=self.criterion.passes(metric, self.baseline),
        )


def rung_setting(prepared: Prepared, emulation: Emulation) -> Setting:
    """The switch of a rung, in the session it shares with others."""
    setting = setting_of(prepared.graph, emulation)
    return replace(setting, relayout=setting.relayout and not _own_format(emulation))


def _own_format(emulation: Emulation) -> bool:
    """Whether transposes round to what all values are stored in anyway."""
    return emulation.scope is Scope.ALL and emulation.relayout is emulation.format
