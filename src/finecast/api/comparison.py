"""Python's verb ``diff``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final, Unpack

from finecast import keywords
from finecast.api.models import Model, plan_or_model
from finecast.arguments import checked, group_of
from finecast.diagnosis.difference import Difference, Side, difference
from finecast.native.model import OpenedModel, ReadOptions
from finecast.planning.plan import Plan

_NO_PORTS: Final = (
    "the plan is of an earlier version of finecast: which of an op's outputs another op reads"
    " is not compared"
)


@checked(ReadOptions)
def diff(
    before: Plan | Model, after: Plan | Model, **options: Unpack[keywords.ReadingKeywords]
) -> Difference:
    """What differs between two plans, two models, or a plan and a new version of its model.

    Ops are matched by name, else by structure: models may be exports of one net by other
    tools or of other formats. Of a plan and a model the result says what ``apply`` would do.

    Args:
        before: A plan or its path, or a model or its path.
        after: The same.
        options: ``trust``, for models in files that bring code.

    Raises:
        FinecastError: If a plan or a model cannot be read.
    """
    how = group_of(ReadOptions, options)
    first, second = plan_or_model(before, how), plan_or_model(after, how)
    if isinstance(first, Plan) and not isinstance(second, Plan):
        placement = second.placement(first)
        placed = Side.of_plan(placement.plan, second.name)
        placed = replace(placed, graph=second.read_graph())
        differing = difference(Side.of_plan(first, _named(before)), placed)
        portless = not any(op.results for op in first.structure)
        if portless and first.model != placement.plan.model:
            differing = replace(differing, declared=(*differing.declared, _NO_PORTS))
        return replace(differing, placement=placement)
    return difference(_side(first, _named(before)), _side(second, _named(after)))


def _named(given: Plan | Model) -> str:
    """What a plan or a model is called: its path, if one was given."""
    return str(given) if isinstance(given, str | Path) else type(given).__name__


def _side(given: Plan | OpenedModel, name: str) -> Side:
    plan = isinstance(given, Plan)
    return Side.of_plan(given, name) if plan else Side.of_graph(given.read_graph(), name)
