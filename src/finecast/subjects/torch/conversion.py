"""From a program and a policy to a converted program: what differs from other libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from finecast.devices.emulation import Emulation
from finecast.engines.probe import speed_of
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.autocast import autocast_formats, squared_error
from finecast.errors import UsageError
from finecast.frontends.prepared import PreparedModel
from finecast.frontends.torch import TorchPrepared
from finecast.frontends.torch.reader import hinted_shapes
from finecast.pipeline.result import Result
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.proposing import frontier_of, proposal
from finecast.progress import Progress, silent
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope
from finecast.subjects.engine.conversion import Converter, Request
from finecast.subjects.torch.integers import HOW_TO_RUN, check_device, with_codes
from finecast.subjects.torch.planning import (
    Judging,
    analysis_of,
    choose,
    compiled_cost,
    device_of,
    judged,
    points_of,
    products_low,
    sensitivities,
)

if TYPE_CHECKING:
    from finecast.subjects.torch.model import TorchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConverter(Converter):
    """Converts a program or a module by a policy or a plan.

    Attributes:
        model: The model.
        leaves: Flattened inputs on which kernels are tried and errors are estimated.
        progress: Told of each step.
        told: Notes for the user, added on the way.
    """

    model: TorchModel
    leaves: Sequence[Any]
    progress: Progress = silent
    told: list[str] = field(default_factory=list[str])

    def convert(self, policy: Policy, **options: Any) -> Result:
        """As ``Converter.convert``."""
        if uses_codes(policy):
            if policy.scope is Scope.AUTO and options.get("target") is None:
                raise UsageError(
                    f"policy {policy.label}: what is converted by it is measured, op by op",
                    fix='use tune, or "matmult:int8" for all products',
                )
            self.progress("observe", 0, 1)
        done = Converter.convert(self, policy, **options)
        return replace(done, warnings=(*done.warnings, *self.told))

    def _planner(
        self, prepared: PreparedModel, request: Request, facts: Mapping[int, ValueFacts]
    ) -> Planner:
        """The planner without kernels that are missing, and products that run on floats."""
        engine, policy = self.engines[0], request.policy
        if not isinstance(engine, TorchEngine):
            return Converter._planner(self, prepared, request, facts)
        assert isinstance(prepared, TorchPrepared)
        if uses_codes(policy):
            check_device(policy, self._device(prepared))

        planner = judged(
            prepared,
            policy,
            engine,
            self.leaves,
            Judging(
                facts=facts,
                user_rules=request.user_rules,
                measured=policy.scope is Scope.AUTO,
                broken=request.broken,
                rule_set=self.model.rule_set,
            ),
        )
        if not uses_codes(policy):
            return planner
        assert prepared.captured is not None
        arguments = self.model.signature.unflattened(self.leaves)
        planner, told = with_codes(prepared.captured, planner, arguments, self.progress)
        runs = any(d.format.runs_on_codes for d in planner.lowest().decisions)
        self.told.extend((*told, *((HOW_TO_RUN,) if runs else ())))
        return planner

    def _choose(
        self,
        prepared: PreparedModel,
        planner: Planner,
        facts: Mapping[int, ValueFacts],
        target: Emulation | None,
    ) -> Plan:
        """The plan by the scope: ``auto`` and ``like-autocast`` within autocast's error."""
        policy = planner.policy
        chosen = policy.scope in (Scope.AUTO, Scope.LIKE_AUTOCAST) and planner.is_free
        if target is not None or not chosen or uses_codes(policy):
            return Converter._choose(self, prepared, planner, facts, target)
        assert isinstance(prepared, TorchPrepared)
        assert prepared.captured is not None
        captured, points = prepared.captured, points_of(planner)
        found = sensitivities(captured, points, policy.formats, self.leaves)
        formats = autocast_formats(planner.graph, planner.permissions, policy.formats)
        # If autocast rounds nothing, its error is no limit.
        budget = squared_error(points, found, formats) or math.inf
        measures = policy.scope is Scope.AUTO
        if not measures:
            if budget == math.inf:
                return planner.lowest()
            planner = products_low(planner)
        cost = compiled_cost(
            planner.graph,
            policy,
            self._device(prepared),
            shapes=hinted_shapes(captured.binding),
            binding=captured.binding if measures else None,
        )
        analysis = analysis_of(planner, cost, points, found)
        choice = choose(frontier_of(planner, analysis), budget)
        return proposal(planner, analysis, choice).plan

    def _device(self, prepared: TorchPrepared) -> str:
        assert prepared.captured is not None
        return device_of(prepared.captured.module, self.leaves)


def uses_codes(policy: Policy) -> bool:
    """Whether ops may read codes: modules are then compiled with frozen weights."""
    return policy.scope is not Scope.NONE and any(f.runs_on_codes for f in policy.formats)


def slow_formats(plan: Plan, engine: TorchEngine) -> list[str]:
    """Notes on formats of a plan that gain nothing here."""
    speeds = (speed_of(engine, fmt) for fmt in plan.low_formats if not fmt.runs_on_codes)
    return [f"{s.text}: the model is smaller, not faster" for s in speeds if not s.gains]
