"""The rules' judgement of a module's ops, with kernels that are missing taken into account."""

from __future__ import annotations

from collections.abc import Mapping

from finecast.engines.torch.kernel_check import missing_kernels
from finecast.engines.torch.planning import Known, make_torch_planner
from finecast.engines.torch.session import Arguments
from finecast.frontends.torch import Captured
from finecast.pipeline.subject import UserRules
from finecast.planning.planner import Planner
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy
from finecast.subjects.torch.source import built_of


def judged(
    captured: Captured,
    arguments: Arguments,
    policy: Policy,
    user_rules: UserRules,
    facts: Mapping[int, ValueFacts] | None = None,
) -> Planner:
    """The planner of ``captured``, for plans that will be measured.

    Ops are judged again until the lowest plan needs no missing kernel.
    """
    unsupported: frozenset[str] = frozenset()
    while True:
        planner = make_torch_planner(
            captured.graph,
            policy,
            known=Known(measured=True, facts=facts or {}, unsupported=unsupported),
            user_rules=user_rules,
        )
        lowest = built_of(captured, planner.lowest()).model
        missing = missing_kernels(lowest, *arguments) - unsupported
        if not missing:
            return planner
        unsupported |= missing
