"""Python's verb ``emulate``."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

from finecast import keywords
from finecast.api.models import Model, opened_in_fp32
from finecast.api.requests import casting
from finecast.arguments import checked, group_of
from finecast.data.options import Data, DataOptions
from finecast.devices.emulation import Emulation
from finecast.diagnosis.emulating import EmulationReport
from finecast.diagnosis.emulating import emulate as emulated
from finecast.native.model import ReadOptions
from finecast.progress import Progress, reporting
from finecast.rules.policy import Policy


@checked(DataOptions, ReadOptions)
def emulate(
    model: Model,
    target: Emulation | str,
    policy: Policy | str = "none",
    *,
    data: DataOptions | Data | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.EmulateKeywords],
) -> EmulationReport:
    """What a device that is not here would do to a model's metric and outputs.

    Args:
        model: The model, or its path.
        target: The device, by name (``finecast targets``) or with options. ``"h100:90%"``
            tries orders of summation however long it takes, ``"h100:0"`` none.
        policy: What its compiler casts: a scope and one format, such as ``all:bf16``. It is
            for a device by name; one with options has its own.
        data: The data, as for ``tune``.
        progress: As for ``convert``.
        options: Options of ``DataOptions`` and ``ReadOptions`` by name: ``metric``, ``batch``.

    Raises:
        FinecastError: If the model cannot be emulated, or the device cannot do that.
    """
    emulation = casting(target, Policy.of(policy))
    stated = group_of(DataOptions, options, data=data).loaded()
    given = opened_in_fp32(model, group_of(ReadOptions, options))
    loaded = given.reference()
    workload = given.workload(stated, loaded)
    with reporting(progress, "emulating") as report:
        emulation_report = emulated(given, loaded, emulation, workload, progress=report)
    return replace(
        emulation_report,
        target=emulation.target.name,
        metric_name=stated.label,
        warnings=tuple(workload.warnings),
    )
