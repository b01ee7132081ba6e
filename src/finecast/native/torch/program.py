"""PyTorch programs on emulated devices: ops in the steps that the device runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.fx import GraphModule

from finecast.devices.emulation import Emulation, is_parameter
from finecast.engines.emulator.session import EmulatorSession, plan_session
from finecast.engines.exact import Exact
from finecast.errors import ModelError
from finecast.frontends.prepared import PreparedModel
from finecast.frontends.torch import CASTS, CODES, TorchPrepared
from finecast.frontends.torch.capture import port_names, shared_copy
from finecast.frontends.torch.expand import ACCUMULATIONS, ATTENTION, STEP_OF, expand_ops
from finecast.frontends.torch.reader import hinted_shapes, read
from finecast.frontends.torch.restating import free_of_strides
from finecast.graph import Graph, Node
from finecast.native.emulated import EmulatedSubject, OnDevice, Program
from finecast.native.roundings import Times
from finecast.native.torch.planning import measured_errors
from finecast.numbers.formats import Format
from finecast.planning.adjustments import Adjustment
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.planning.sensitivity import Sensitivity
from finecast.rules.policy import Policy

# The op whose parameters keep their format: its statistics were observed, not learned.
_STATISTICS: Final = "batch_norm"


@dataclass(slots=True, kw_only=True)
class TorchProgram(Program):
    """A ``Program`` of an exported program, with attention in single steps.

    Where a device rounds sums, accumulations are in single steps, too. In ``graph`` scale and
    shift of norms follow their op's format, because a device's compiler casts them.

    Attributes:
        adjustments: What is done to operands first.
        steps: Ids of the nodes in ``graph`` that each node of the captured graph became, by
            its name.
        fp32_parameters: Nodes whose scale and shift PyTorch keeps in fp32 beside low values.
    """

    adjustments: Sequence[Adjustment] = ()
    prepared: TorchPrepared = field(init=False)
    steps: Mapping[str, tuple[int, ...]] = field(init=False)
    fp32_parameters: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Write out ops that the device computes in steps.

        Raises:
            ModelError: If the program has control flow, whose bodies are not emulated.
        """
        captured = self.source.file.captured(Policy().label, self.adjustments)
        module = shared_copy(captured.module)
        _check_no_bodies(module)
        with torch.no_grad():
            free_of_strides(module)
            expand_ops(module, ATTENTION)
            if not self.emulation.mixed_accumulation:
                expand_ops(module, ACCUMULATIONS)
        ports = port_names(captured.program)
        graph, binding = read(module, inputs=ports["inputs"], outputs=ports["outputs"])
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

    def formats(self, plan: Plan) -> dict[int, Format]:
        """The plan's formats by node id; each step of an op has the op's format."""
        return {i: f for name, f in plan.formats.items() for i in self.steps.get(name, ())}

    def plan_session(self, plan: Plan, emulation: Emulation) -> EmulatorSession:
        """A session of the program with the plan's formats."""
        if plan.adjustments != self.adjustments:
            other = replace(self, adjustments=plan.adjustments)
            return other.plan_session(plan, emulation)
        return plan_session(
            self.prepared.roundable,
            plan,
            emulation,
            formats=self.formats(plan),
            fp32_parameters=self.fp32_parameters,
        )


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
    following = tuple(
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
    return following if following != node.follows_in else ()


@dataclass(slots=True, kw_only=True)
class TorchEmulatedSubject(EmulatedSubject):
    """A program on a device."""

    def prepared(self, policy: Policy) -> PreparedModel:
        """The program prepared for ``policy``, whose graph has to state products on codes.

        Those in int8 with scales found on data depend on what a CPU's compiler makes of them.
        """
        coded = (f for f in CODES if f is not Format.INT8)
        of = replace(CASTS, states=(*CASTS.states, *coded))
        return replace(self.model.prepare(policy), of=of)

    def judged(self, **parts: Any) -> TorchOnDevice:
        """The program as the rules judged it for the device."""
        return TorchOnDevice(subject=self, **parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOnDevice(OnDevice):
    """A program judged for a device."""

    prepared: TorchPrepared

    def times(self, exact: Exact, *, of_time: bool) -> Times:
        """Times by the roofline, each op by itself; shapes that were not seen are stated."""
        seen = {i: f.shape for i, f in self.facts.items()}
        shapes = hinted_shapes(self.prepared.captured.binding) | seen
        cost = RooflineCost(target=self.subject.emulation.target, shapes=shapes)
        return Times.modelled(self.planner, cost, ())

    def errors(self, times: Times, exact: Exact) -> Mapping[Format, Sensitivity]:
        """Errors by one backward pass."""
        return measured_errors(self.prepared, self.planner, times, exact)
