"""One model on one emulated device: metric, output error, and where the error comes from."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from finecast.devices.emulation import Emulation
from finecast.engines.emulator import EmulatorEngine, exact_session, prepare, setting_of
from finecast.frontends import onnx as frontend
from finecast.measure.observe import observe
from finecast.pipeline.cached_session import Remembered
from finecast.pipeline.contributions import Contribution, contributions
from finecast.pipeline.device import CALIBRATION_FEEDS
from finecast.pipeline.workload import Workload
from finecast.planning.sensitivity import squared_error
from finecast.progress import Progress, silent


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationReport:
    """``error`` is the relative error of the outputs on calibration data."""

    baseline: float
    metric: float
    error: float
    cast_ops: int
    contributions: tuple[Contribution, ...]
    seconds: float


def emulate(
    model: Path, emulation: Emulation, workload: Workload, *, progress: Progress = silent
) -> EmulationReport:
    """Evaluate ``model`` as the target would run it.

    Raises:
        ModelError: If it cannot be read.
        EngineError: If it cannot be run.
    """
    start = time.perf_counter()
    reference = Remembered(exact_session(model))
    progress("fp32", 0, 1)
    baseline = workload.evaluate(reference, None)
    prepared = prepare(frontend.load(model), emulation)
    engine = EmulatorEngine(emulation=emulation)
    setting = setting_of(prepared.graph, emulation)
    progress("emulated", 0, 1)
    metric = workload.evaluate(engine.session(prepared, fixed=setting), reference)
    feeds = list(islice(workload.calibration(), CALIBRATION_FEEDS))
    exact = [a for f in feeds for a in reference.run(f).values()]
    switched = engine.session(prepared)
    outputs = [a for f in feeds for a in switched.apply(setting).run(f).values()]
    facts = observe(prepared, lambda: feeds)
    found = contributions(
        prepared.graph, switched, emulation, setting, feeds, facts, progress=progress
    )
    return EmulationReport(
        baseline=baseline,
        metric=metric,
        error=math.sqrt(squared_error(outputs, exact)),
        cast_ops=len(setting.reads),
        contributions=tuple(found),
        seconds=time.perf_counter() - start,
    )
