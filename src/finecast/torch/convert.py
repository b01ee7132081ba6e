"""``convert``: one call from a module to its mixed-precision form."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from finecast.errors import ModelError, UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import Captured
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.plan import Plan
from finecast.policy import Policy, Scope
from finecast.rules import UserRule
from finecast.rules.matching import check_names
from finecast.rules.override import check_overrides
from finecast.torch.kernel_check import flat_inputs, missing_kernels
from finecast.torch.planning import (
    RuleSet,
    TorchPlanner,
    choose,
    device_of,
    look_before_leaping,
    make_torch_planner,
    sensitivities,
)
from finecast.torch.reference import autocast_formats, squared_error
from finecast.torch.session import examples
from finecast.tuner.conversion import kept_types


def convert(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    policy: str | Policy = "auto:bf16",
    dynamic_shapes: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    rule_set: str = "finecast",
) -> GraphModule:
    """A module that computes as one plan over the whole graph states.

    Laws: inputs and outputs keep their types; what stays fp32 computes as before; a format
    that is slower here is never chosen by ``auto``; neither the example inputs nor the state
    of ``module`` change, now or when the result runs. Neither ``auto`` nor ``all`` is
    predicted to be less accurate than ``torch.autocast``: of the plans that are not, ``auto``
    takes the fastest, and ``all``, with every product low, the one that moves least memory.
    The plan, with every rule's reason, is ``result.finecast_plan``.

    Args:
        module: The module (captured in evaluation mode), or an exported program.
        example_inputs: Positional inputs; the plan's errors are estimated on them. May be
            left out for an exported program, which carries its own.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        dynamic_shapes: As ``torch.export.export`` takes them.
        example_kwargs: Keyword inputs.
        user_rules: Rules by name, as ``--rules`` of the command line takes them.
        rule_set: ``finecast``, or ``raf`` for RAF's lists.

    Raises:
        ModelError: If the module cannot be captured, or RAF's lists lack an op.
        UsageError: If the policy cannot be read, a module comes without inputs, or an
            override names no op of the module.
    """
    if example_inputs is None:
        if not isinstance(module, ExportedProgram):
            raise UsageError("a module needs example inputs", fix="give example_inputs")
        example_inputs, example_kwargs = examples(module)
    wanted = Policy.parse(policy) if isinstance(policy, str) else policy
    captured = frontend.capture(
        module,
        example_inputs,
        example_kwargs,
        dynamic_shapes=dynamic_shapes,
        fold=wanted.scope is not Scope.NONE,
    )
    check_names(wanted, captured.graph)
    warn_kept(captured.graph, wanted)
    args = flat_inputs(example_inputs, example_kwargs)
    device = device_of(captured.module, args)
    followed, obstacle = look_before_leaping(wanted, device)
    judges = RuleSet.parse(rule_set)
    check_overrides(captured.graph)
    rules = tuple((user_rules or {}).items())
    unsupported: frozenset[str] = frozenset()
    while True:
        planner = make_torch_planner(
            captured.graph,
            followed,
            device,
            user_rules=rules,
            unsupported=unsupported,
            measured=followed.scope is Scope.AUTO,
            shapes=hinted_shapes(captured.binding),
            binding=captured.binding if followed.scope is Scope.AUTO else None,
            rule_set=judges,
        )
        plan = _plan(planner, captured, args, obstacle)
        result = finish(captured, plan)
        missing = missing_kernels(result, example_inputs, example_kwargs)
        if not missing:
            return result
        if missing <= unsupported:
            raise ModelError(
                f"the converted module does not run: {', '.join(sorted(missing))}",
                fix="exclude these ops by a rule, and report the module",
            )
        unsupported |= missing


def warn_kept(graph: Graph, policy: Policy) -> None:
    """Say of ops in fp64 or a low type that they stay so, and how they would not."""
    if policy.scope is Scope.NONE:
        return
    for text in kept_types(graph, policy).values():
        fix = "convert copy.deepcopy(module).float(), with inputs in fp32"
        warnings.warn(f"{text}: {fix}", stacklevel=3)


def _plan(
    planner: TorchPlanner, captured: Captured, args: Sequence[Any], obstacle: str
) -> Plan:
    if obstacle:
        return planner.highest(obstacle)
    if planner.policy.scope not in (Scope.AUTO, Scope.ALL) or not _is_free(planner):
        return planner.lowest()
    units, points = planner.units()
    if not units.members:
        return planner.highest("the rules leave no op a lower format")
    found = sensitivities(captured, points, planner.policy.formats, args)
    formats = autocast_formats(planner.graph, planner.permissions, planner.policy.formats)
    # Where autocast rounds nothing, there is nothing to be held against.
    budget = squared_error(points, found, formats) or math.inf
    if planner.policy.scope is Scope.ALL:
        if budget == math.inf:
            return planner.lowest()
        planner = planner.products_low()
    choice = choose(planner.choices(units, points, found), budget)
    if budget < math.inf:
        how = f"{choice.how} within torch.autocast's error {math.sqrt(budget):.3g}"
        choice = replace(choice, how=how)
    return planner.proposal(units, choice).plan


def _is_free(planner: TorchPlanner) -> bool:
    return any(len(p.formats) > 1 for p in planner.permissions.values())


def finish(captured: Captured, plan: Plan) -> GraphModule:
    """The module that ``plan`` gives, with the plan attached."""
    result = frontend.apply(captured, plan)
    result.eval()
    result.finecast_plan = plan  # type: ignore[assignment]
    return result
