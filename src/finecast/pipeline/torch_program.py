"""A PyTorch program for the emulation of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from finecast import rules
from finecast.devices.emulation import Emulation
from finecast.engines.base import Feeds, Session
from finecast.engines.emulator import EmulatorEngine
from finecast.engines.emulator.setting import Setting, setting_of_plan
from finecast.engines.emulator.torch_program import (
    PreparedProgram,
    observe_program,
    prepare_program,
)
from finecast.engines.emulator.torch_session import TorchEmulatorSession
from finecast.engines.kernels import kernel_query
from finecast.engines.torch.planning import ENGINE, TorchPlanner, sensitivities
from finecast.engines.torch.session import ModuleSession, Signature, runnable
from finecast.errors import UsageError
from finecast.frontends import torch as frontend
from finecast.frontends.torch.file import ExportedFile
from finecast.frontends.torch.reader import hinted_shapes
from finecast.graph import Graph
from finecast.numbers.formats import Format
from finecast.pipeline.program import Asked, Proposed
from finecast.pipeline.proposing import MAX_STEPS
from finecast.planning.choices import Proposal
from finecast.planning.cost import RooflineCost
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.rules import Context
from finecast.rules.facts import ValueFacts
from finecast.rules.matching import check_names
from finecast.rules.override import active, check_overrides


@dataclass(slots=True, kw_only=True)
class TorchProgram:
    """A ``Program`` of an exported file."""

    file: ExportedFile
    emulation: Emulation
    prepared: PreparedProgram = field(init=False)

    def __post_init__(self) -> None:
        """Write out what the device computes in steps."""
        prepared = prepare_program(self.file.captured, self.emulation)
        # Outputs have the names that the file gives them.
        signature = Signature.of(self.file.program)
        self.prepared = replace(prepared, signature=signature)

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.prepared.graph

    def observe(self, feeds: Sequence[Feeds]) -> dict[int, ValueFacts]:
        """Facts of all float values."""
        return observe_program(self.prepared, feeds)

    def session(
        self, emulation: Emulation, setting: Setting, *, switched: bool = False
    ) -> TorchEmulatorSession:
        """An interpreted program: each can be switched."""
        del switched
        return TorchEmulatorSession(self.prepared, emulation, setting)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by id; a step has its op's."""
        steps = self.prepared.steps
        return {i: f for name, f in plan.formats.items() for i in steps.get(name, ())}

    def plan_session(self, plan: Plan, emulation: Emulation) -> TorchEmulatorSession:
        """The plan's casts, each op in the format that it has there."""
        low = {i: f for i, f in self.formats(plan).items() if f is not Format.FP32}
        setting = Setting(relayout=emulation.relayout is not None)
        for fmt in set(low.values()):
            one = setting_of_plan(
                low,
                replace(emulation, format=fmt),
                fp32_parameters=self.prepared.fp32_parameters,
            )
            setting = replace(
                setting,
                reads=setting.reads | one.reads,
                parameters=setting.parameters | one.parameters,
                writes=setting.writes | one.writes,
            )
        return TorchEmulatorSession(self.prepared, emulation, setting, formats=low)

    def propose(self, asked: Asked) -> Proposed:
        """The frontier of plans, and the plan of everything that may be low.

        Raises:
            UsageError: If the policy names a format that PyTorch's ops do not compute in, or
                what is not in the program.
        """
        for fmt in asked.policy.formats:
            if fmt.operands_only:
                raise UsageError(
                    f"a PyTorch program cannot state {fmt.label}", fix="use bf16 or fp16"
                )
        captured = self.file.captured
        facts = self._facts_in(captured.graph, asked.facts)
        planner = self._planner(asked, facts)
        units, points = planner.units()
        leaves = self.prepared.signature.leaves(asked.feeds[0])
        errors = sensitivities(captured, points, asked.policy.formats, leaves)
        found = planner.choices(units, points, errors, most=MAX_STEPS)
        lowest = Proposal(
            name="lowest",
            plan=planner.lowest(),
            time_s=float("inf"),
            error=sum(float(e.sum()) for e in errors.values()),
        )
        proposals = [*(planner.proposal(units, one) for one in found), lowest]
        return Proposed(planner=planner, proposals=proposals, probes=len(points))

    def _planner(self, asked: Asked, facts: Mapping[int, ValueFacts]) -> TorchPlanner:
        """Rules and roofline of the target, on the graph that plans are of."""
        captured, policy = self.file.captured, asked.policy
        check_names(policy, captured.graph)
        check_overrides(captured.graph)
        context = Context(
            graph=captured.graph,
            policy=policy,
            facts=facts,
            kernels=kernel_query(EmulatorEngine(emulation=asked.emulation)),
            engine=ENGINE,
            user_rules=(*asked.user_rules, *active()),
            measured=True,
        )
        shapes = {
            **hinted_shapes(captured.binding),
            **{i: f.shape for i, f in facts.items()},
        }
        return TorchPlanner(
            graph=captured.graph,
            policy=policy,
            permissions=rules.permit(context),
            cost=RooflineCost(target=asked.emulation.target, shapes=shapes),
        )

    def casts(self, plan: Plan) -> int:
        """The casts in the plan's module."""
        captured = self.file.captured
        return cast_count(captured.graph, frontend.planned_edits(captured, plan))

    def _facts_in(
        self, graph: Graph, facts: Mapping[int, ValueFacts]
    ) -> dict[int, ValueFacts]:
        """Facts of the emulated program's values, by the ids of the captured graph."""
        values = self.graph.values
        names = {v.name: v.id for v in graph.values}
        return {names[values[i].name]: f for i, f in facts.items() if values[i].name in names}


def exact_program(file: ExportedFile) -> Session:
    """The program as it was exported, by PyTorch."""
    signature = Signature.of(file.program)
    return ModuleSession(module=runnable(file.program), signature=signature)
