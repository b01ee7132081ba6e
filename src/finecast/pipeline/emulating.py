"""One model on one emulated device: metric, output error, and where the error comes from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from finecast.devices.emulation import Emulation
from finecast.devices.setting import setting_of
from finecast.engines.base import Session
from finecast.pipeline.cached_session import CachedSession
from finecast.pipeline.contributions import Contribution, contributions
from finecast.pipeline.device import DeviceModel
from finecast.pipeline.model import OpenedModel
from finecast.pipeline.workload import Workload
from finecast.progress import Progress, silent
from finecast.rules.calibration import calibrated_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulationReport:
    """What the emulation of one device showed.

    ``errors`` are the relative errors of the outputs on calibration data, the worst first.
    ``left_out`` are the outputs without one. ``cast_ops`` is the number of ops that read low
    operands.
    """

    baseline: float
    metric: float
    errors: Mapping[str, float]
    left_out: tuple[str, ...]
    cast_ops: int
    contributions: tuple[Contribution, ...]
    seconds: float

    @property
    def error(self) -> float:
        """Relative error of the worst output."""
        return max(self.errors.values(), default=0.0)


def emulate(
    model: OpenedModel,
    loaded: Session,
    emulation: Emulation,
    workload: Workload,
    *,
    progress: Progress = silent,
) -> EmulationReport:
    """Evaluate a model as the device would run it.

    Args:
        model: The model.
        loaded: The fp32 model, loaded.
        emulation: The device and its options.
        workload: The data.
        progress: Told of long work.

    Raises:
        ModelError: If it cannot be emulated.
        EngineError: If it cannot be run.
    """
    start = time.perf_counter()
    reference = CachedSession(loaded)
    progress("fp32", 0, 1)
    baseline = workload.evaluate(reference, None)
    program = model.program(emulation)
    device = DeviceModel(program=program, workload=workload, reference=reference)
    if emulation.format.has_scales:
        coded = calibrated_nodes(device.graph, emulation.format, device.facts)
        emulation = replace(emulation, encodings=coded)
    setting = setting_of(device.graph, emulation)
    progress("emulated", 0, 1)
    metric = workload.evaluate(device.session(emulation, setting), reference)
    switched = program.session(emulation, setting, switched=True)
    errors = device.exact.errors(switched)
    found = contributions(
        device.graph,
        switched,
        emulation,
        setting,
        device.exact,
        device.facts,
        progress=progress,
    )
    return EmulationReport(
        baseline=baseline,
        metric=metric,
        errors=errors,
        left_out=device.exact.left_out,
        cast_ops=len(setting.reads),
        contributions=tuple(found),
        seconds=time.perf_counter() - start,
    )
