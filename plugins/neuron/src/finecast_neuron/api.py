"""``finecast.ladder``: every rung of a compiler's options, emulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from finecast import api
from finecast.api import Model
from finecast.arguments import checked, group_of
from finecast.data.criterion import Criterion
from finecast.data.sources import Data, DataOptions
from finecast.devices.emulation import Emulation
from finecast.keywords import LadderKeywords
from finecast.native.artefact import Destination
from finecast.native.model import ReadOptions
from finecast.progress import Progress, reporting
from finecast.rules.policy import Policy
from finecast_neuron.ladder import LadderOutcome, LadderWalk, Rung, search_per_op


@checked(
    *(Destination, Criterion, DataOptions, ReadOptions),
    without=("dims", "groups", "baseline", "confidence", "score_range"),
)
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
    written = group_of(Destination, options, path=output)
    stated = group_of(DataOptions, options, data=data).loaded()
    kept = api.uncertified(options)
    given, files = api.declared(model, group_of(ReadOptions, options), written, stated)
    with reporting(progress, "ladder") as report, files.locked():
        reference = given().reference()
        workload = given().workload(stated, reference)
        walk = LadderWalk(
            model=given(),
            reference=reference,
            workload=workload,
            criterion=replace(kept, higher_is_better=workload.higher_is_better),
            rungs=rungs,
            progress=report,
        )
        outcome = replace(
            walk.walk(),
            warnings=tuple(workload.warnings),
            target=rungs[0].emulation.target.name,
            metric_name=stated.label,
        )
        if not per_op:
            return outcome
        plan, why = search_per_op(walk, outcome, formats)
    if plan is None or written.path is None:
        return replace(outcome, plan=plan, why=why)
    # Not verified: no engine here computes as the device, and the emulation judged it.
    api.apply(plan.plan, given(), written, verify=False)
    return replace(outcome, plan=plan, why=why, output=written.path)
