"""From a program and a policy to a converted program: what differs from other libraries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finecast.devices.emulation import Emulation
from finecast.engines.base import Feeds
from finecast.engines.exact import Exact
from finecast.engines.probe import speed_of
from finecast.engines.torch import TorchEngine
from finecast.engines.torch.autocast import autocast_formats
from finecast.errors import UsageError
from finecast.frontends.prepared import PreparedModel
from finecast.frontends.torch import TorchPrepared
from finecast.frontends.torch.reader import device_kind
from finecast.native.artefact import Converted
from finecast.native.conversion import Converter, Request
from finecast.native.planning import Judging
from finecast.native.torch.integers import HOW_TO_RUN, check_device, uses_codes
from finecast.native.torch.planning import (
    choose,
    compiled_times,
    judged,
    measured_errors,
    products_low,
)
from finecast.planning.alternatives import explained
from finecast.planning.choices import SAME_TIME
from finecast.planning.plan import Plan
from finecast.planning.planner import Planner
from finecast.planning.problem import predicted_error
from finecast.planning.proposing import frontier_of, predicted_cost, proposal
from finecast.rules.facts import ValueFacts
from finecast.rules.policy import Policy, Scope

if TYPE_CHECKING:
    from finecast.native.torch.model import TorchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConverter(Converter):
    """Converts a program or a module by a policy or a plan."""

    source: TorchModel  # pyright: ignore[reportIncompatibleVariableOverride]  # it is frozen

    @property
    def examples(self) -> Feeds:
        """Inputs on which kernels are tried and errors are estimated."""
        return self.feeds.batches[0] if self.feeds.batches else self.source.examples

    def convert(self, policy: Policy, **options: Any) -> Converted:
        """As ``Converter.convert``, but int8 is refused where each op had to be measured."""
        if uses_codes(policy):
            if policy.scope is Scope.AUTO and not options.get("target"):
                raise UsageError(
                    f"policy {policy.label}: what is converted by it is measured, op by op",
                    fix='use tune, or "matmult:int8" for all products',
                )
            self.progress("observe", 0, 1)
        return Converter.convert(self, policy, **options)

    def _planner(
        self, prepared: PreparedModel, request: Request, facts: Mapping[int, ValueFacts]
    ) -> Planner:
        """The planner without kernels that are missing, and products that run on floats."""
        engine, policy = self.engines[0], request.policy
        if not isinstance(engine, TorchEngine):
            return Converter._planner(self, prepared, request, facts)
        assert isinstance(prepared, TorchPrepared)
        if uses_codes(policy):
            check_device(policy, device_kind(prepared.captured.module))
        how = Judging(
            facts=facts,
            user_rules=request.user_rules,
            measured=policy.scope is Scope.AUTO,
            broken=request.broken,
        )
        planner, told = judged(
            self.source, prepared, policy, engine, how, self.examples, self.progress
        )
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
        measures = policy.scope is Scope.AUTO
        times = compiled_times(planner, prepared, single_kernels=measures)
        exact = Exact.of(self.source.reference(), [self.examples])
        errors = measured_errors(prepared, planner, times, exact)
        analysis = times.analysis(prepared, planner, errors)
        formats = autocast_formats(planner.graph, planner.permissions, policy.formats)
        # If autocast rounds nothing, its error is no limit.
        budget = predicted_error(analysis, formats) or math.inf
        if not measures:
            if budget == math.inf:
                return planner.lowest()
            planner = products_low(planner)
        choice = choose(frontier_of(planner, analysis), budget)
        # The frontier begins with the fastest of the most accurate plans. Where that gains a
        # hair by ops that round nothing, such as masks, the module may as well stay as it is.
        high = planner.highest()
        enough = SAME_TIME * choice.time_s
        if (
            measures
            and not high.low_formats
            and predicted_cost(planner, analysis, high) <= enough
        ):
            return explained(planner, analysis, high, choice.problem)
        return proposal(planner, analysis, choice).plan


def slow_formats(plan: Plan, engine: TorchEngine) -> list[str]:
    """Notes on formats of a plan that gain nothing here."""
    speeds = (speed_of(engine, fmt) for fmt in plan.low_formats if not fmt.runs_on_codes)
    return [f"{s.text}: no speed is gained here" for s in speeds if not s.gains]
