"""``finecast.torch.convert``: a mixed-precision module from a module and example inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from finecast.engines.torch import TorchEngine
from finecast.engines.torch.session import arguments_of
from finecast.frontends.torch import ConvertedModule
from finecast.frontends.torch.converted import own_tensors
from finecast.pipeline.artefact import Destination
from finecast.pipeline.model import RunOptions
from finecast.progress import Progress, silent
from finecast.rules import UserRule
from finecast.rules.policy import DEFAULT_POLICY, Policy
from finecast.subjects.torch.conversion import slow_formats
from finecast.subjects.torch.model import of_module
from finecast.subjects.torch.planning import RuleSet


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
    memory. The plan, with every rule's reason, is ``result.finecast_plan``.

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
    model = of_module(module, arguments, dynamic_shapes=dynamic_shapes, policy=wanted)
    model.rule_set = RuleSet.parse(rule_set)
    model.check_policy(wanted)
    options = RunOptions(user_rules=user_rules or {}, verify=False, progress=progress)
    done = model.convert(Destination(path=None), wanted, options)
    engine = model.runners(None)[0]
    assert isinstance(engine, TorchEngine)
    for text in (*done.warnings, *slow_formats(done.plan, engine)):
        warnings.warn(text, stacklevel=2)
    own_tensors(done.model)
    result: ConvertedModule = done.model
    return result
