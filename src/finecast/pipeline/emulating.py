"""One model on one emulated device: metric, output error, and where the error comes from."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import islice

from finecast.devices.emulation import Emulation
from finecast.devices.setting import setting_of
from finecast.engines.base import Session, outputs_on
from finecast.pipeline.cached_session import Remembered
from finecast.pipeline.contributions import Contribution, contributions
from finecast.pipeline.device import CALIBRATION_FEEDS
from finecast.pipeline.model import OpenedModel
from finecast.pipeline.workload import Workload
from finecast.planning.sensitivity import squared_error
from finecast.progress import Progress, silent
from finecast.rules.calibration import calibrated_nodes


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
    model: OpenedModel,
    loaded: Session,
    emulation: Emulation,
    workload: Workload,
    *,
    progress: Progress = silent,
) -> EmulationReport:
    """Evaluate a model as the target would run it.

    Args:
        model: The model.
        loaded: The fp32 model.
        emulation: The target and its options.
        workload: The data.
        progress: Told of long work.

    Raises:
        ModelError: If it cannot be emulated.
        EngineError: If it cannot be run.
    """
    start = time.perf_counter()
    reference = Remembered(loaded)
    progress("fp32", 0, 1)
    baseline = workload.evaluate(reference, None)
    program = model.program(emulation)
    feeds = list(islice(workload.calibration(), CALIBRATION_FEEDS))
    facts = program.observe(feeds)
    if emulation.format.scaled:
        coded = calibrated_nodes(program.graph, emulation.format, facts)
        emulation = replace(emulation, encodings=coded)
    setting = setting_of(program.graph, emulation)
    progress("emulated", 0, 1)
    metric = workload.evaluate(program.session(emulation, setting), reference)
    exact = outputs_on(reference, feeds)
    switched = program.session(emulation, setting, switched=True)
    outputs = outputs_on(switched, feeds)
    found = contributions(
        program.graph,
        switched,
        emulation,
        setting,
        feeds,
        facts,
        progress=progress,
    )
    return EmulationReport(
        baseline=baseline,
        metric=metric,
        error=math.sqrt(squared_error(outputs, exact)),
        cast_ops=len(setting.reads),
        contributions=tuple(found),
        seconds=time.perf_counter() - start,
    )
