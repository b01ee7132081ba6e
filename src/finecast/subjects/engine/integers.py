"""Ops that a plan puts on integers, or has read weights of integers, and that do not run so.

Engines fuse what quantizes and dequantizes into kernels by patterns of their own. Where none
fits they compute in fp32 between roundings, or from weights that they widened before, without
a word: slower than fp32 and less exact. So every such plan is held against the kernels that
ran.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from finecast.data.deviation import LIMIT, deviation
from finecast.engines.base import Array, Engine, Feeds
from finecast.engines.integers import fuses, not_as_planned
from finecast.engines.loading import load_model
from finecast.errors import EngineError, UsageError
from finecast.graph import Graph
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.rules.policy import Policy
from finecast.rules.quantized import quantized_notes
from finecast.subjects.engine.native import AppliedModel, NativeSource

# Each turn takes ops out, and what is left is fused anew: more turns have not been needed.
_MOST_TURNS: Final = 4


def computed_otherwise(
    graph: Graph,
    engine: str,
    got: Mapping[str, Array],
    exact: Callable[[], Mapping[str, Array]],
) -> str:
    """What to say where ``engine`` computes a model that came quantized not as it states.

    OpenVINO 2026.4 does so with convolutions of signed codes on CPUs without AMX.

    Args:
        graph: The model's.
        engine: The engine.
        got: What it gives.
        exact: Gives what the nodes state; asked of quantized models alone.
    """
    if not quantized_notes(graph):
        return ""
    wanted = exact()
    errors = (deviation(got[name], array).relative for name, array in wanted.items())
    worst = max(errors, default=0.0)
    if worst < LIMIT:
        return ""
    return (
        f"{engine} computes the quantized model otherwise than it states (relative error"
        f" {worst:.2g}): run it in another engine, or plan it anew by --from-type int8"
    )


def check_calibrated(policy: Policy, data: Sequence[Feeds]) -> None:
    """Return unless a format of ``policy`` needs what is not there.

    Raises:
        UsageError: If it has scales, and there is no data to take them from.
    """
    for fmt in (f for f in policy.formats if f.scaled and not f.constants_only):
        if not data:
            raise UsageError(
                f"{fmt.label} needs the ranges of the model's values, and there is no data",
                where="--auto-cast-type",
                fix="give some of the model's inputs: --data calib.npz (data=...)",
            )


def narrowed(source: NativeSource, planner: Planner, engine: Engine, feeds: Feeds) -> Planner:
    """``planner`` without the ops that the lowest plan in a scaled format fails to put there.

    A device that is emulated has no kernels to be held against.

    Raises:
        EngineError: If the engine cannot run the lowest plan.
    """
    for fmt in (f for f in planner.policy.formats if f.scaled and fuses(engine.name, f)):
        for _ in range(_MOST_TURNS):
            plan = planner.lowest(fmt)
            failed = left_out(engine, plan, source.build(plan).applied, feeds)
            if not failed:
                break
            planner = planner.without(fmt, failed)
    return planner


def left_out(
    engine: Engine, plan: Plan, applied: AppliedModel, feeds: Feeds
) -> dict[str, str]:
    """Ops that ``plan`` puts on integers, by name, and in what ``engine`` ran them instead.

    Raises:
        EngineError: If the engine cannot run the model.
    """
    planned = {
        name: fmt
        for name, fmt in plan.formats.items()
        if fmt.scaled and fuses(engine.name, fmt)
    }
    if not planned:
        return {}
    session = load_model(engine, applied.model, profiling=True)
    return not_as_planned(session.profile(feeds, repeats=1), planned)


def check_on_integers(engine: Engine, plan: Plan, applied: AppliedModel, feeds: Feeds) -> None:
    """Return if every op that ``plan`` puts on integers ran so.

    Raises:
        EngineError: If not; names the first op.
    """
    for name, ran in left_out(engine, plan, applied, feeds).items():
        raise EngineError(
            f"{name!r} is planned in {plan.formats[name].label} and runs in {ran}",
            fix="keep it in fp32 by --exclude",
        )
