"""Python's verb ``blame``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from finecast import keywords
from finecast.api.models import Model, opened_in_fp32, plan_or_model
from finecast.api.other_engines import slower_than_fp32
from finecast.api.requests import casting, data_of, uncertified
from finecast.arguments import checked, group_of
from finecast.data.criterion import Criterion
from finecast.data.options import Data, DataOptions
from finecast.devices.emulation import Emulation
from finecast.devices.targets import list_targets, target_named
from finecast.diagnosis.blaming import Blame, samples_of
from finecast.diagnosis.blaming import blame as blamed
from finecast.diagnosis.judging import BlameOptions, MetricJudge, judge_of
from finecast.engines.base import calls_of
from finecast.engines.exact import CachedSession
from finecast.errors import UsageError
from finecast.native.model import EmulatedLow, LowModel, OpenedModel, ReadOptions
from finecast.native.opening import opened
from finecast.planning.plan import Plan
from finecast.progress import Progress, reporting
from finecast.rules.policy import Policy, Scope


@checked(BlameOptions, Criterion, DataOptions, ReadOptions)
def blame(
    model: Model,
    low: Model | Plan | Emulation,
    *,
    policy: Policy | str = "none",
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    progress: Progress | bool = True,
    **options: Unpack[keywords.BlameKeywords],
) -> Blame:
    """Which ops of a low model cost its accuracy: the fewest whose return to fp32 restores it.

    Args:
        model: The fp32 model, or its path.
        low: A low version of it by any tool; or a plan or its path (``.json``), for the model
            that it gives; or a device, by name or with options, that runs the fp32 model.
        policy: What the device's compiler casts, as for ``emulate``.
        data: The data, as for ``tune``. Without a metric the outputs' error is judged.
        engine: ``NAME[:DEVICE]`` that runs both; by default numbers are as the types state.
        progress: As for ``convert``.
        options: Options of ``BlameOptions``, ``Criterion``, ``DataOptions`` and
            ``ReadOptions`` by name: ``check``, ``max_error``, ``metric``, ``max_drop``.

    Raises:
        FinecastError: If the models cannot be compared or run.
    """
    how, asked = group_of(ReadOptions, options), group_of(BlameOptions, options).loaded()
    criterion = uncertified(options)
    stated = data_of(data, options, criterion).loaded()
    asked.check_beside(stated, criterion)
    given = opened_in_fp32(model, how)
    given.check_original()
    with reporting(progress, "comparing") as report:
        beside = _low_of(given, how, low, engine=engine, policy=Policy.of(policy))
        reference = CachedSession(given.reference())
        workload = given.workload(stated, reference)
        judge = judge_of(asked, stated, criterion, workload, beside, reference)
        exact = samples_of(workload, reference, len(beside.groups))
        culprits = blamed(beside, judge, exact, progress=report)
        report("speed", 0, 1)
        slower: tuple[str, ...] = ()
        if isinstance(low, str | Path) and not isinstance(beside, EmulatedLow):
            feeds = calls_of(exact.calls[0])[0]
            slower = slower_than_fp32(given.path, Path(low), engine, feeds)
    doubts = workload.warnings if isinstance(judge, MetricJudge) else ()
    return replace(culprits, warnings=(*doubts, *culprits.warnings, *slower))


def _low_of(
    given: OpenedModel,
    how: ReadOptions,
    low: Model | Plan | Emulation,
    *,
    engine: str | None,
    policy: Policy,
) -> LowModel:
    """The low model beside the fp32 one: that of a plan is built, a device is emulated."""
    if isinstance(low, Emulation) or (
        isinstance(low, str) and target_named(low) in list_targets()
    ):
        if engine is not None:
            raise UsageError(
                "a device that is not here runs in its emulator",
                where="--engine",
                fix="leave it out",
            )
        emulation = casting(low, policy)
        name = f"{given.name} on {emulation.target.name}"
        return EmulatedLow(program=given.program(emulation), emulation=emulation, name=name)
    if policy.scope is not Scope.NONE:
        raise UsageError(
            "a policy says what a device casts, and OTHER is a model",
            where="policy",
            fix="leave it out",
        )
    stated = plan_or_model(low, how)
    if isinstance(stated, Plan):
        made = given.given_back(given.build(replace(stated, by_hint=False)))
        stated = opened(made, how)
    return given.beside(stated, engine)
