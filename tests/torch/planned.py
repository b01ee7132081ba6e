"""What converted modules carry, with its type."""

from __future__ import annotations

from torch import nn

from finecast.planning.plan import Plan


def plan_of(module: nn.Module) -> Plan:
    """The plan that ``convert`` or ``tune`` attached to its result."""
    plan = module.finecast_plan
    assert isinstance(plan, Plan)
    return plan
