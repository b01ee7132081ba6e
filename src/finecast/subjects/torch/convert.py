"""``finecast.torch.convert``: a mixed-precision module from a module and example inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from finecast.engines.torch.autocast import autocast_formats, squared_error
from finecast.engines.torch.kernel_check import flat_inputs, missing_kernels
from finecast.engines.torch.planning import (
    Known,
    RuleSet,
    analysis_of,
    choose,
    compiled_cost,
    device_of,
    formats_to_follow,
    make_torch_planner,
    points_of,
    products_low,
    sensitivities,
)
from finecast.engines.torch.session import Arguments, arguments_of
from finecast.errors import ModelError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import Captured, ConvertedModule
from finecast.frontends.torch.converted import own_tensors
from finecast.frontends.torch.input_check import check_examples
from finecast.frontends.torch.probing import Isolated
from finecast.frontends.torch.reader import hinted_shapes
from finecast.pipeline.subject import UserRules
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.proposing import frontier_of, proposal
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.matching import check_names
from finecast.rules.override import check_overrides
from finecast.rules.policy import DEFAULT_POLICY, Policy, Scope
from finecast.subjects.torch.integers import quantized
from finecast.subjects.torch.source import TorchBuilt, built_of, kept_advice, uses_codes


def convert(
    module: torch.nn.Module | ExportedProgram,
    example_inputs: Sequence[Any] | None = None,
    policy: str | Policy = DEFAULT_POLICY,
    dynamic_shapes: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    user_rules: Mapping[str, UserRule] | None = None,
    rule_set: str = "finecast",
    progress: Progress = silent,
) -> ConvertedModule:
    """Convert a module to mixed precision by one plan over its whole graph.

    Laws: inputs and outputs keep their types; ops that stay fp32 compute as before; ``auto``
    never chooses a format that is slower here; neither the example inputs nor the state of
    ``module`` change, now or when the result runs. The result has tensors of its own, so that
    it stays as it is where ``module`` is trained on. The predicted error of ``auto`` and
    ``like-autocast`` is at most that of ``torch.autocast``: among such plans ``auto`` takes
    the fastest, and ``like-autocast``, with every product low, the one that moves least
    memory. The plan,
    with every rule's reason, is ``result.finecast_plan``.

    Args:
        module: The module (captured in evaluation mode), or an exported program.
        example_inputs: Positional inputs, on which the plan's errors are estimated. May be
            left out for an exported program, which has its own.
        policy: ``SCOPE:FORMAT[,FORMAT...]`` or a Policy.
        dynamic_shapes: As ``torch.export.export`` takes them.
        example_kwargs: Keyword inputs.
        user_rules: Rules by name, as ``--rules`` of the command line takes them.
        rule_set: ``finecast``, or ``raf`` for RAF's lists.
        progress: Told of each step: for int8 the module is compiled, which takes a while.

    Raises:
        ModelError: If the module cannot be captured, or RAF's lists lack an op.
        UsageError: If the policy cannot be read, a module comes without inputs, or an
            override names no op of the module.
    """
    arguments = arguments_of(module, example_inputs, example_kwargs)
    wanted = Policy.of(policy)
    captured = frontend.capture(
        module,
        *arguments,
        dynamic_shapes=dynamic_shapes,
        fold=wanted.scope is not Scope.NONE,
    )
    check_examples(captured.module, captured.program, *arguments)
    rules = tuple((user_rules or {}).items())
    if uses_codes(wanted):
        built, told = quantized(captured, arguments, wanted, rules, progress)
    else:
        built, told = lowered(captured, arguments, wanted, rules, RuleSet.parse(rule_set))
    for text in told:
        warnings.warn(text, stacklevel=2)
    own_tensors(built.model)
    return built.model


def lowered(
    captured: Captured,
    arguments: Arguments,
    policy: Policy,
    rules: UserRules = (),
    rule_set: RuleSet = RuleSet.FINECAST,
) -> tuple[TorchBuilt, tuple[str, ...]]:
    """The captured module converted in floating-point formats, and notes for the user."""
    graph = captured.graph
    check_names(policy, graph)
    check_overrides(graph)
    args = flat_inputs(*arguments)
    device = device_of(captured.module, args)
    followed = formats_to_follow(policy, device)
    unsupported: frozenset[str] = frozenset()
    while True:
        planner = make_torch_planner(
            graph,
            followed.policy,
            known=Known(measured=followed.policy.scope is Scope.AUTO, unsupported=unsupported),
            user_rules=rules,
            rule_set=rule_set,
        )
        if followed.obstacle:
            plan = planner.highest(followed.obstacle)
        else:
            plan = _plan(planner, captured, args, device)
        built = built_of(captured, plan)
        missing = missing_kernels(built.model, *arguments)
        if not missing:
            return built, (*kept_advice(graph, policy), *followed.told)
        if not unsupported:
            _check_runs(captured, args)
        if missing <= unsupported:
            raise ModelError(
                f"the converted module does not run: {', '.join(sorted(missing))}",
                fix="exclude these ops by a rule, and report the module",
            )
        unsupported |= missing


def _check_runs(captured: Captured, args: Sequence[Any]) -> None:
    """Raise ModelError if the module fails as it came, on its own example inputs."""
    try:
        with torch.no_grad():
            Isolated(captured.module).run(*args, enable_io_processing=False)
    except (RuntimeError, NotImplementedError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ModelError(
            f"the module does not run on its example inputs: {first}",
            fix="give inputs on which the module itself runs",
        ) from error


def _plan(planner: Planner, captured: Captured, args: Sequence[Any], device: str) -> Plan:
    """The plan by the scope: ``auto`` and ``like-autocast`` within the error of autocast."""
    policy = planner.policy
    if policy.scope not in (Scope.AUTO, Scope.LIKE_AUTOCAST) or not planner.is_free:
        return planner.lowest()
    points = points_of(planner)
    found = sensitivities(captured, points, policy.formats, args)
    formats = autocast_formats(planner.graph, planner.permissions, policy.formats)
    # If autocast rounds nothing, its error is no limit.
    budget = squared_error(points, found, formats) or math.inf
    if policy.scope is Scope.LIKE_AUTOCAST:
        if budget == math.inf:
            return planner.lowest()
        planner = products_low(planner)
    cost = compiled_cost(
        planner.graph,
        policy,
        device,
        shapes=hinted_shapes(captured.binding),
        binding=captured.binding if policy.scope is Scope.AUTO else None,
    )
    analysis = analysis_of(planner, cost, points, found)
    choice = choose(frontier_of(planner, analysis), budget)
    return proposal(planner, analysis, choice).plan
