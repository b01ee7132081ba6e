"""Python's verb ``explain``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Unpack

from finecast import keywords
from finecast.api.models import Model, opened_in_fp32, plan_of
from finecast.api.requests import device_for, on_data
from finecast.arguments import checked, group_of
from finecast.data.options import Data, DataOptions
from finecast.devices.emulation import Emulation
from finecast.diagnosis.explanation import Explanation
from finecast.engines import ENGINES
from finecast.errors import EngineError
from finecast.naming import unknown_name
from finecast.native.model import ReadOptions, RunOptions
from finecast.native.opening import opened
from finecast.numbers.formats import Format
from finecast.planning.plan import Plan
from finecast.rules.policy import DEFAULT_POLICY, Policy


@checked(RunOptions, DataOptions, ReadOptions)
def explain(
    model: Model,
    node: str | None = None,
    *,
    plan: Plan | str | Path | None = None,
    policy: Policy | str = DEFAULT_POLICY,
    data: DataOptions | Data | None = None,
    engine: str | None = None,
    target: Emulation | str | None = None,
    **options: Unpack[keywords.ExplainKeywords],
) -> Explanation:
    """Why an op has its format in a plan: what decided, and every rule's verdict.

    Args:
        model: The model, or its path.
        node: The op's name; None for a summary of all.
        plan: The plan; without it the rules alone are asked, under ``policy``.
        policy: As for ``convert``, like ``data``, ``target`` and ``options``.
        data: Their ranges guide the rules.
        engine: The engine whose kernels are compared; by default that of the plan.
        target: A device that is not here.
        options: Options of ``RunOptions``, ``DataOptions`` and ``ReadOptions`` by name.

    Raises:
        FinecastError: If the model cannot be read, it has no such node, or rules conflict.
    """
    how, stated = group_of(ReadOptions, options), plan_of(plan)
    if stated is not None:
        read = opened(model, how, plan=stated)
        explained_plan, told = read.placed(stated)
        graph = read.graph_for(explained_plan)
    else:
        asked = Policy.of(policy)
        run = replace(
            group_of(RunOptions, options), engine=engine, device=device_for(asked, target)
        )
        run = on_data(run, group_of(DataOptions, options, data=data))
        read = opened_in_fp32(model, how)
        graph, explained_plan, told = read.judge(asked, run)
    if node is None:
        return Explanation(graph=graph, plan=explained_plan, warnings=told)
    names = [one.name for one in graph.nodes]
    if node not in names:
        raise unknown_name(node, names, what="node")
    explained = Explanation(
        graph=graph, plan=explained_plan, node=graph.find(node), warnings=told
    )
    decision = explained.decision
    if target is not None or decision is None or decision.format is Format.FP32:
        return explained
    own = explained_plan.engine if explained_plan.engine in ENGINES else None
    try:
        broken = read.fallen_apart(explained_plan, engine or own)
    except EngineError as error:
        return replace(explained, warnings=(*told, f"kernels were not compared: {error.line}"))
    apart = [one.text for one in broken if any(node in part for part in one.parts)]
    return replace(explained, apart=apart)
