"""A model on one emulated device: its modelled time, and what the emulator needs of it.

Laws: a model's time is the roofline's, its metric the emulation's on all data; casting more
ops never makes the modelled time longer where casts are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final

from finecast.data.workload import Workload
from finecast.devices.emulation import Emulation, Setting, is_relayout
from finecast.devices.targets import Relayout
from finecast.engines.base import Feeds, Session
from finecast.engines.exact import Exact
from finecast.graph import Graph, Node
from finecast.native.orders import OrderTrials
from finecast.numbers.formats import Format
from finecast.ops import by_name
from finecast.ops.flops import Shape
from finecast.planning.cost import RooflineCost
from finecast.planning.plan import Plan
from finecast.progress import Progress
from finecast.rules.facts import ValueFacts

if TYPE_CHECKING:
    from finecast.engines.emulator.session import EmulatorSession
    from finecast.native.emulated import Program

CALIBRATION_FEEDS: Final = 8
"""Calibration batches on which output errors are measured."""
# A byte move writes each 4-byte element as one burst of 64 bytes and reads it in sequence:
# (16 + 1) / 2 times the traffic of a copy. An estimate; the guides say only "slower".
_BYTE_MOVE_TRAFFIC: Final = 8.5


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model on a device, with what all its evaluations share: facts and exact outputs.

    Attributes:
        program: The model as the emulator takes it.
        reference: The fp32 model.
        facts: Facts of the fp32 model's values, by id in ``graph``.
        exact: The fp32 model's outputs on ``feeds``.
    """

    program: Program
    workload: Workload
    reference: Session
    feeds: Sequence[Feeds] = field(init=False)
    facts: Mapping[int, ValueFacts] = field(init=False)
    exact: Exact = field(init=False)

    def __post_init__(self) -> None:
        """Run the fp32 model on calibration data and observe its values."""
        self.feeds = list(islice(self.workload.calibration(), CALIBRATION_FEEDS))
        data = self.workload
        self.exact = Exact.of(self.reference, self.feeds, data.of, data.slices)
        self.facts = self.program.observe(self.feeds)

    @property
    def graph(self) -> Graph:
        """The graph that is emulated."""
        return self.program.graph

    def session(self, emulation: Emulation, setting: Setting) -> EmulatorSession:
        """The model as the device runs it under ``setting``."""
        return self.program.session(emulation, setting)

    def evaluate(self, session: EmulatorSession) -> tuple[float, Mapping[str, float]]:
        """Metric on all data, and relative errors by output on calibration data."""
        errors = self.exact.errors(session)
        return self.workload.evaluate(session.restart(), self.reference), errors

    def computes_fp32(self, emulation: Emulation, setting: Setting) -> bool:
        """Whether the device computes just what fp32 does: nothing need be evaluated.

        An emulated session would differ by an engine's fusions, which no device has.
        """
        if setting.reads or emulation.relayout not in (None, Format.FP32):
            return False
        exact = all(emulation.own_read(n) is Format.FP32 for n in self.graph.float_nodes)
        return exact and not (emulation.relayout and self._reorders_infinities)

    @property
    def _reorders_infinities(self) -> bool:
        """Whether a transpose reads Inf, which a product with the identity does not keep."""
        read = [n.inputs[0] for n in self.graph.float_nodes if is_relayout(n)]
        return any(i in self.facts and self.facts[i].infs for i in read if i is not None)

    @property
    def _shapes(self) -> dict[int, Shape]:
        return {i: f.shape for i, f in self.facts.items()}

    def order_trials(
        self, workload: Workload, reference: Session, progress: Progress
    ) -> OrderTrials:
        """Trials of orders of summation, with the metric of ``workload``."""
        return OrderTrials(
            graph=self.graph,
            shapes=self._shapes,
            workload=workload,
            reference=reference,
            exact=self.exact,
            progress=progress,
        )

    def cost(self, emulation: Emulation) -> RooflineCost:
        """The device's roofline with the observed shapes."""
        return RooflineCost(target=emulation.target, shapes=self._shapes)

    def time_s(self, emulation: Emulation, setting: Setting) -> float:
        """Modelled time of one run under a setting."""
        reads = dict.fromkeys(setting.reads, emulation.format)
        writes = dict.fromkeys(setting.writes, emulation.format)
        cost = self.cost(emulation)
        return modelled_time_s(self.graph, cost, emulation, reads, writes)

    def plan_time_s(self, emulation: Emulation, plan: Plan) -> float:
        """Modelled time of one run of a plan's model."""
        formats = self.program.formats(plan)
        return plan_time_s(self.graph, self.cost(emulation), emulation, formats)


def plan_time_s(
    graph: Graph, cost: RooflineCost, emulation: Emulation, formats: Mapping[int, Format]
) -> float:
    """Seconds for one run of a plan's model; ``formats`` are the plan's, by node id."""
    low = {n: f for n, f in formats.items() if f is not Format.FP32}
    stored = {n: f for n, f in low.items() if f.encodes_results}
    return modelled_time_s(graph, cost, emulation, low, stored)


def modelled_time_s(
    graph: Graph,
    cost: RooflineCost,
    emulation: Emulation,
    reads: Mapping[int, Format],
    writes: Mapping[int, Format],
) -> float:
    """Seconds for one run: each op's roofline, and the casts that are not free.

    ``reads`` and ``writes`` are the formats of the ops that are cast, by node id; others read
    and write fp32.
    """
    stored = _stored_formats(graph, reads, writes)
    ops = sum(
        _op_time_s(graph, cost, emulation, reads.get(n.id, Format.FP32), stored, n)
        for n in graph.nodes
    )
    return ops + _cast_time_s(graph, cost, reads, stored)


def _stored_formats(
    graph: Graph, reads: Mapping[int, Format], writes: Mapping[int, Format]
) -> dict[int, Format]:
    """The format in which each value is stored, by id, where that is not the model's own."""
    stored: dict[int, Format] = {}
    for node in graph.float_nodes:
        if node.id in writes:
            for value in graph.following_outputs(node):
                stored[value.id] = writes[node.id].storage
        if node.id in reads:
            for value in graph.following_inputs(node):
                if value.constant is not None:  # weights are converted ahead of time
                    stored[value.id] = reads[node.id]
    return stored


def _op_time_s(
    graph: Graph,
    cost: RooflineCost,
    emulation: Emulation,
    fmt: Format,
    stored: Mapping[int, Format],
    node: Node,
) -> float:
    engine = cost.target.engine_for(by_name(node.op).kind)
    rate = engine.rate_tflops(fmt) or max(engine.rates_tflops.values())
    by_matmul = Relayout.MATMUL in cost.target.relayouts
    strided = is_relayout(node) and emulation.relayout is None and by_matmul
    traffic = _BYTE_MOVE_TRAFFIC if strided else 1.0
    return cost.kernel_time_s(graph, node, rate, stored, traffic)


def _cast_time_s(
    graph: Graph,
    cost: RooflineCost,
    reads: Mapping[int, Format],
    stored: Mapping[int, Format],
) -> float:
    """Seconds of one cast for each value and each format other than its own that is read."""
    total = 0.0
    for value in graph.values:
        if value.format is not Format.FP32 or value.constant is not None:
            continue
        own = stored.get(value.id, Format.FP32)
        wanted = {
            reads.get(n, Format.FP32).reads.storage
            for n in value.uses
            if any(v.id == value.id for v in graph.following_inputs(graph.nodes[n]))
        }
        total += sum(cost.cast_time_s(value, own, w) for w in wanted if w is not own)
    return total
