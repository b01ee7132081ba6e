"""PyTorch programs on emulated devices: ops in the steps that the device runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import torch
from torch.fx import GraphModule

from finecast.devices.emulation import Emulation, is_parameter, setting_of_formats
from finecast.engines.emulator.native_session import NativeEmulatorSession
from finecast.errors import ModelError
from finecast.frontends import torch as frontend
from finecast.frontends.torch import CASTS, Captured, TorchPrepared
from finecast.frontends.torch.capture import port_names, shared_copy
from finecast.frontends.torch.expand import ACCUMULATIONS, ATTENTION, STEP_OF, expand
from finecast.frontends.torch.reader import hinted_shapes, read
from finecast.frontends.torch.restating import free_of_strides
from finecast.graph import Graph, Node
from finecast.numbers.formats import Format
from finecast.pipeline.device import PlanRequest
from finecast.planning.cost import RooflineCost
from finecast.planning.edits import cast_count
from finecast.planning.plan import Plan
from finecast.planning.problem import Analysis
from finecast.rules.facts import facts_in
from finecast.rules.policy import Policy
from finecast.subjects.engine.program import NativeProgram, OnDevice
from finecast.subjects.engine.roundings import analysis_of
from finecast.subjects.torch.planning import measured_errors, units_and_points

if TYPE_CHECKING:
    pass

# The op whose parameters keep their format: its statistics were observed, not learned.
_STATISTICS: Final = "batch_norm"


@dataclass(slots=True, kw_only=True)
class TorchProgram(NativeProgram["TorchModel", TorchPrepared]):
    """A ``Program`` of an exported program, with attention in single steps.

    Where a device rounds sums, accumulations are in single steps, too. In ``graph`` scale and
    shift of norms follow their op's format, because a device's compiler casts them.

    Attributes:
        steps: Ids of the nodes in ``graph`` that each node of the captured graph became, by
            its name.
        fp32_parameters: Nodes whose scale and shift PyTorch keeps in fp32 beside low values.
    """

    steps: Mapping[str, tuple[int, ...]] = field(init=False)
    fp32_parameters: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Write out ops that the device computes in steps.

        Raises:
            ModelError: If the program has control flow, whose bodies are not emulated.
        """
        captured = self._captured
        module = shared_copy(captured.module)
        _check_no_bodies(module)
        with torch.no_grad():
            free_of_strides(module)
            expand(module, ATTENTION)
            if not self.emulation.mixed_accumulation:
                expand(module, ACCUMULATIONS)
        graph, binding = read(module, **port_names(captured.program))
        pairs = zip(captured.binding.nodes, captured.graph.nodes, strict=True)
        names = {fx.name: node.name for fx, node in pairs}
        steps: dict[str, tuple[int, ...]] = {}
        for number, fx in enumerate(binding.nodes):
            own = names[str(fx.meta.get(STEP_OF, fx.name))]
            steps[own] = (*steps.get(own, ()), number)
        self.steps = steps
        kept = {n.id: follows for n in graph.nodes if (follows := _with_parameters(graph, n))}
        self.fp32_parameters = frozenset(kept)
        nodes = (replace(n, follows_in=kept.get(n.id, n.follows_in)) for n in graph.nodes)
        low = replace(graph, nodes=tuple(nodes))
        emulated = replace(captured, module=module, graph=low, binding=binding)
        self.prepared = TorchPrepared(graph=low, source=emulated)

    @property
    def _captured(self) -> Captured:
        return self.source.file.captured(Policy().label)

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by node id; each step of an op has the op's format."""
        return {i: f for name, f in plan.formats.items() for i in self.steps.get(name, ())}

    def plan_session(self, plan: Plan, emulation: Emulation) -> NativeEmulatorSession:
        """A session of the program with the plan's formats."""
        low = {i: f for i, f in self.formats(plan).items() if f is not Format.FP32}
        return NativeEmulatorSession(
            copy=self.prepared.roundable,
            emulation=emulation,
            setting=setting_of_formats(low, emulation, fp32_parameters=self.fp32_parameters),
            formats=low,
        )

    def examine(self, request: PlanRequest) -> TorchOnDevice:
        """Let the rules judge the captured graph.

        Raises:
            UsageError: If the policy names a format that PyTorch's ops do not compute in, or
                an op that the program does not have.
        """
        prepared = replace(self.source.prepare(request.policy), of=CASTS)
        facts = facts_in(prepared.graph, request.facts, self.graph)
        return TorchOnDevice.of(prepared, request, facts)

    def casts(self, plan: Plan) -> int:
        """Number of casts in the plan's module, which is not made for that."""
        captured = self.source.file.captured(plan.policy)
        return cast_count(captured.graph, frontend.planned_edits(captured, plan))


def _check_no_bodies(module: GraphModule) -> None:
    """Raise ModelError for control flow."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target), None), GraphModule):
            raise ModelError(
                "the program has control flow, whose bodies the emulator cannot round",
                where=node.name,
                fix="export the module without torch.cond, while_loop and the like",
            )


def _with_parameters(graph: Graph, node: Node) -> tuple[bool, ...]:
    """Which inputs follow the node's format if scale and shift do, too; else empty.

    Empty if PyTorch's kernel keeps none of them in fp32.
    """
    if node.format is not Format.FP32 or node.op == _STATISTICS:
        return ()
    found = tuple(
        follows
        or (
            value is not None
            and is_parameter(node, index)
            and graph.values[value].format is Format.FP32
        )
        for index, (value, follows) in enumerate(
            zip(node.inputs, node.follows_in, strict=True)
        )
    )
    return found if found != node.follows_in else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOnDevice(OnDevice):
    """A program judged for a device."""

    prepared: TorchPrepared

    def analysis(self) -> Analysis:
        """Times by the roofline, errors by one backward pass."""
        captured, request = self.prepared.captured, self.request
        units, points = units_and_points(self.planner)
        errors = measured_errors(
            self.prepared, self.planner, points, request.feeds[0], request.counted
        )
        shapes = {
            **hinted_shapes(captured.binding),
            **{i: f.shape for i, f in self.facts.items()},
        }
        cost = RooflineCost(target=request.emulation.target, shapes=shapes)
        return analysis_of(self.prepared, self.planner, units, points, errors, cost)
