"""What a verb is asked for, as values: how it runs a model, on which device, for what goal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from finecast.arguments import group_of
from finecast.data.criterion import Criterion
from finecast.data.options import Data, DataOptions
from finecast.devices.emulation import (
    Emulation,
    check,
    check_formats,
    explicit_casts,
    refuse_share,
)
from finecast.errors import UsageError
from finecast.native.model import RunOptions
from finecast.rules.policy import Policy, Scope
from finecast.tuning.goal import Goal


def on_data(run: RunOptions, data: DataOptions, *, sizes_feeds: bool = False) -> RunOptions:
    """``run`` on data; ``sizes_feeds`` says that ``batch`` sizes random feeds.

    Raises:
        UsageError: If the data cannot be read, or an option needs data and there are none.
    """
    return replace(
        run,
        data=data.if_given(sizes_feeds=sizes_feeds),
        dims=data.dims,
        batch=(data.batch or 1) if sizes_feeds else 1,
    )


def device_of(target: Emulation | str | None) -> Emulation | None:
    """A device that is given with options, or by its name."""
    return explicit_casts(target) if isinstance(target, str) else target


def device_for(policy: Policy, target: Emulation | str | None) -> Emulation | None:
    """The device; UsageError if it does not compute in a format of ``policy``."""
    if isinstance(target, str) and ":" in target:
        refuse_share(target)
    device = device_of(target)
    if device is not None:
        check_formats(device, policy)
    return device


def casting(target: Emulation | str, policy: Policy) -> Emulation:
    """The device with what its compiler casts, which one with options says itself.

    Raises:
        UsageError: If the device cannot do that.
    """
    if isinstance(target, Emulation):
        return target
    emulation = explicit_casts(target)
    if policy.scope is Scope.NONE:
        return emulation
    check_formats(emulation, policy)
    emulation = replace(emulation, scope=policy.scope, format=policy.format)
    check(emulation)
    return emulation


def data_of(
    data: DataOptions | Data | None, options: Mapping[str, Any], criterion: Criterion
) -> DataOptions:
    """The data, whose metric improves in the direction that ``criterion`` states.

    Raises:
        UsageError: If the data are given, and a part of them.
    """
    stated = group_of(DataOptions, options, data=data)
    return stated if criterion.higher_is_better else replace(stated, lower_is_better=True)


def goal_of(goal: Goal | None, options: Mapping[str, Any]) -> Goal:
    """The goal, whose criterion may be given by itself.

    Raises:
        UsageError: If the goal is given, and a part of it.
    """
    stated = options.get("criterion")
    whole = stated if isinstance(stated, Criterion) else None
    single = {k: v for k, v in options.items() if v is not whole}
    kept = group_of(Criterion, single, kind=whole)
    if goal is not None and kept != Criterion():
        raise UsageError("a criterion is given beside Goal", fix="set its criterion")
    made = group_of(Goal, options, criterion=goal)
    return made if goal is not None else replace(made, criterion=kept)


def uncertified(options: Mapping[str, Any]) -> Criterion:
    """The criterion of a verb that certifies nothing.

    Raises:
        UsageError: If it has a confidence, which would have no effect.
    """
    criterion = goal_of(None, options).criterion
    if criterion.confidence is not None:
        raise UsageError(
            "only tune certifies what it finds", where="--confidence", fix="leave it out"
        )
    return criterion
