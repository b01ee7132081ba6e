"""``finecast.ladder``: every rung of a compiler's options, emulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from finecast import Criterion, DataOptions, Policy, api
from finecast.api import Destination, Model, ReadOptions
from finecast.arguments import checked, group_of
from finecast.data import Data
from finecast.devices import Emulation
from finecast.files import CommandFiles
from finecast.keywords import AccuracyKeywords, WritingKeywords
from finecast.progress import Progress, reporting, silent
from finecast_neuron.ladder import LadderOutcome, LadderWalk, Rung, search_per_op


class LadderKeywords(WritingKeywords, AccuracyKeywords, total=False):
    """Of ``ladder``."""


@checked(Destination, Criterion, DataOptions, ReadOptions)
def ladder(
    model: Model,
    rungs: Sequence[Rung],
    output: Destination | str | Path | None = None,
    *,
    data: DataOptions | Data | None = None,
    per_op: bool = True,
    formats: tuple[Emulation, Policy] | None = None,
    progress: Progress | bool = True,
    **options: Unpack[LadderKeywords],
) -> LadderOutcome:
    """Emulate every rung of a compiler's options, and look for a plan by op that is faster.

    Args:
        model: The model, or its path.
        rungs: The rungs: ``finecast.compat.neuron.compilers.ladder("trn1")``.
        output: Where the model of the plan by op goes.
        data: The data, as for ``tune``.
        per_op: Whether a plan by op is looked for.
        formats: Formats of that plan: a device with options, and a policy; by default those
            of the rungs.
        progress: As for ``convert``.
        options: Options of ``Destination``, ``Criterion``, ``DataOptions`` and ``ReadOptions``
            by name: ``metric``, ``max_drop``, ``force``.

    Raises:
        FinecastError: If the model cannot be emulated, or its metric is no number.
    """
    criterion = api.uncertified(options)
    request = LadderRequest(
        rungs=rungs,
        data=api.data_of(data, options, criterion),
        criterion=criterion,
        per_op=per_op,
        formats=formats,
    )
    written = group_of(Destination, options, path=output)
    with reporting(progress, "ladder") as report:
        how = group_of(ReadOptions, options)
        return walked(model, replace(request, progress=report), written, how)


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRequest:
    """What ``ladder`` is asked for, as values; its arguments say what they are."""

    rungs: Sequence[Rung]
    data: DataOptions
    criterion: Criterion
    per_op: bool = True
    formats: tuple[Emulation, Policy] | None = None
    progress: Progress = silent


def walked(
    model: Model,
    request: LadderRequest,
    written: Destination,
    how: ReadOptions,
    files: CommandFiles | None = None,
) -> LadderOutcome:
    """``ladder`` with its options as values; ``files`` are those of the call, if there are.

    Raises:
        FinecastError: As ``ladder``.
    """
    data, rungs = request.data.loaded(), request.rungs
    files = files or CommandFiles(force=written.force)
    given = api.declared(model, how, written, files, data)
    with files.locked() as removed:
        reference = given().reference()
        workload = given().workload(data, reference)
        better = workload.higher_is_better
        walk = LadderWalk(
            model=given(),
            reference=reference,
            workload=workload,
            criterion=replace(request.criterion, higher_is_better=better),
            rungs=rungs,
            progress=request.progress,
        )
        outcome = replace(
            walk.walk(),
            warnings=(*removed, *workload.warnings),
            target=rungs[0].emulation.target.name,
            metric_name=data.label,
        )
        if not request.per_op:
            return outcome
        plan, why = search_per_op(walk, outcome, request.formats)
        outcome = replace(outcome, plan=plan, why=why)
        if plan is None or written.path is None:
            return outcome
        # Not verified: no engine here computes as the device, and the emulation judged it.
        api.apply(plan.plan, given(), written, verify=False)
    return replace(outcome, output=written.path)
