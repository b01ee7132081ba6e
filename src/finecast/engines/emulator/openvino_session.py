"""OpenVINO models as a device would compute them: rounded by arithmetic, in fp32.

What a device rounds is told by ``wants``. A model is built and compiled for each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import numpy as np

from finecast.devices.emulation import Emulation
from finecast.devices.setting import (
    Setting,
    device_kernels,
    kernel_numbers,
    setting_of_formats,
)
from finecast.engines.base import Array, Feeds, KernelTime, Session, TensorSpec
from finecast.engines.emulator.views import RoundedViews
from finecast.engines.emulator.wants import Into, RoundWants, Wants
from finecast.engines.loading import exact_session
from finecast.errors import UsageError
from finecast.frontends.openvino.reader import OvBinding, read
from finecast.frontends.openvino.rounding import converted, without_infinities
from finecast.frontends.openvino.types import new_constant, numbers_of, take_names
from finecast.graph import Graph, Node, Value
from finecast.numbers.formats import Format
from finecast.numbers.roundmodes import Rounder, Rounding, convert
from finecast.planning.plan import Plan

if TYPE_CHECKING:
    import openvino


def check_emulation(emulation: Emulation) -> None:
    """Raise UsageError for options that are not emulated for OpenVINO models."""
    refused = {
        "stochastic rounding": emulation.rounding is not Rounding.NEAREST_EVEN,
        "accumulation in the low format": not emulation.mixed_accumulation,
        "norms that round before scale and shift": emulation.rounds_normalized,
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(
                f"{what} is not emulated for OpenVINO models",
                where=f"--target {emulation.target.name}",
                fix="leave that option out, or give the model as ONNX",
            )


@final
@dataclass(slots=True, kw_only=True)
class OvEmulatorSession:
    """A model under one setting; ``formats`` are those of nodes that have not emulation's."""

    model: openvino.Model
    emulation: Emulation
    setting: Setting
    formats: Mapping[int, Format] = field(default_factory=dict[int, Format])
    _session: Session = field(init=False)

    def __post_init__(self) -> None:
        """Build the model for the setting."""
        self.apply(self.setting)

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """The model's inputs."""
        return self._session.inputs

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """The model's outputs."""
        return self._session.outputs

    def apply(self, setting: Setting) -> OvEmulatorSession:
        """Cast what ``setting`` says from now on."""
        self.setting = setting
        graph, binding = read(self.model.clone())
        wants = RoundWants(
            graph=graph,
            emulation=self.emulation,
            kernel_of=kernel_numbers(device_kernels(graph, self.emulation)),
            formats=self.formats,
        )
        self._session = exact_session(_Builder(graph, binding, wants, setting).build())
        return self

    def restart(self) -> OvEmulatorSession:
        """Nothing is drawn: every sample is the first."""
        return self

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Run one batch as the device would."""
        return self._session.run(feeds)

    def profile(self, feeds: Feeds, *, repeats: int = 5) -> list[KernelTime]:
        """Nothing: the time that emulation takes says nothing of the device."""
        del feeds, repeats
        return []


def plan_session(
    model: openvino.Model, graph: Graph, plan: Plan, emulation: Emulation
) -> OvEmulatorSession:
    """The plan's casts, each op in the format that it has there."""
    check_emulation(emulation)
    ids = {n.name: n.id for n in graph.nodes}
    formats = {ids[name]: fmt for name, fmt in plan.formats.items()}
    low = {i: f for i, f in formats.items() if f is not Format.FP32}
    setting = setting_of_formats(low, emulation)
    return OvEmulatorSession(model=model, emulation=emulation, setting=setting, formats=low)


@dataclass(slots=True)
class _Builder:
    graph: Graph
    binding: OvBinding
    wants: RoundWants
    setting: Setting

    def build(self) -> openvino.Model:
        for value in self.graph.values:
            if value.format is Format.FP32 and value.constant is None:
                self._round_value(value)
        for node in self.graph.float_nodes:
            for index in range(len(node.inputs)):
                self._round_constant(node, index)
            self._spoil_infinities(node)
        self.binding.model.validate_nodes_and_infer_types()
        return self.binding.model

    def _round_value(self, value: Value) -> None:
        wants = self.wants.value(value)
        port = self.binding.values[value.id]
        entries = {self.binding.entries[n][i]: found for (n, i), found in wants.ports.items()}
        ports = {(e.op.get_friendly_name(), e.index): found for e, found in entries.items()}
        readers = list(port.get_target_inputs())

        def rounding(base: openvino.Output, into: Into) -> openvino.Output:
            return converted(base, self._how(value, into))

        views = RoundedViews(native=port, rounding=rounding, fixed=self.setting)
        for reader in readers:
            key = reader.get_node().get_friendly_name(), reader.get_index()
            new = views.of(ports.get(key, wants.stored))
            if new is port:
                continue
            reader.replace_source_output(new)
            ends = reader.get_node().get_type_name() == "Result"
            if ends and port.get_node().get_type_name() != "Parameter" and port.get_names():
                take_names(port, new)

    def _how(self, value: Value, into: Into) -> Rounder:
        return self.wants.conversion(value, into)

    def _round_constant(self, node: Node, index: int) -> None:
        source = node.inputs[index]
        if source is None or source not in self.binding.constants:
            return
        wants: Wants = self.wants.constant(node, index)
        on = [into for into, bits in wants.items() if self.setting.on(bits)]
        if not on:
            return
        value = self.graph.values[source]
        array = numbers_of(self.binding.constants[source]).astype(np.float32)
        for into in on:
            array = convert(array, self._how(value, into))
        new = new_constant(np.asarray(array, dtype=np.float32), Format.FP32)
        self.binding.entries[node.id][index].port.replace_source_output(new.output(0))

    def _spoil_infinities(self, node: Node) -> None:
        """Inf times the identity's zeros is NaN along the whole vector, unless clamped."""
        if not self.wants.spoils_infinities(node) or not self.setting.relayout:
            return
        emulation = self.wants.emulation
        top = emulation.format.max if emulation.saturate_infinity else None
        given = self.binding.entries[node.id][0].port
        given.replace_source_output(without_infinities(given.get_source_output(), top))
